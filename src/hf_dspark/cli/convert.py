"""`hf-dspark convert`: a drafter in another project's format."""

from __future__ import annotations

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
        f"- **{row['format']}**: " + ". ".join(f"{name}: {row[name]}" for name in NAMES.values() if row[name] != "no")
        for row in table()
    )
    return f"{convert.__doc__}\n\nWhat each format can carry:\n\n" + "\n".join(lines)


def convert(
    source: Annotated[str, Argument(metavar="SRC", help="The drafter: a folder or Hub id, in any format we read.")],
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
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    _require_apart(Path(source), Path(destination))
    drafter = load_as_stored(source)
    came_from = drafter.stored_format
    if target:
        _attach(drafter, target)
    folder = drafter.export(destination, format=to, force=force)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    Console(soft_wrap=True).print(Text(f"{folder}: {came_from} to {to}, {size:.1f} MB, read back and compared."))


def load_as_stored(checkpoint: str) -> Drafter:
    """A drafter with its weights as the files hold them, whatever type its config names."""
    from ..auto import AutoDrafter
    from ..checkpoints import weights_dtype
    from ..models.adapters import adapter_base

    dtype = weights_dtype(adapter_base(checkpoint, {}) or checkpoint)
    return AutoDrafter.from_pretrained(checkpoint, dtype=dtype)


def _require_apart(source: Path, destination: Path) -> None:
    source, destination = source.resolve(), destination.resolve()
    if source.is_dir() and source in (destination, *destination.parents):
        raise ValueError(f"{destination} is, or is inside, the checkpoint to convert. Name a folder beside it.")


def _attach(drafter: Drafter, target: str) -> None:
    from transformers import AutoModelForCausalLM

    drafter.attach(AutoModelForCausalLM.from_pretrained(target, dtype="auto"))
    drafter.config.target_name_or_path = target
