"""Export of a drafter to another project's format: written aside, read back, compared, and only then put in place."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..checkpoints import CONFIG_NAME, WRITERS, drafter_type
from ..checkpoints.capabilities import CAPABILITIES, copied_parts, needs_target, refusals
from .comparison import require_same
from .loading import TRAINING_RECORD, default_generation_config, save_training_record


if TYPE_CHECKING:
    from .drafter import Drafter

# What checkpoints consist of, with what publishing and evaluating put beside them and can make again. Cards and
# licences are not among it: people write into them.
REPLACEABLE = (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TRAINING_RECORD,
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "custom_generate/generate.py",
    "plots/*.png",
)


def export(drafter: "Drafter", folder: str | os.PathLike, format: str = "hf-dspark", force: bool = False) -> Path:
    """
    Writes a drafter in the format of one of the projects that we know.

    Args:
        drafter (`Drafter`): The drafter. Formats that store copies of the target's embedding or LM head need it
            attached to its target.
        folder (`str`): Where to; created with its parents.
        format (`str`, *optional*, defaults to `"hf-dspark"`): One of `checkpoints.capabilities.CAPABILITIES`.
        force (`bool`, *optional*, defaults to `False`): Whether a drafter that is there already is replaced.

    Returns:
        `Path`: the folder.

    Raises:
        FileExistsError: If the folder is not empty and not to be replaced, or holds something else than a drafter.
        ValueError: If the format can't carry this drafter, or the copy read back is not the same.
    """
    folder = Path(folder)
    require_carried(drafter, format)
    _require_free(drafter, folder, force)
    with _put_in_place(folder) as aside:
        _write(drafter, aside, format)
        require_same(drafter, aside)
    return folder


def require_carried(drafter: "Drafter", format: str) -> None:
    """
    Refuses what a format can't carry, by name.

    Raises:
        ValueError: Naming the reasons.
    """
    if format not in CAPABILITIES:
        raise ValueError(f"Unknown format {format!r}; available: {', '.join(CAPABILITIES)}.")
    reasons = refusals_of_any_format(drafter)
    if reasons:
        raise ValueError(f"This drafter can't be exported: {'; '.join(reasons)}.")
    reasons = refusals(drafter.config, format)
    if reasons:
        others = [name for name in CAPABILITIES if not refusals(drafter.config, name)]
        raise ValueError(
            f"The format {format!r} can't carry this drafter: {'; '.join(reasons)}. "
            f"Formats that can: {', '.join(others)}."
        )
    needed = needs_target(drafter.config, format)
    if needed and not drafter.is_attached:
        raise ValueError(
            f"The format {format!r} {needed}. Call `drafter.attach(target)` first (on the command line: --target)."
        )


def refusals_of_any_format(drafter: "Drafter") -> list[str]:
    """Why no format can carry a drafter as it is, ours included; none if all is well."""
    if drafter.has_adapters:
        return ["it has adapters, which no format holds: call `drafter.merge_adapters()`, and save the result"]
    floats = {key: tensor for key, tensor in drafter.state_dict().items() if tensor.is_floating_point()}
    reasons, types = [], sorted({str(tensor.dtype) for tensor in floats.values()})
    if len(types) > 1:
        reasons.append(f"its weights are of the types {', '.join(types)}, and a config names one: call `drafter.to`")
    # NaN spreads to both ends, without a mask as large as the tensor.
    damaged = [key for key, tensor in floats.items() if not torch.stack(tensor.detach().aminmax()).isfinite().all()]
    if damaged:
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        reasons.append(f"{', '.join(damaged[:3])}{more} holds NaN or infinity: the drafter is damaged")
    return reasons


def _require_free(drafter: "Drafter", folder: Path, force: bool) -> None:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise FileExistsError(f"{there} is a file, so that {folder} can't be a folder. Name another.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not force:
        raise FileExistsError(f"{folder} is not empty. Name another folder, or replace it with force=True (--force).")
    config = drafter.config
    for what, name in (("the drafter to export", config.name_or_path), ("its target", config.target_name_or_path)):
        if name and Path(name).is_dir() and folder.samefile(name):
            raise FileExistsError(f"{folder} is {what}, so it is not replaced. Name another folder.")
    _require_drafter(folder)


def _require_drafter(folder: Path) -> None:
    """Refuses to replace anything but a drafter's checkpoint."""
    try:
        drafter_type(folder)
    except (OSError, ValueError) as error:
        raise FileExistsError(f"{folder} holds no drafter, so it is not replaced. Name another folder.") from error
    known = {path for pattern in REPLACEABLE for path in folder.glob(pattern)}
    known |= {path.parent for path in known}
    others = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path not in known)
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise FileExistsError(
            f"{folder} holds more than a checkpoint ({', '.join(others[:5])}{more}), and that would be lost. Move it "
            "away first."
        )


@contextmanager
def _put_in_place(folder: Path) -> Iterator[Path]:
    """A folder beside the destination, which takes its name at the end, or is gone if anything fails."""
    # Of a link, what it points to is replaced.
    folder = folder.resolve()
    new_parents = [parent for parent in folder.parents if not parent.exists()]
    aside, old = (folder.with_name(f".{folder.name}-{kind}-{uuid.uuid4().hex[:8]}") for kind in ("new", "old"))
    try:
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            folder.rename(old)
        try:
            aside.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # somebody else may have put something there
                parent.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write(drafter: "Drafter", folder: Path, format: str) -> None:
    if format == "hf-dspark":
        drafter.save_pretrained(folder)
        return
    config, writer = drafter.config, WRITERS[format]
    weights = writer.write_weights(_state_dict(drafter, format), config)
    fields = writer.write_config(config, weights.keys()) | {"dtype": str(drafter.dtype).removeprefix("torch.")}
    (folder / CONFIG_NAME).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(weights, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})
    # These formats have no decoding settings and no record of the training; beside them we read ours.
    if drafter.generation_config.to_dict() != default_generation_config(config).to_dict():
        drafter.generation_config.save_pretrained(folder)
    save_training_record(folder, drafter.training_record)


def _state_dict(drafter: "Drafter", format: str) -> dict[str, torch.Tensor]:
    state_dict = {key: tensor.detach().cpu().contiguous() for key, tensor in drafter.state_dict().items()}
    copies = copied_parts(drafter.config, format)
    if "embed_tokens" in copies:
        state_dict["embed_tokens.weight"] = _copy(drafter._target.embedding.weight, drafter)
    if "lm_head" in copies:
        state_dict["lm_head.weight"] = _copy(drafter.head_weight(), drafter)
    return state_dict


def _copy(weight: torch.Tensor, drafter: "Drafter") -> torch.Tensor:
    return weight.detach().to("cpu", drafter.dtype, copy=True).contiguous()
