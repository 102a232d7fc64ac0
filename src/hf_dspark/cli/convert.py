"""`hf-dspark convert`: a drafter in another project's format."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ..checkpoints.capabilities import table
from ..models.configuration_drafter import NAMES


if TYPE_CHECKING:
    from ..models.drafter import Drafter


def convert_help() -> str:
    """The help text, with what each format can carry."""
    lines = (
        f"{row['format']}: " + ". ".join(f"{name}: {row[name]}" for name in NAMES.values() if row[name] != "no")
        for row in table()
    )
    return f"{cleandoc(convert.__doc__ or '')}\n\nWhat each format can carry:\n\n" + "\n\n".join(lines)


def convert(
    source: Annotated[str, Argument(metavar="SRC", help="The drafter, or adapters of one: a folder or Hub id.")],
    destination: Annotated[str, Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[
        Literal["hf-dspark", "deepspec", "speculators", "sglang", "zlab"],
        Option(help="The format; speculators is what vLLM serves."),
    ],
    target: Annotated[
        str | None,
        Option(
            help="The drafter's target: a folder or Hub id. Needed by formats that store copies of its embedding or "
            "LM head, and by those that leave them out, to tell a copy from a head of the drafter's own."
        ),
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace a drafter that is there already.")] = False,
) -> None:
    """
    Write the drafter SRC to the folder DST in another format.

    The result is read back and compared with SRC before it takes the name DST; if anything fails, nothing is left.
    Adapters are merged into their base drafter on the way: `--to hf-dspark` makes a drafter like any other of them.
    """
    from transformers.utils.logging import disable_progress_bar

    from ..hub.pairs import drafter_folder
    from ..models.adapters import adapter_base

    disable_progress_bar()
    source = drafter_folder(source)
    _require_apart(Path(source), Path(destination))
    if base := adapter_base(source, {}):
        _require_apart(Path(base), Path(destination))
    drafter = load_as_stored(source)
    came_from = drafter.stored_format
    if base:
        came_from = f"{came_from} merged into {base}"
        drafter.merge_adapters()
    if target:
        _attach(drafter, target)
    folder = drafter.export(destination, format=to, force=force)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    Console(soft_wrap=True).print(Text(f"{folder}: {came_from} to {to}, {size:.1f} MB, read back and compared."))


def load_as_stored(checkpoint: str) -> Drafter:
    """A drafter with its weights, and adapters, as the files hold them, whatever type its config names."""
    from torch import promote_types

    from ..auto import AutoDrafter
    from ..checkpoints import weights_dtype
    from ..models.adapters import adapter_base, adapters_dtype

    base = adapter_base(checkpoint, {})
    dtype = weights_dtype(base or checkpoint)
    if base:
        dtype = promote_types(dtype, adapters_dtype(checkpoint))
    return AutoDrafter.from_pretrained(checkpoint, dtype=dtype)


def _require_apart(source: Path, destination: Path) -> None:
    source, destination = source.resolve(), destination.resolve()
    if source.is_dir() and source in (destination, *destination.parents):
        raise ValueError(f"{destination} is, or is inside, the checkpoint to convert. Name a folder beside it.")


def _attach(drafter: Drafter, target: str) -> None:
    from transformers import AutoModelForCausalLM

    from ..hub.pairs import target_folder
    from ..origins import hub_origin

    folder = target_folder(target)
    drafter.attach(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
    drafter.config.target_name_or_path = hub_origin(folder) or folder
