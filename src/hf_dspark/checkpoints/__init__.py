"""
Other projects' checkpoints, one file each. A format is a module with three functions:

- `recognise(config) -> str | None`: our `model_type` for a config.json (a `dict`) of this format;
- `read_config(config, shapes) -> dict`: the fields of our config, given the stored tensors' names and shapes too;
- `read_weights(state_dict, config) -> dict`: our state dict of theirs, `config` being ours.

A format that we write has the mirror of the last two, `write_config(config, keys)` and
`write_weights(state_dict, config)`, and a row in `capabilities.py`, which says what it can carry.

What several of them share is in `fields.py`, the files themselves in `files.py`. To add a format, write its module
and name it in `FORMATS`.
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from ..models.configuration_checks import own_fields, require_possible
from ..models.configuration_drafter import LAYER_FIELDS, NAMES, DrafterConfig
from ..models.configuration_gemma4 import LEFT_OUT
from ..models.loading import refuse_incomplete
from . import deepspec, eagle, sglang, specforge, speculators, transformers_dflash, zlab
from .fields import refuse_misshapen, refuse_two_rotaries, required, unknown_fields
from .files import COMPUTED, CONFIG_NAME, LOCATION, read_config, read_weights


logger = logging.get_logger(__name__)
# The first that recognises a config reads it; SpecForge writes z-lab's layout with more in it.
FORMATS = (speculators, deepspec, specforge, zlab, transformers_dflash, eagle)
# Fields of our own format that change nothing that is computed; the others are always there, and never guessed.
INFORMATION = {"assumed", "max_trained_length", "source_format", "target_name_or_path"}
# Those of its transformer that change something, where its class has them.
TRANSFORMER = {
    *LAYER_FIELDS,
    *LEFT_OUT,
    "attention_k_eq_v",
    "hidden_activation",
    "layer_types",
    "max_position_embeddings",
    "num_hidden_layers",
    "sliding_window",
    "use_sliding_window",
}
# Our own format is what `save_pretrained` writes.
WRITERS = {"deepspec": deepspec, "speculators": speculators, "sglang": sglang, "zlab": zlab}


@dataclasses.dataclass
class Checkpoint:
    """
    A checkpoint as it was read.

    Args:
        config (`DrafterConfig`): Our config.
        state_dict (`dict[str, torch.Tensor]`): Our state dict.
        format (`str`): The format of its files.
        is_changed (`bool`): Whether the caller gave another config, or fields of it.
    """

    config: DrafterConfig
    state_dict: dict[str, torch.Tensor]
    format: str
    is_changed: bool


def read_checkpoint(name_or_path: Any, drafter_class: type, kwargs: dict[str, Any]) -> Checkpoint:
    """
    Config and weights of a checkpoint in any format, as ours. That they fit each other is checked before anything is
    allocated.

    Args:
        name_or_path (`str`): Folder or Hub id.
        drafter_class (`type`): The class that is being loaded.
        kwargs (`dict`): `from_pretrained`'s arguments. Those that say what to read instead are taken out: `config`,
            `variant`, and fields of the config.

    Raises:
        OSError: If a file is missing.
        ValueError: If the checkpoint is no drafter that we know, one of another class, or damaged.
    """
    location = {k: kwargs[k] for k in LOCATION if k in kwargs}
    raw = read_config(name_or_path, location)
    model_type, reader = _recognise(name_or_path, raw)
    _require_class(name_or_path, model_type, drafter_class)
    state_dict = read_weights(name_or_path, location, kwargs.pop("variant", None))
    given, overrides = kwargs.pop("config", None), _overrides(drafter_class.config_class, kwargs)
    with naming(name_or_path, CONFIG_NAME):
        refuse_two_rotaries(raw)
        if reader is None:
            _require_all(raw | overrides, drafter_class.config_class)
        if given is None:
            config = _read_fields(reader, raw, state_dict, drafter_class.config_class, overrides)
        else:
            config = _given_config(reader, given, drafter_class.config_class, overrides)
        config.require_complete()
    if reader is not None:
        with naming(name_or_path, "weights"):
            state_dict = reader.read_weights(state_dict, config)
    _require_fitting(name_or_path, drafter_class, config, state_dict)
    _warn_about_unknown(name_or_path, config)
    if kwargs.get("dtype", kwargs.get("torch_dtype")) in (None, "auto"):
        _warn_about_type(name_or_path, config, state_dict)
    return Checkpoint(
        config=config,
        state_dict=state_dict,
        format="hf-dspark" if reader is None else config.source_format,
        is_changed=given is not None or bool(overrides),
    )


def _overrides(config_class: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes the fields of a drafter's config out of `from_pretrained`'s arguments."""
    names = {f.name for f in dataclasses.fields(config_class)} - {f.name for f in dataclasses.fields(PreTrainedConfig)}
    return {name: kwargs.pop(name) for name in names & kwargs.keys()}


