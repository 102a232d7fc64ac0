"""
EAGLE-3 checkpoints of the method's authors, and what others take over from them. The one layer is called `midlayer`,
the embedding is the target's unless stored, and the config names neither feature layers nor, mostly, a rotary base.
"""

from collections.abc import Collection
from typing import Any

from ..models.configuration_drafter import EAGLE3_LAYERS
from .fields import (
    architecture,
    borrowed_or_own,
    reduced_size,
    refuse_convention,
    stored_dtype,
    transformer,
    vocabulary_map,
)


DRAFTER_FIELDS = {"draft_vocab_size", "eagle_config", "num_target_layers", "target_hidden_size", "ttt_length"}
# What variants of the method do, and this format never.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def recognise(config: dict[str, Any]) -> str | None:
    """`"eagle3"` for a config.json of theirs: a Llama of one layer with a draft vocabulary."""
    is_llama = architecture(config) == "LlamaForCausalLM"
    return "eagle3" if is_llama and "draft_vocab_size" in config and config.get("num_hidden_layers") == 1 else None


def read_config(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Our config fields for their config.json."""
    for name in NORMS:
        refuse_convention(config, name, False)
    assumed: dict[str, str] = {}
    text = transformer(config, assumed, DRAFTER_FIELDS, family="llama")
    # Only our own exports say how many tokens a round proposes.
    drafts = {"num_drafts": config["ttt_length"]} if "ttt_length" in config else {}
    return (
        borrowed_or_own(keys)
        | drafts
        | {
            "text_config": text,
            "target_layer_ids": feature_layers(_named_layers(config), assumed),
            "draft_vocab_size": reduced_size(config, config.get("vocab_size")),
            "num_target_layers": config.get("num_target_layers"),
            "target_hidden_size": config.get("target_hidden_size"),
            "dtype": stored_dtype(config),
            "assumed": assumed,
            "source_format": "eagle",
        }
    )


def _named_layers(config: dict[str, Any]) -> list[int] | None:
    """Layers that some configs name: those whose outputs are taken, as we count them."""
    return (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def feature_layers(named: list[int] | None, assumed: dict[str, str]) -> list[int] | str:
    """The feature layers, or EAGLE-3's own where a config, as is usual, names none."""
    if named:
        return named
    assumed["target_layer_ids"] = "EAGLE-3's own three layers: the config names none"
    return EAGLE3_LAYERS


def read_weights(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Our state dict of theirs."""
    renamed = {key.replace("midlayer.", "layers.0.", 1): tensor for key, tensor in state_dict.items()}
    return vocabulary_map(renamed, config)
