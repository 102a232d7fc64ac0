"""`hf-dspark space`: a page on the Hub where anyone can try a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, BadParameter, Option


if TYPE_CHECKING:
    from ..hub.space import SpacePlan


def space(
    drafter: Annotated[str, Argument(metavar="DRAFTER", help="The drafter's Hub id, owner/name.")],
    repo_id: Annotated[
        str | None, Option("--to", help="Id of the Space, owner/name.", show_default="DRAFTER-demo")
    ] = None,
    target: Annotated[
        str | None, Option(help="The target's Hub id.", show_default="the one that the drafter names")
    ] = None,
    title: Annotated[str | None, Option(help="Heading of the page.", show_default="names the drafter")] = None,
    variable: Annotated[
        list[str] | None,
        Option(help="A setting of the page as NAME=VALUE, such as DSPARK_MAX_NEW_TOKENS=512; may be repeated."),
    ] = None,
    package: Annotated[
        str | None,
        Option(help="What pip installs there as hf-dspark.", show_default="this version's release on PyPI"),
    ] = None,
    private: Annotated[
        bool | None,
        Option("--private/--public", help="Visibility of a new Space.", show_default="the account's default"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Send nothing; show what would be sent.")] = False,
) -> None:
    """
    Make a Space for DRAFTER on the Hub: a page with a chat and a race against plain decoding. Or bring it up to date.

    Log in first with `hf auth login`. If it fails on the way, run the command again.
    """
    from ..hub.space import publish_space

    variables = dict(_name_and_value(text) for text in variable or [])
    plan = publish_space(drafter, repo_id, target, title, variables, package, private, dry_run=dry_run)
    _show(Console(soft_wrap=True, highlight=False), plan)


def _name_and_value(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise BadParameter(f"{text!r} is not of the form NAME=VALUE.")
    return name, value


def _show(console: Console, plan: SpacePlan) -> None:
    if plan.url:
        console.print(Text(f"{len(plan.files)} files and {len(plan.variables)} variables are at {plan.url}"))
        if plan.removed:
            console.print(Text(f"Removed from the Space, as no longer given: {', '.join(plan.removed)}."))
        console.print(Text("The Hub builds the Space now, which takes some minutes."))
        if plan.needs_token:
            console.print(Text("The drafter is private: give the Space a secret HF_TOKEN that may read it."))
        return
    console.print(Text(f"Nothing is sent. To the Space {plan.repo_id} would go:\n"))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, size in plan.files.items():
        table.add_row(Text(name), f"{size:,} bytes")
    console.print(table)
    console.print(Text("\nVariables:\n"))
    for name, value in plan.variables.items():
        console.print(Text(f"{name}={value!r}"))
    console.print(Text("\nOther DSPARK_ variables that the Space has by now would be removed."))
    console.print(Text(f"\nrequirements.txt:\n\n{plan.requirements}\nREADME.md:\n\n{plan.readme}"))