def _read_fields(
    reader: ModuleType | None,
    raw: dict[str, Any],
    state_dict: dict[str, torch.Tensor],
    config_class: type,
    overrides: dict[str, Any],
) -> DrafterConfig:
    if reader is None:
        return config_class.from_dict(raw | overrides)
    shapes = {key: tuple(tensor.shape) for key, tensor in state_dict.items()}
    return config_class(**(reader.read_config(raw, shapes) | overrides))


def _require_all(raw: dict[str, Any], config_class: type) -> None:
    """
    Refuses a config in our own format that lacks what `save_pretrained` always writes.

    Raises:
        ValueError: Naming the field.
    """
    text = required("text_config", raw)
    text = text.to_dict() if isinstance(text, PreTrainedConfig) else text
    require_possible(raw)
    require_possible(text)
    family = required("model_type", text)
    theirs = {f.name for f in own_fields(CONFIG_MAPPING[family])} if family in CONFIG_MAPPING else set()
    places = (
        ("", {f.name for f in own_fields(config_class)} - INFORMATION, raw),
        ("text_config.", theirs & TRANSFORMER, text),
    )
    for place, names, fields in places:
        missing = ", ".join(f"`{place}{name}`" for name in sorted(names - fields.keys()))
        if missing:
            raise ValueError(
                f"{missing} is missing, and a wrong guess would draft badly without any error. Add it, or save the "
                "drafter again."
            )


def _warn_about_unknown(name_or_path: Any, config: DrafterConfig) -> None:
    unknown = unknown_fields(config) | unknown_fields(config.text_config)
    if unknown:
        logger.warning(
            f"{name_or_path} ({CONFIG_NAME}): fields that nothing here knows, misspelt or of a newer version, change "
            f"nothing: {', '.join(sorted(unknown))}."
        )


def _given_config(
    reader: ModuleType | None, given: Any, config_class: type, overrides: dict[str, Any]
) -> DrafterConfig:
    """The config that the caller gives instead of the checkpoint's."""
    if reader is not None:
        raise ValueError(
            "`config` can't stand in for the config of a checkpoint in another project's format, nor can AutoModel "
            "read it. Use `hf_dspark.AutoDrafter.from_pretrained`, and pass single fields if some are to differ."
        )
    config = copy.deepcopy(given) if isinstance(given, PreTrainedConfig) else config_class.from_pretrained(given)
    if not isinstance(config, config_class):
        raise ValueError(f"`config` is a {type(config).__name__}, and this drafter needs a {config_class.__name__}.")
    for name, value in overrides.items():
        setattr(config, name, value)
    return config


def drafter_type(name_or_path: Any, **location: Any) -> str:
    """Our `model_type` for a checkpoint in any format that we know."""
    return _recognise(name_or_path, read_config(name_or_path, location))[0]


