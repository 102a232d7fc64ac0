"""Export of a drafter to another project's format: written aside, read back, compared, and only then put in place."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from ..checkpoints import CONFIG_NAME, WRITERS
from ..checkpoints.capabilities import CAPABILITIES, PARTS, copied_parts, refusals
from ..models.drafter import Drafter
from ..models.loading import default_generation_config
from .comparison import require_same


# Folders that publishing and evaluating put beside the weights; they can be made again.
PARTS_OF_A_CHECKPOINT = ("custom_generate", "plots")


def export(drafter: Drafter, folder: str | os.PathLike, format: str = "hf-dspark", force: bool = False) -> Path:
    """
    Writes a drafter in the format of one of the projects that we know.

    Args:
        drafter (`Drafter`): The drafter. Formats that store copies of the target's embedding or LM head need it
            attached to its target.
        folder (`str`): Where to; created with its parents.
        format (`str`, *optional*, defaults to `"hf-dspark"`): One of `checkpoints.capabilities.CAPABILITIES`.
        force (`bool`, *optional*, defaults to `False`): Whether a checkpoint that is there already is replaced.

    Returns:
        `Path`: the folder.

    Raises:
        FileExistsError: If the folder is not empty and not to be replaced.
        ValueError: If the format can't carry this drafter, or the copy read back is not the same.
    """
    folder = Path(folder)
    require_carried(drafter, format)
    _require_free(folder, force)
    with _put_in_place(folder) as aside:
        _write(drafter, aside, format)
        require_same(drafter, aside)
    return folder


def require_carried(drafter: Drafter, format: str) -> None:
    """
    Refuses what a format can't carry, by name.

    Raises:
        ValueError: Naming the reasons.
    """
    if format not in CAPABILITIES:
        raise ValueError(f"Unknown format {format!r}; available: {', '.join(CAPABILITIES)}.")
    reasons = refusals(drafter.config, format)
    if reasons:
        others = [name for name in CAPABILITIES if not refusals(drafter.config, name)]
        raise ValueError(
            f"The format {format!r} can't carry this drafter: {'; '.join(reasons)}. "
            f"Formats that can: {', '.join(others)}."
        )
    copies = copied_parts(drafter.config, format)
    if copies and not drafter.is_attached:
        parts = " and ".join(PARTS[part] for part in copies)
        raise ValueError(
            f"The format {format!r} stores copies of the target's {parts}, which this drafter borrows. Call "
            "`drafter.attach(target)` first (on the command line: --target)."
        )
    if format != "hf-dspark" and not drafter.config.vocab_size:
        raise ValueError(
            f"The format {format!r} names the size of the vocabulary, which this checkpoint leaves to its target. "
            "Call `drafter.attach(target)` first (on the command line: --target)."
        )


def _require_free(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. Name a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not force:
        raise FileExistsError(f"{folder} is not empty. Name another folder, or replace it with force=True (--force).")
    if not (folder / CONFIG_NAME).is_file():
        raise FileExistsError(
            f"{folder} holds no checkpoint (no {CONFIG_NAME}), so it is not replaced. Empty it first."
        )
    others = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in PARTS_OF_A_CHECKPOINT)
    if others:
        raise FileExistsError(
            f"{folder} holds more than a checkpoint ({', '.join(others)}), and that would be lost. Move it away first."
        )


@contextmanager
def _put_in_place(folder: Path) -> Iterator[Path]:
    """A folder beside the destination, which takes its name at the end, or is gone if anything fails."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (folder.with_name(f".{folder.name}-{kind}-{uuid.uuid4().hex[:8]}") for kind in ("new", "old"))
    aside.mkdir()
    try:
        yield aside
        if folder.exists():
            folder.rename(old)
        try:
            aside.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write(drafter: Drafter, folder: Path, format: str) -> None:
    if format == "hf-dspark":
        drafter.save_pretrained(folder)
        return
    config, writer = drafter.config, WRITERS[format]
    weights = writer.write_weights(_state_dict(drafter, format), config)
    fields = writer.write_config(config, weights.keys()) | {"dtype": str(drafter.dtype).removeprefix("torch.")}
    (folder / CONFIG_NAME).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(weights, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})
    # These formats have no decoding settings, nor mostly EAGLE-3's number of drafts; beside them we read ours.
    default = default_generation_config(config).to_dict()
    if config.model_type == "eagle3" or drafter.generation_config.to_dict() != default:
        drafter.generation_config.save_pretrained(folder)


def _state_dict(drafter: Drafter, format: str) -> dict[str, torch.Tensor]:
    state_dict = {key: tensor.detach().cpu().contiguous() for key, tensor in drafter.state_dict().items()}
    copies = copied_parts(drafter.config, format)
    if "embed_tokens" in copies:
        state_dict["embed_tokens.weight"] = _copy(drafter._target.embedding.weight, drafter)
    if "lm_head" in copies:
        state_dict["lm_head.weight"] = _copy(drafter.head_weight(), drafter)
    return state_dict


def _copy(weight: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    return weight.detach().to("cpu", drafter.dtype, copy=True).contiguous()
