"""
Other projects' checkpoints, one file each. A format is a module with three functions:

- `recognise(config) -> str | None`: our `model_type` for a config.json (a `dict`) of this format;
- `read_config(config, keys) -> dict`: the fields of our config, given the names of the stored tensors too;
- `read_weights(state_dict, config) -> dict`: our state dict of theirs, `config` being ours.

A format that we write has the mirror of the last two, `write_config(config, keys)` and
`write_weights(state_dict, config)`, and a row in `capabilities.py`, which says what it can carry.

What several of them share is in `fields.py`, the files themselves in `files.py`. To add a format, write its module
and name it in `FORMATS`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..models.loading import refuse_incomplete
from . import deepspec, eagle, sglang, specforge, speculators, transformers_dflash, zlab
from .files import CONFIG_NAME, LOCATION, check_weights, read_config, read_weights


# The first that recognises a config reads it; SpecForge writes z-lab's layout with more in it.
FORMATS = (speculators, deepspec, specforge, zlab, transformers_dflash, eagle)
NATIVE = ("dspark", "dflash", "eagle3")
# Our own format is what `save_pretrained` writes.
WRITERS = {"deepspec": deepspec, "speculators": speculators, "sglang": sglang, "zlab": zlab}


def read_checkpoint(name_or_path: Any, drafter_class: type, kwargs: dict[str, Any]) -> tuple[Any, dict] | None:
    """
    Config and weights of a checkpoint in another project's format, as ours. That they fit each other is checked before
    anything is allocated.

    Args:
        name_or_path (`str`): Folder or Hub id.
        drafter_class (`type`): The class that is being loaded.
        kwargs (`dict`): `from_pretrained`'s arguments.

    Returns:
        The config and state dict, or `None` for a checkpoint in our own format, whose files have been checked.

    Raises:
        ValueError: If the checkpoint is no drafter that we know, one of another class, or damaged.
    """
    location = {k: kwargs[k] for k in LOCATION if k in kwargs}
    raw = read_config(name_or_path, location)
    model_type, reader = _recognise(name_or_path, raw)
    _require_class(name_or_path, model_type, drafter_class)
    config_class = drafter_class.config_class
    if reader is None:
        with naming(name_or_path, CONFIG_NAME):
            overridden = {k: v for k, v in kwargs.items() if hasattr(config_class, k)}
            config = config_class.from_dict(raw | overridden)
            config.require_complete()
        if kwargs.get("variant") is None:
            _require_fitting(name_or_path, drafter_class, config, check_weights(name_or_path, location))
        return None
    state_dict = read_weights(name_or_path, location)
    with naming(name_or_path, CONFIG_NAME):
        config = config_class(**reader.read_config(raw, state_dict.keys()))
        config.require_complete()
    with naming(name_or_path, "weights"):
        state_dict = reader.read_weights(state_dict, config)
    stored = {key: (tuple(tensor.shape), tensor.is_floating_point()) for key, tensor in state_dict.items()}
    _require_fitting(name_or_path, drafter_class, config, stored)
    return config, state_dict


def drafter_type(name_or_path: Any, **location: Any) -> str:
    """Our `model_type` for a checkpoint in any format that we know."""
    return _recognise(name_or_path, read_config(name_or_path, location))[0]


def weights_dtype(name_or_path: Any) -> torch.dtype:
    """The narrowest type that holds all weights of a checkpoint exactly, whatever its config says."""
    _recognise(name_or_path, read_config(name_or_path, {}))
    types = {t.dtype for t in read_weights(name_or_path, {}).values() if t.is_floating_point()}
    return reduce(torch.promote_types, types)


def _recognise(name_or_path: Any, raw: dict[str, Any]) -> tuple[str, ModuleType | None]:
    """The drafter's type, and who reads it: `None` for ourselves."""
    if raw.get("model_type") in NATIVE:
        return raw["model_type"], None
    with naming(name_or_path, CONFIG_NAME):
        for reader in FORMATS:
            model_type = reader.recognise(raw)
            if model_type is not None:
                return model_type, reader
    raise ValueError(
        f"{name_or_path} is no drafter checkpoint that hf-dspark knows: model_type {raw.get('model_type')!r}, "
        f"architectures {raw.get('architectures')}. If it is a language model, pass it as the target instead."
    )


@contextmanager
def naming(name_or_path: Any, part: str) -> Iterator[None]:
    """Says in which checkpoint, and where in it, something is wrong."""
    try:
        yield
    except OSError:
        raise
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{name_or_path} ({part}): {_shortened(str(error))}") from error
    except Exception as error:  # whatever damaged fields lead to
        what = _shortened(f"{type(error).__name__}: {error}")
        raise ValueError(f"{name_or_path} ({part}): damaged, or not as its format has it ({what}).") from error


def _shortened(message: str) -> str:
    return message if len(message) <= 800 else f"{message[:800]} ..."


def _require_fitting(
    name_or_path: Any, drafter_class: type, config: Any, stored: dict[str, tuple[tuple[int, ...], bool]]
) -> None:
    """
    Compares a drafter as its config describes it, without memory for its weights, with the tensors that are there:
    their shapes, and whether they hold floating-point numbers.

    Raises:
        ValueError: Naming the keys that differ.
    """
    if not stored:  # pickled weights in our own format have no header to look into
        return
    depth = len({key.split(".")[1] for key in stored if key.startswith("layers.")})
    if depth != config.num_hidden_layers:
        raise ValueError(
            f"{name_or_path} ({CONFIG_NAME}): `num_hidden_layers` {config.num_hidden_layers}, but the weights have "
            f"{depth} layers. Check that config and weights come from the same save."
        )
    with naming(name_or_path, CONFIG_NAME), torch.device("meta"):
        wanted = drafter_class(config).state_dict()
    common, shapes = wanted.keys() & stored.keys(), {key: tuple(tensor.shape) for key, tensor in wanted.items()}
    refuse_incomplete(
        str(name_or_path),
        {
            "missing_keys": wanted.keys() - stored.keys(),
            "unexpected_keys": {key for key in stored.keys() - wanted.keys() if not key.endswith(".inv_freq")},
            "mismatched_keys": [(k, stored[k][0], shapes[k]) for k in common if stored[k][0] != shapes[k]],
        },
    )
    integers = sorted(key for key in common if wanted[key].is_floating_point() and not stored[key][1])
    if integers:
        raise ValueError(
            f"{name_or_path} (weights): {', '.join(integers[:5])} hold integers, as quantized weights do. These "
            "can't be used here: fetch the checkpoint that they were made from."
        )


def _require_class(name_or_path: Any, model_type: str, drafter_class: type) -> None:
    wanted = drafter_class.config_class.model_type
    if model_type != wanted:
        raise ValueError(
            f"{name_or_path} is a checkpoint of the type {model_type!r}, not {wanted!r}. Load it with "
            "`AutoDrafter.from_pretrained`, which picks the class."
        )
