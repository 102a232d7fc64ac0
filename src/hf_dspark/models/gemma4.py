"""
What Gemma 4 does otherwise than the other families. A draft has full-attention layers alone, so what its target keeps
per kind of layer (head width, key and value heads, rotary tables) is the same in all of them here.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


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
LEFT_OUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "num_kv_shared_layers": 0}


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


def draft_layer(config: PreTrainedConfig, index: int) -> nn.Module:
    """
    A decoder layer of a draft.

    Raises:
        ValueError: If the config asks for a layer that no draft has here.
    """
    extra = [name for name, value in LEFT_OUT.items() if getattr(config, name) != value]
    if extra or config.layer_types[index] != FULL:
        raise ValueError(
            f"Layer {index} of a Gemma 4 draft must be a {FULL!r} one without {', '.join(LEFT_OUT)}; this config asks "
            f"for {config.layer_types[index]!r}" + (f" and {', '.join(extra)}." if extra else ".")
        )
    return modeling_gemma4.Gemma4TextDecoderLayer(config, index)


def rotary(config: PreTrainedConfig) -> nn.Module:
    """The rotary table of full attention, called as in families that have one for all layers."""
    config = copy.copy(config)
    config.rope_parameters = config.rope_parameters[FULL]
    return LlamaRotaryEmbedding(config)


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates both, as in the other families."""
    return tuple(modeling_gemma4.apply_rotary_pos_emb(x, cos, sin) for x in (queries, keys))


def finish(layer: nn.Module, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """What follows the attention: a norm before each of the two sums, and the layer's own scale."""
    hidden = residual + layer.post_attention_layernorm(attended)
    hidden = hidden + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(hidden)))
    return hidden * layer.layer_scalar.to(hidden.dtype)


class ScaledEmbedding(nn.Embedding):
    """A token embedding times the square root of its width, which is rounded to the weights' type as in the target."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().forward(token_ids)
        return embedded * embedded.new_tensor(self.embedding_dim**0.5)
