"""What the writers of several formats share: the transformer's fields, and renamed tensors."""

from typing import Any

from ..models.configuration_drafter import EAGLE3_LAYERS
from .fields import BOOKKEEPING


def transformer_fields(config: Any) -> dict[str, Any]:
    """The draft transformer as a flat config.json has it, the rotary settings in `rope_parameters`."""
    return {k: v for k, v in config.text_config.to_dict().items() if k not in BOOKKEEPING}


def flat_rotary(text: dict[str, Any]) -> dict[str, Any]:
    """The fields with the rotary settings by their older names, which newer readers know too."""
    fields = {k: v for k, v in text.items() if k != "rope_parameters"}
    rope = dict(text["rope_parameters"])
    fields["rope_theta"] = rope.pop("rope_theta")
    if {"rope_type": "default"} | rope != {"rope_type": "default"}:
        fields["rope_scaling"] = rope
    return fields


def named_layers(config: Any) -> list[int] | None:
    """The feature layers, `None` where EAGLE-3's own are meant and the target's depth is not known."""
    return None if config.target_layer_ids == EAGLE3_LAYERS else list(config.target_layer_ids)


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are set."""
    return {k: v for k, v in fields.items() if v is not None}
