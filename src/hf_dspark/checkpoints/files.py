"""The files of a checkpoint, in a folder or on the Hub: config.json, and weights in one file or in shards."""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)


# What of `from_pretrained`'s arguments says where to look.
LOCATION = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
CONFIG_NAME = "config.json"


def read_config(name_or_path: Any, location: dict[str, Any]) -> dict[str, Any]:
    """
    The checkpoint's config.json.

    Raises:
        OSError: If there is none.
        ValueError: If it is no JSON object.
    """
    file = cached_file(name_or_path, CONFIG_NAME, **location)
    if file is None:
        raise OSError(f"{name_or_path} has no {CONFIG_NAME}: it is no checkpoint.")
    if not Path(file).is_file():
        raise OSError(f"{file} is no file: {name_or_path} is no checkpoint.")
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}. Fetch or save the checkpoint again.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is damaged: it holds no JSON object. Fetch or save the checkpoint again.")
    return config


def read_weights(name_or_path: Any, location: dict[str, Any]) -> dict[str, torch.Tensor]:
    """
    All tensors of a checkpoint. Those of safetensors stay memory-mapped until used; pickled ones (`.bin`) are read
    by torch's weights-only loading, which runs no code.

    Raises:
        OSError: If there are no weights, or a shard is missing.
        ValueError: If a file is damaged, or a shard lacks tensors that the index promises.
    """
    tensors = {}
    for file, promised in weight_files(name_or_path, location):
        held = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickled(file)
        _require_promised(file, promised, held)
        tensors.update(held)
    return tensors


def check_weights(name_or_path: Any, location: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """
    Checks the files of a safetensors checkpoint by their headers, before anything is read.

    Returns:
        `dict[str, tuple]`: of each tensor its shape and whether it holds floating-point numbers.

    Raises:
        OSError, ValueError: As in [`read_weights`].
    """
    found = {}
    for file, promised in weight_files(name_or_path, location):
        if file.suffix == ".safetensors":
            with _opened(file) as tensors:
                _require_promised(file, promised, tensors.keys())
                for key in tensors.keys():  # noqa: SIM118
                    header = tensors.get_slice(key)
                    # F32, BF16 and the like, and not BOOL, I64 or U8.
                    found[key] = tuple(header.get_shape()), header.get_dtype().startswith(("F", "BF"))
    return found


def weight_files(name_or_path: Any, location: dict[str, Any]) -> list[tuple[Path, set[str]]]:
    """
    The checkpoint's weight files, each with the keys that its index promises in it (none without an index).

    Raises:
        OSError: If there are none, or a shard is missing.
    """

    def find(name: str) -> Path | None:
        file = cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False, **location)
        return None if file is None else Path(file)

    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        file = find(single)
        if file is not None:
            return [(file, set())]
        file = find(index)
        if file is not None:
            return _shards(file, find)
    raise OSError(f"{name_or_path} has a {CONFIG_NAME} but no {SAFE_WEIGHTS_NAME}: the weights are missing.")


def _shards(index: Path, find: Any) -> list[tuple[Path, set[str]]]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {Path(name).name for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: it holds no weight_map. Fetch or save the checkpoint again.") from error
    if names != set(weight_map.values()) or not names:
        raise ValueError(f"{index} is damaged: its weight_map must name files beside it. Save the checkpoint again.")
    shards = []
    for name in sorted(names):
        keys = {key for key, shard in weight_map.items() if shard == name}
        file = find(name)
        if file is None:
            raise OSError(f"{index} names the shard {name}, which is missing, and with it {_some(keys)}.")
        shards.append((file, keys))
    return shards


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        tensors = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or cut off: {error}. Fetch or save the checkpoint again.") from error
    with tensors:
        yield tensors


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    with _opened(file) as tensors:
        return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118


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


def _require_promised(file: Path, promised: set[str], held: Any) -> None:
    missing = promised - set(held)
    if missing:
        raise ValueError(f"{file} lacks tensors that its index promises: {_some(missing)}. Fetch the shard again.")


def _some(keys: set[str]) -> str:
    shown = sorted(keys)[:5]
    return ", ".join(shown) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
