"""
DFlash assistants of transformers itself. A Qwen3 transformer without vocabulary; only the mask slots of a block
propose, and sliding layers see one position further than elsewhere: the window's own edge included.
"""

from collections.abc import Collection
from typing import Any

from .fields import refuse_convention, required, stored_dtype, transformer, whole_number


MODEL_TYPES = ("muse_glimmer_assistant",)
DRAFTER_FIELDS = {"block_size", "mask_token_id", "sample_from_anchor", "target_layer_ids"}
RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def recognise(config: dict[str, Any]) -> str | None:
    """`"dflash"` for a config.json of a DFlash assistant of transformers."""
    return "dflash" if config.get("model_type") in MODEL_TYPES else None


def read_config(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    refuse_convention(config, "sample_from_anchor", False)
    assumed: dict[str, str] = {}
    text = transformer(config, assumed, DRAFTER_FIELDS, theta=500000.0)
    required("sliding_window", config)
    text |= {
        "model_type": "qwen3",
        "vocab_size": 0,
        "layer_types": required("layer_types", config),
        "use_sliding_window": True,
        "sliding_window": whole_number("sliding_window", config) + 1,
    }
    # This format never names the vocabulary.
    assumed.pop("vocab_size", None)
    return {
        "text_config": text,
        "target_layer_ids": required("target_layer_ids", config),
        "mask_token_id": required("mask_token_id", config),
        "block_size": required("block_size", config),
        "sample_from_anchor": False,
        "dtype": stored_dtype(config),
        "assumed": assumed,
        "source_format": "transformers",
    }


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs."""
    return {_rename(key): tensor for key, tensor in state_dict.items()}


def _rename(key: str) -> str:
    for theirs, ours in RENAMED.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return key
