"""The files of a checkpoint, in a folder or on the Hub: config.json, and weights in one file or in shards."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from ..models.loading import read_object
from ..origins import is_repo_id


# What of `from_pretrained`'s arguments says where to look.
LOCATION = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
CONFIG_NAME = "config.json"
COMPUTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_config(name_or_path: Any, location: dict[str, Any]) -> dict[str, Any]:
    """
    The checkpoint's config.json.

    Raises:
        OSError: If there is none.
        ValueError: If it is no JSON object.
    """
    require_there(name_or_path, location)
    result = None if location.get("subfolder") else _result_of_training(name_or_path)
    if result is not None:
        raise OSError(f"{name_or_path} has no {CONFIG_NAME}: a training was run there, whose result is {result}.")
    file = cached_file(name_or_path, CONFIG_NAME, **location)
    if file is None:
        raise OSError(f"{name_or_path} has no {CONFIG_NAME}: it is no checkpoint.")
    if not Path(file).is_file():
        raise OSError(f"{file} is no file: {name_or_path} is no checkpoint.")
    return read_object(file)


def _result_of_training(folder: Any) -> Path | None:
    """Of the output folder of a training the result, else its newest checkpoint."""
    folder = Path(folder)
    if (folder / CONFIG_NAME).is_file():
        return None
    steps = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal()}
    candidates = [folder / "final", *(steps[step] for step in sorted(steps, reverse=True))]
    held = ((path, path / name) for path in candidates for name in (CONFIG_NAME, "adapter_config.json"))
    return next((path for path, file in held if file.is_file()), None)


def require_there(name_or_path: Any, location: dict[str, Any]) -> None:
    """
    Refuses a name that is neither a folder here nor a model that the Hub, or its cache, has.

    Raises:
        OSError: Saying so, in this order: a mistyped folder would else read as a failure of the network.
    """
    name = str(name_or_path)
    if Path(name).is_dir():
        return
    if Path(name).is_file():
        raise NotADirectoryError(f"{name} is a file. Name the folder that it lies in.")
    if not is_repo_id(name):
        raise FileNotFoundError(f"There is no folder {name}, and no repository on the Hub has such a name.")
    cache = Path(location.get("cache_dir") or constants.HF_HUB_CACHE)
    if (cache / repo_folder_name(repo_id=name, repo_type="model")).is_dir():
        return
    try:
        cached_file(name, CONFIG_NAME, **location)
    except OSError as error:
        reason = "the Hub has no model of this name, or doesn't show it to you"
        if not isinstance(error.__cause__, RepositoryNotFoundError):
            if not isinstance(error.__cause__, LocalEntryNotFoundError | OfflineModeIsEnabled):
                return  # it is there; whoever reads it says what it lacks
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "there is no connection to it"
            reason = f"no model of this name is in the Hub's cache; the Hub was not asked, since {why}"
        raise FileNotFoundError(f"There is no folder {name} here, and {reason}.") from error


def read_weights(name_or_path: Any, location: dict[str, Any], variant: str | None = None) -> dict[str, torch.Tensor]:
    """
    All tensors of a checkpoint, or of a `variant` of it. They stay memory-mapped until used.

    Raises:
        OSError: If there are no weights, or a shard is missing.
        ValueError: If a file is damaged, or a shard lacks tensors that the index promises.
    """
    tensors, files = {}, _weight_files(name_or_path, location, variant)
    indexed = {key for _, promised in files for key in promised}
    for file, promised in files:
        held = read_tensors(file)
        missing = promised - held.keys()
        if missing:
            raise ValueError(f"{file} lacks tensors that its index promises: {_some(missing)}. Fetch the shard again.")
        # Of a tensor in several shards, the one that the index names counts.
        tensors.update({key: tensor for key, tensor in held.items() if key in promised or key not in indexed})
    return tensors


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """
    The tensors of one file: safetensors, or pickled ones (`.bin`) by torch's weights-only loading, which runs no code.

    Raises:
        ValueError: If the file is damaged, holds something else, or numbers that are none.
    """
    tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickled(file)
    bad = {key for key, tensor in tensors.items() if tensor.dtype in COMPUTED and not _is_finite(tensor)}
    if bad:
        raise ValueError(
            f"{file} holds NaN or infinite numbers in {_some(bad)}, as a training run that diverged leaves them. "
            "Use an earlier checkpoint."
        )
    return tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    # Without a mask of the tensor's size; NaN comes through both.
    return not tensor.numel() or all(bound.isfinite() for bound in tensor.aminmax())


def find_file(name_or_path: Any, name: str, location: dict[str, Any]) -> Path | None:
    """A file of a checkpoint, if it has it."""
    file = cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False, **location)
    return None if file is None else Path(file)


def _weight_files(name_or_path: Any, location: dict[str, Any], variant: str | None) -> list[tuple[Path, set[str]]]:
    """
    The checkpoint's weight files, each with the keys that its index promises in it (none without an index).

    Raises:
        OSError: If there are none, or a shard is missing.
    """

    def named(name: str) -> str:
        stem, suffix = name.rsplit(".", 1)
        return f"{stem}.{variant}.{suffix}" if variant else name

    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        file = find_file(name_or_path, named(single), location)
        if file is not None:
            return [(file, set())]
        file = find_file(name_or_path, named(index), location)
        if file is not None:
            return _shards(file, name_or_path, location)
    raise OSError(f"{name_or_path} has a {CONFIG_NAME} but no {named(SAFE_WEIGHTS_NAME)}: the weights are missing.")


def _shards(index: Path, name_or_path: Any, location: dict[str, Any]) -> list[tuple[Path, set[str]]]:
    weight_map = read_object(index).get("weight_map")
    try:
        names = {Path(name).name for name in weight_map.values()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: it holds no weight_map. Fetch or save the checkpoint again.") from error
    if names != set(weight_map.values()) or not names:
        raise ValueError(f"{index} is damaged: its weight_map must name files beside it. Save the checkpoint again.")
    shards = []
    for name in sorted(names):
        keys = {key for key, shard in weight_map.items() if shard == name}
        file = find_file(name_or_path, name, location)
        if file is None:
            raise OSError(f"{index} names the shard {name}, which is missing, and with it {_some(keys)}.")
        shards.append((file, keys))
    return shards


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cut off: {error}. Fetch or save the checkpoint again.") from error


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        # Files of torch before 1.6 are no archives, and can't be mapped.
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # whatever unpickling damaged or foreign bytes raises
        raise ValueError(
            f"{file} can't be read as weights alone ({type(error).__name__}): it is damaged, or holds more than "
            "tensors, which is not loaded because it could run code."
        ) from error
    if not isinstance(held, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in held.values()):
        raise ValueError(f"{file} holds something else than a state dict of tensors.")
    return held


def _some(keys: set[str]) -> str:
    shown = sorted(keys)[:5]
    return ", ".join(shown) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
