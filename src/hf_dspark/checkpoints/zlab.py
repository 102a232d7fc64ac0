"""
DFlash checkpoints of z-lab. Ids stand in `dflash_config` or, flat, beside the transformer's fields. Embedding and LM
head are the target's, only the mask slots of a block propose, and sliding layers see a window in both directions.
"""

from collections.abc import Collection
from typing import Any

from .fields import (
    borrowed_or_own,
    flag,
    one_value,
    refuse_convention,
    refuse_unknown,
    required,
    stored_dtype,
    transformer,
)
from .writing import flat_rotary, given, named_layers, transformer_fields


ARCHITECTURE = "DFlashDraftModel"
NESTED = {"block_size", "is_causal", "mask_token_id", "num_target_layers", "target_layer_ids"}
DRAFTER_FIELDS = {*NESTED, "dflash_config", "draft_vocab_size", "sample_from_anchor", "target_hidden_size"}


def recognise(config: dict[str, Any]) -> str | None:
    """`"dflash"` for a config.json of z-lab's."""
    return "dflash" if ARCHITECTURE in (config.get("architectures") or []) else None


def read_config(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    refuse_unknown(NESTED, "`dflash_config`", config.get("dflash_config") or {})
    refuse_convention(config, "sample_from_anchor", False)
    fields = block_fields(config, keys, sliding_causal=False)
    return fields | {"sample_from_anchor": False, "source_format": "zlab"}


def block_fields(config: dict[str, Any], keys: Collection[str], sliding_causal: bool) -> dict[str, Any]:
    """What all block drafters of this layout have in common; `sliding_causal` is the project's own default."""
    nested, assumed = config.get("dflash_config") or {}, {}
    text = transformer(config, assumed, DRAFTER_FIELDS)
    causal = flag("is_causal", nested, config)
    if causal:
        raise ValueError("`is_causal` is true: blocks whose slots see only those before them are not available here.")
    if causal is None and "sliding_attention" in (config.get("layer_types") or []):
        assumed["sliding_causal"] = f"{sliding_causal}: the config doesn't say, and this is its project's default"
    return borrowed_or_own(keys) | {
        "text_config": text,
        "target_layer_ids": required("target_layer_ids", nested, config),
        "mask_token_id": required("mask_token_id", nested, config),
        "block_size": required("block_size", nested, config),
        "num_target_layers": one_value("num_target_layers", config, nested),
        "target_hidden_size": config.get("target_hidden_size"),
        "sliding_causal": sliding_causal if causal is None else causal,
        "dtype": stored_dtype(config),
        "assumed": assumed,
    }


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs: the names are the same."""
    return state_dict


def write_config(config: Any, keys: Collection[str]) -> dict[str, Any]:
    """Their config.json for our config."""
    return write_block_fields(config) | {"architectures": [ARCHITECTURE]}


def write_block_fields(config: Any) -> dict[str, Any]:
    """What all block drafters of this layout have in common."""
    fields = flat_rotary(transformer_fields(config)) | given(num_target_layers=config.num_target_layers)
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": named_layers(config)}
    if any(map(config.is_sliding, range(config.num_hidden_layers))) and not config.sliding_causal:
        # The one field that says so; projects differ in what its absence means.
        fields["is_causal"] = False
    return fields | {"block_size": config.block_size, "dflash_config": nested}


def write_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Their state dict of ours: the names are the same."""
    return state_dict
