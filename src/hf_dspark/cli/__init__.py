"""The `hf-dspark` command: one file a subcommand."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from typer import Typer


__all__ = ["build_app", "main"]

HELP = """Make a language model write faster, without changing a word of what it writes.

A small drafter guesses the next few tokens, and the target model checks all the guesses in one forward pass. What
it agrees with is kept, so one pass gives several tokens.

Start with `hf-dspark demo`."""


def build_app() -> Typer:
    """
    Put the subcommands together.

    Returns:
        `typer.Typer`: the application, for `main` and for tests.
    """
    from typer import Typer

    from .calibrate import calibrate
    from .card import card
    from .compare import compare
    from .convert import convert, convert_help
    from .demo import demo
    from .evaluate import evaluate
    from .generate import generate
    from .inspect import inspect
    from .profile import profile
    from .publish import publish
    from .regenerate import regenerate
    from .show_data import show_data
    from .space import space
    from .train import SETTINGS, train
    from .variadic import VariadicCommand

    app = Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.command()(demo)
    app.command()(generate)
    app.command(help=convert_help())(convert)
    app.command()(inspect)
    app.command()(profile)
    app.command()(calibrate)
    app.command(cls=VariadicCommand)(evaluate)
    app.command()(compare)
    app.command()(regenerate)
    app.command()(show_data)
    app.command(context_settings=SETTINGS)(train)
    app.command()(card)
    app.command()(publish)
    app.command()(space)
    return app


def main() -> None:
    """Run the `hf-dspark` command; what the user can mend is told in one line, without a traceback."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise SystemExit(f'hf-dspark: {error.name} is missing. Install it: pip install "hf-dspark[cli]"') from None
    from safetensors import SafetensorError

    try:
        build_app()()
    except (ImportError, OSError, SafetensorError, ValueError) as error:
        from ..hub.escaping import printable

        raise SystemExit(f"hf-dspark: {printable(error)}") from error
