"""The `hf-dspark` command: one file a subcommand."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from typer import Typer


__all__ = ["build_app", "main"]

HELP = """Make a language model write faster, without changing a word of what it writes.

A small *drafter* guesses the next few tokens, and the *target* model checks all the guesses in one forward pass. What
it agrees with is kept, so one pass gives several tokens.

Start with `hf-dspark demo`."""


def build_app() -> Typer:
    """
    Put the subcommands together.

    Returns:
        `typer.Typer`: the application, for `main` and for tests.
    """
    from typer import Typer

    from .convert import convert, convert_help
    from .demo import demo
    from .generate import generate
    from .inspect import inspect

    app = Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
    )
    app.command()(demo)
    app.command()(generate)
    app.command(help=convert_help())(convert)
    app.command()(inspect)
    return app


def main() -> None:
    """Run the `hf-dspark` command; what the user can mend is told in one line, without a traceback."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise SystemExit(f'hf-dspark: {error.name} is missing. Install it: pip install "hf-dspark[cli]"') from None
    try:
        build_app()()
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"hf-dspark: {error}") from error
