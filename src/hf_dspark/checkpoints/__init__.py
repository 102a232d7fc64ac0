"""
Other projects' checkpoints, one file each. A format is a module with two functions:

- `recognise(config) -> bool`: whether a config.json (a `dict`) is of this format;
- `read(config, state_dict) -> (model_type, config, state_dict)`: the same drafter in our terms. `config` is a `dict`
  of fields of our config class.

To add a format, write its module and name it in `FORMATS`.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from . import deepspec


FORMATS = (deepspec,)
NATIVE = ("dspark", "dflash", "eagle3")
# What of `from_pretrained`'s arguments says where to look.
LOCATION = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def read_checkpoint(name_or_path: Any, drafter_class: type, kwargs: dict[str, Any]) -> tuple[Any, dict] | None:
    """
    Config and weights of a checkpoint in another project's format, as ours.

    Args:
        name_or_path (`str`): Folder or Hub id.
        drafter_class (`type`): The class that is being loaded.
        kwargs (`dict`): `from_pretrained`'s arguments.

    Returns:
        The config and state dict, or `None` for a checkpoint in our own format.

    Raises:
        ValueError: If the checkpoint is no drafter that we know, or one of another class.
    """
    location = {k: kwargs[k] for k in LOCATION if k in kwargs}
    raw = read_config(name_or_path, location)
    model_type = raw.get("model_type")
    if model_type in NATIVE:
        _require_class(name_or_path, model_type, drafter_class)
        return None
    reader = next((f for f in FORMATS if f.recognise(raw)), None)
    if reader is None:
        raise ValueError(
            f"{name_or_path} is no drafter checkpoint that hf-dspark knows: model_type {model_type!r}, architectures "
            f"{raw.get('architectures')}. If it is a language model, pass it as the target instead."
        )
    model_type, fields = reader.read_config(raw)
    _require_class(name_or_path, model_type, drafter_class)
    config = drafter_class.config_class(**fields)
    config.require_complete()
    return config, reader.read_weights(read_weights(name_or_path, location))


def drafter_type(name_or_path: Any, **location: Any) -> str:
    """Our `model_type` for a checkpoint in any format that we know."""
    raw = read_config(name_or_path, location)
    if raw.get("model_type") in NATIVE:
        return raw["model_type"]
    reader = next((f for f in FORMATS if f.recognise(raw)), None)
    if reader is None:
        raise ValueError(
            f"{name_or_path} is no drafter checkpoint that hf-dspark knows: model_type {raw.get('model_type')!r}, "
            f"architectures {raw.get('architectures')}."
        )
    return reader.read_config(raw)[0]


def read_config(name_or_path: Any, location: dict[str, Any]) -> dict[str, Any]:
    """
    The checkpoint's config.json.

    Raises:
        OSError: If there is none.
    """
    path = cached_file(name_or_path, "config.json", **location)
    if path is None:
        raise OSError(f"{name_or_path} has no config.json: it is no checkpoint.")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def read_weights(name_or_path: Any, location: dict[str, Any]) -> dict[str, Any]:
    """
    All tensors of a safetensors checkpoint, sharded or not. They stay memory-mapped until used.

    Raises:
        OSError: If there are no weights.
    """
    optional = {"_raise_exceptions_for_missing_entries": False, **location}
    single = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **optional)
    if single is not None:
        files = [single]
    else:
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **optional)
        if index is None:
            raise OSError(f"{name_or_path} has a config.json but no {SAFE_WEIGHTS_NAME}: the weights are missing.")
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        files = [cached_file(name_or_path, name, **location) for name in names]
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            tensors.update({key: shard.get_tensor(key) for key in shard.keys()})  # noqa: SIM118
    return tensors


def _require_class(name_or_path: Any, model_type: str, drafter_class: type) -> None:
    wanted = drafter_class.config_class.model_type
    if model_type != wanted:
        raise ValueError(
            f"{name_or_path} is a checkpoint of the type {model_type!r}, not {wanted!r}. Load it with "
            "`AutoDrafter.from_pretrained`, which picks the class."
        )
