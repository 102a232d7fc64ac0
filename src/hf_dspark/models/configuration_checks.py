"""What a configuration's values must be, whatever wrote them: of their field's type, and possible."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import type_validator
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


# The least that whole numbers may be.
LEAST = {
    "draft_vocab_size": 1,
    "format_version": 1,
    "head_dim": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "markov_rank": 0,
    "num_attention_heads": 1,
    "num_drafts": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "num_target_layers": 1,
    "sliding_window": 1,
    "target_hidden_size": 1,
    "vocab_size": 0,
}
POSITIVE = ("factor", "partial_rotary_factor", "rope_theta", "step_loss_decay")
ROTARY = ("rope_parameters", "rope_scaling")
ROTARY_TYPES = ("default", *ROPE_INIT_FUNCTIONS)


def own_fields(config: PreTrainedConfig | type[PreTrainedConfig]) -> list[dataclasses.Field]:
    """The fields that a config class has beyond those of every config."""
    common = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    return [f for f in dataclasses.fields(config) if f.name not in common]


def require_types(config: PreTrainedConfig) -> None:
    """
    Refuses values of another type than their field's: `"false"` would be true further down, and `True` the number 1.

    Raises:
        ValueError: Naming the field.
    """
    for field in own_fields(config):
        value = getattr(config, field.name)
        try:
            type_validator(field.name, value, field.type)
        except (TypeError, ValueError) as error:
            kind = field.type.__name__ if type(field.type) is type else field.type
            raise ValueError(f"`{field.name}` {value!r} must be of the type {kind}.") from error


def require_possible(fields: Mapping[str, Any]) -> None:
    """
    Refuses values that no drafter can have, in a config's fields or those of its transformer. What is of another type
    is left to the classes that take it.

    Raises:
        ValueError: Naming the field.
    """
    for name, value in fields.items():
        if name in ROTARY and value is not None:
            require_object(name, value)
            _require_rotary(value)
        if type(value) not in (int, float):
            continue
        if name in LEAST and not value >= LEAST[name]:
            raise ValueError(f"`{name}` {value} must be at least {LEAST[name]}.")
        if name in POSITIVE and not 0 < value < math.inf:
            raise ValueError(f"`{name}` {value} must be a positive number.")
        if name == "rms_norm_eps" and not 0 <= value < math.inf:
            raise ValueError(f"`{name}` {value} must be a number of at least 0.")
    for name in ("hidden_act", "hidden_activation"):
        if isinstance(fields.get(name), str) and fields[name] not in ACT2FN:
            raise ValueError(f"`{name}` {fields[name]!r} is no activation that transformers knows.")


def require_object(name: str, value: Any) -> dict[str, Any]:
    """
    A field that holds fields of its own.

    Raises:
        ValueError: If it holds something else.
    """
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` {value!r} must hold named fields (a JSON object).")
    return value


def _require_rotary(rope: dict[str, Any]) -> None:
    """Rotary settings: for all layers, or, one level deeper, for each kind of layer."""
    require_possible(rope)
    for value in rope.values():
        if isinstance(value, dict):
            _require_rotary(value)
    for name in ("rope_type", "type"):
        if name in rope and rope[name] not in ROTARY_TYPES:
            raise ValueError(f"`{name}` {rope[name]!r} is unknown; choose one of {', '.join(ROTARY_TYPES)}.")
