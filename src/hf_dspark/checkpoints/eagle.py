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
    one_value,
    reduced_size,
    refuse_convention,
    refuse_unknown,
    stored_dtype,
    transformer,
    vocabulary_map,
    whole_number,
)


LAYERS = "eagle_aux_hidden_state_layer_ids"
DRAFTER_FIELDS = {"draft_vocab_size", "eagle_config", "num_target_layers", "target_hidden_size", "ttt_length", LAYERS}
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
    drafts = {"num_drafts": whole_number("ttt_length", config)} if config.get("ttt_length") is not None else {}
    return (
        borrowed_or_own(keys)
        | drafts
        | {
            "text_config": text,
            "target_layer_ids": _layers(config, assumed),
            "draft_vocab_size": reduced_size(config, config.get("vocab_size")),
            "num_target_layers": config.get("num_target_layers"),
            "target_hidden_size": config.get("target_hidden_size"),
            "dtype": stored_dtype(config),
            "assumed": assumed,
            "source_format": "eagle",
        }
    )


def _layers(config: dict[str, Any], assumed: dict[str, str]) -> list[int] | str:
    """
    The feature layers. In `eagle_config`, which SGLang reads, they are counted as we do: by the layers whose outputs
    are taken. Beside the transformer's fields, where only vLLM reads them, they are its: one higher.
    """
    nested, top = config.get("eagle_config") or {}, config.get(LAYERS)
    refuse_unknown({LAYERS, "use_aux_hidden_state"}, "`eagle_config`", nested)
    # Without it the features would be the last layer's alone.
    refuse_convention(nested, "use_aux_hidden_state", True)
    if not top:
        return feature_layers(nested.get(LAYERS), assumed)
    layers = one_value(LAYERS, nested, {LAYERS: lower(top)})
    if not nested.get(LAYERS):
        assumed["target_layer_ids"] = f"{layers}: `{LAYERS}` is counted as vLLM does, which alone reads it there"
    return layers


def lower(layer_ids: list[int]) -> list[int]:
    """Ids by our count of layers that others count from the embeddings."""
    # What is no number is refused with the rest of the config.
    return [i - 1 if type(i) is int else i for i in layer_ids]


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
