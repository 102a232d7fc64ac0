"""`hf-dspark card`: the model card of a drafter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Argument, Option


# Shared with `hf-dspark publish`.
ResultsOption = Annotated[
    Path | None, Option(help="What `hf-dspark evaluate` wrote: a folder, or its results.json.", show_default=False)
]
BaseModelOption = Annotated[
    str | None, Option(help="Hub id of the target.", show_default="the one that the checkpoint names")
]
LicenseOption = Annotated[
    str | None, Option(help="The Hub's identifier of the licence, such as apache-2.0.", show_default=False)
]
LanguageOption = Annotated[list[str] | None, Option(help="Language code, such as en; repeatable.", show_default=False)]
DatasetOption = Annotated[
    list[str] | None, Option(help="Hub id of a dataset it was trained on; repeatable.", show_default=False)
]
TagOption = Annotated[list[str] | None, Option(help="A further tag; repeatable.", show_default=False)]
ThinkingOption = Annotated[
    bool | None,
    Option(
        "--thinking/--no-thinking",
        help="Whether thinking mode was on in training, where the record doesn't say.",
        show_default=False,
    ),
]
ForceOption = Annotated[
    bool, Option("--force", help="Replace a card that was not made here, or was edited outside its regions.")
]


def card(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The drafter's folder.")],
    results: ResultsOption = None,
    repo_id: Annotated[
        str | None, Option(help="The Hub repository that it is published as, owner/name.", show_default=False)
    ] = None,
    base_model: BaseModelOption = None,
    license: LicenseOption = None,
    language: LanguageOption = None,
    dataset: DatasetOption = None,
    tag: TagOption = None,
    thinking: ThinkingOption = None,
    force: ForceOption = False,
) -> None:
    """
    Write the model card of the drafter in FOLDER, or make it anew.

    It is made from the files in FOLDER: the checkpoint, the record of its training, results of an evaluation. What
    they don't say is said to be missing, unless an option says it. What you write between `by hand` and `end of` in
    the card stays.
    """
    from transformers.utils.logging import disable_progress_bar

    from ..hub.card import CardFacts, copy_results, write_card
    from ..hub.escaping import printable

    disable_progress_bar()
    facts = CardFacts(repo_id, base_model, license, language, dataset, tag, thinking)
    if results is not None:
        copy_results(results, folder)
    file = write_card(folder, facts, force)
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(printable(f"{file} is written.")))
    if missing := _missing(file.read_text(encoding="utf-8")):
        console.print(Text(f"Not known, and said so in it: {', '.join(missing)}."))


def _missing(text: str) -> list[str]:
    told = {
        "licence": "- Licence: not recorded",
        "languages": "- Languages: not recorded",
        "target": "not known on the Hub",
        "training": "No record of the training",
        "thinking mode": "Thinking mode: not recorded",
        "evaluation": "No results of",
    }
    return [name for name, sentence in told.items() if sentence in text]
