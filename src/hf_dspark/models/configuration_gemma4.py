"""
What configs of Gemma 4 say otherwise than those of other families. A draft has full-attention layers alone, so what
its target keeps per kind of layer (head width, key and value heads, rotary tables) is the same in all of them here.
"""

from typing import Any

from transformers import PreTrainedConfig


# The text decoders of Gemma 4; a draft for either is of the first type.
TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
FULL = "full_attention"
# Fields that mean the same in target and draft.
COMMON = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "attention_k_eq_v",
    "attention_bias",
    "attention_dropout",
    "hidden_activation",
    "rms_norm_eps",
    "final_logit_softcapping",
    "max_position_embeddings",
    "initializer_range",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Parts of some targets that no draft has.
LEFT_OUT = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}


def refuse_what_no_draft_has(fields: dict[str, Any]) -> None:
    """
    Refuses the config of a draft that asks for what [`draft_fields`] leaves out of its target's.

    Raises:
        ValueError: Naming the field.
    """
    for name, value in LEFT_OUT.items():
        if fields.get(name, value) not in (None, value):
            raise ValueError(f"`{name}` is {fields[name]}, which drafts of Gemma 4 don't have here.")
    others = sorted({kind for kind in fields["layer_types"] if kind != FULL})
    if others:
        raise ValueError(f"`layer_types` names {', '.join(others)}, and drafts of Gemma 4 have {FULL!r} layers alone.")


def draft_fields(config: PreTrainedConfig, num_hidden_layers: int) -> dict[str, Any]:
    """
    The fields of a draft transformer in the manner of a Gemma 4 text decoder.

    transformers takes `global_head_dim` and `num_global_key_value_heads` in without keeping them. Here their values
    are the plain `head_dim` and `num_key_value_heads`, and the empty `per_layer_config` says that no layer differs.

    Args:
        config (`PreTrainedConfig`): A config of one of the types in `TEXT_TYPES`.
        num_hidden_layers (`int`): Layers of the draft.
    """
    layer = config.per_layer_config[FULL]
    return {
        **{name: getattr(config, name) for name in COMMON},
        **LEFT_OUT,
        "num_hidden_layers": num_hidden_layers,
        "layer_types": [FULL] * num_hidden_layers,
        "head_dim": layer.head_dim,
        "num_key_value_heads": layer.num_key_value_heads,
        "per_layer_config": {},
        "rope_parameters": {FULL: dict(config.rope_parameters[FULL])},
        "tie_word_embeddings": False,
    }
