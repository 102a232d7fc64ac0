"""`hf-dspark card`: the model card of a drafter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
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

    from ..hub.card import CardFacts, write_card
    from ..hub.escaping import printable
    from ..hub.pairs import drafter_folder

    folder = Path(drafter_folder(str(folder)))
    disable_progress_bar()
    facts = CardFacts(repo_id, base_model, license, language, dataset, tag, thinking)
    file = write_card(folder, facts, force, results=results)
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
