"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option


# A pair to run.
TargetOption = Annotated[
    str | None,
    Option(
        help="The target: a folder, a Hub id, or `embedded` (SmolLM2-135M-Instruct).",
        show_default="what the drafter names",
    ),
]
DrafterOption = Annotated[
    str | None, Option(help="Its drafter: a folder, a Hub id, or `embedded`.", show_default="embedded")
]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16"],
    Option(help="Number type of the weights; auto takes the one they were saved in."),
]

# What goes into a model card.
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
