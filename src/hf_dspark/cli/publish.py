"""`hf-dspark publish`: a drafter's folder becomes a repository on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from .options import (
    BaseModelOption,
    DatasetOption,
    ForceOption,
    LanguageOption,
    LicenseOption,
    ResultsOption,
    TagOption,
    ThinkingOption,
)


if TYPE_CHECKING:
    from ..hub.publishing import Publication


def publish(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The drafter's folder.")],
    repo_id: Annotated[
        str, Argument(metavar="REPO_ID", help="The repository, owner/name; created if it is not there.")
    ],
    dry_run: Annotated[bool, Option("--dry-run", help="Send nothing; show what would be sent.")] = False,
    private: Annotated[
        bool | None,
        Option("--private/--public", help="Visibility of a new repository.", show_default="the account's default"),
    ] = None,
    revision: Annotated[str | None, Option(help="The branch.", show_default="main")] = None,
    create_pr: Annotated[bool, Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, Option(help="Message of the commit.", show_default=False)] = None,
    results: ResultsOption = None,
    base_model: BaseModelOption = None,
    license: LicenseOption = None,
    language: LanguageOption = None,
    dataset: DatasetOption = None,
    tag: TagOption = None,
    thinking: ThinkingOption = None,
    force: ForceOption = False,
) -> None:
    """
    Publish the drafter in FOLDER on the Hub as REPO_ID, with a model card, in one commit.

    Log in first with `hf auth login`. FOLDER stays as it is; see `hf-dspark card` for a card to write in. If the
    upload fails, run the command again: what has been uploaded is not sent twice.
    """
    from transformers.utils.logging import disable_progress_bar

    from ..hub.pairs import drafter_folder
    from ..hub.publishing import publish_drafter

    folder = Path(drafter_folder(str(folder)))
    disable_progress_bar()
    publication = publish_drafter(
        folder,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=message,
        dry_run=dry_run,
        results=results,
        force=force,
        base_model=base_model,
        license=license,
        languages=language,
        datasets=dataset,
        tags=tag,
        thinking=thinking,
    )
    _show(publication)


def _show(publication: Publication) -> None:
    from ..hub.escaping import printable

    console = Console(soft_wrap=True, highlight=False)
    if publication.commit is not None:
        address = publication.commit.pr_url or publication.commit.commit_url
        console.print(Text(printable(f"{len(publication.files)} files are published: {address}")))
        return
    visibility = {True: "private", False: "public", None: "as the account's default has it"}[publication.private]
    console.print(
        Text(f"Nothing is sent. To {publication.repo_id} ({publication.revision}; {visibility}) would go:\n")
    )
    console.print(_files_table(publication))
    if publication.left_out:
        console.print(Text(printable(f"\nNot a part of it, and left out: {', '.join(publication.left_out)}.")))
    if publication.removed:
        console.print(Text(printable(f"\nThere from an earlier time, and removed: {', '.join(publication.removed)}.")))
    for note in publication.notes:
        console.print(Text(printable(f"\n{note}")))
    console.print(Text(f"\nThe card:\n\n{printable(publication.card)}"))


def _files_table(publication: Publication) -> Table:
    from ..hub.escaping import printable

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for name, size in publication.files.items():
        table.add_row(Text(printable(name)), f"{size:,} bytes")
    return table
