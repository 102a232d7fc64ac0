"""Options that take several values at once: `--tasks gsm8k mbpp` as well as `--tasks gsm8k --tasks mbpp`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class VariadicCommand(TyperCommand):
    """A command without positional arguments, whose repeatable options take all values up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        spread: list[str] = []
        option = None
        for arg in args:
            if arg in names:
                option, is_first = arg, True
            elif option and not arg.startswith("-"):
                if not is_first:
                    spread.append(option)
                is_first = False
            else:
                option = None
            spread.append(arg)
        return super().parse_args(ctx, spread)