def weights_dtype(name_or_path: Any) -> torch.dtype:
    """The narrowest type that holds all weights of a checkpoint exactly, whatever its config says."""
    _recognise(name_or_path, read_config(name_or_path, {}))
    types = {t.dtype for t in read_weights(name_or_path, {}).values()} & {*COMPUTED}
    # What has no such tensors is refused when it is loaded.
    return reduce(torch.promote_types, types) if types else torch.float32


def _recognise(name_or_path: Any, raw: dict[str, Any]) -> tuple[str, ModuleType | None]:
    """The drafter's type, and who reads it: `None` for ourselves."""
    with naming(name_or_path, CONFIG_NAME):
        refuse_misshapen(raw)
    model_type = raw.get("model_type")
    # Others may name the type too, but not the version of our fields.
    if model_type in NAMES and "format_version" in raw:
        return model_type, None
    with naming(name_or_path, CONFIG_NAME):
        for reader in FORMATS:
            kind = reader.recognise(raw)
            if kind is not None:
                return kind, reader
    raise ValueError(
        f"{name_or_path} is no drafter checkpoint that hf-dspark knows: model_type {model_type!r}, "
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
    name_or_path: Any, drafter_class: type, config: DrafterConfig, stored: dict[str, torch.Tensor]
) -> None:
    """
    Compares a drafter as its config describes it, without memory for its weights, with the tensors that are there:
    their shapes, and whether they hold floating-point numbers.

    Raises:
        ValueError: Naming the keys that differ.
    """
    depth = len({key.split(".")[1] for key in stored if key.startswith("layers.")})
    if depth != config.num_hidden_layers:
        raise ValueError(
            f"{name_or_path} ({CONFIG_NAME}): `num_hidden_layers` {config.num_hidden_layers}, but the weights have "
            f"{depth} layers. Check that config and weights come from the same save."
        )
    with naming(name_or_path, CONFIG_NAME), torch.device("meta"):
        wanted = drafter_class(config).state_dict()
    shapes = {key: (tuple(stored[key].shape), tuple(wanted[key].shape)) for key in wanted.keys() & stored.keys()}
    refuse_incomplete(
        str(name_or_path),
        {
            "missing_keys": wanted.keys() - stored.keys(),
            "unexpected_keys": {key for key in stored.keys() - wanted.keys() if not key.endswith(".inv_freq")},
            "mismatched_keys": [(key, theirs, ours) for key, (theirs, ours) in shapes.items() if theirs != ours],
        },
    )
    kinds = {key: (stored[key].is_floating_point(), wanted[key].is_floating_point()) for key in shapes}
    integers = sorted(key for key, kind in kinds.items() if kind == (False, True))
    if integers:
        raise ValueError(
            f"{name_or_path} (weights): {', '.join(integers[:5])} hold integers, as quantized weights do. These "
            "can't be used here: fetch the checkpoint that they were made from."
        )
    fractions = sorted(key for key, kind in kinds.items() if kind == (True, False))
    if fractions:
        raise ValueError(
            f"{name_or_path} (weights): {', '.join(fractions)} must hold whole numbers, and are stored as floating "
            "point, which may have rounded them. Save the checkpoint again without casting them."
        )


def _warn_about_type(name_or_path: Any, config: DrafterConfig, stored: dict[str, torch.Tensor]) -> None:
    types = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
    if config.dtype is not None and config.dtype not in types:
        held = ", ".join(sorted(map(str, types)))
        logger.warning(
            f"{name_or_path}: {CONFIG_NAME} says {config.dtype}, the weights are stored as {held}. They are loaded "
            f"as {config.dtype}, as transformers does; pass `dtype=` for another type."
        )


def _require_class(name_or_path: Any, model_type: str, drafter_class: type) -> None:
    wanted = drafter_class.config_class.model_type
    if model_type != wanted:
        raise ValueError(
            f"{name_or_path} is a checkpoint of the type {model_type!r}, not {wanted!r}. Load it with "
            "`AutoDrafter.from_pretrained`, which picks the class."
        )
