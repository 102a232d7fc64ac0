"""
Decoder layers of the draft. They are the target family's own layers (same parameters, same names), called in two
ways of our own: a block attends to cached context beside itself, and EAGLE-3 reads embedding and feature together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from . import gemma4


def feed_forward(layer: nn.Module, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """What follows the attention in most families: residual, norm, MLP, residual."""
    hidden = residual + attended
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@dataclass(frozen=True)
class Family:
    """
    The parts of a transformer family that a drafter is built from.

    Args:
        layer, norm, rotary (`Callable`): What makes the modules.
        rotate (`Callable`): `rotate(queries, keys, cos, sin)`.
        eager_attention (`Callable`): The attention where no other implementation is chosen.
        finish (`Callable`, *optional*): `finish(layer, residual, attended)`, what follows a layer's attention.
        embedding (`type[nn.Embedding]`, *optional*): A token embedding of the drafter's own.
    """

    layer: Callable[[PreTrainedConfig, int], nn.Module]
    norm: type[nn.Module]
    rotary: Callable[[PreTrainedConfig], nn.Module]
    rotate: Callable
    eager_attention: Callable
    finish: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = feed_forward
    embedding: type[nn.Embedding] = nn.Embedding


FAMILIES = {
    "llama": Family(
        modeling_llama.LlamaDecoderLayer,
        modeling_llama.LlamaRMSNorm,
        modeling_llama.LlamaRotaryEmbedding,
        modeling_llama.apply_rotary_pos_emb,
        modeling_llama.eager_attention_forward,
    ),
    "qwen3": Family(
        modeling_qwen3.Qwen3DecoderLayer,
        modeling_qwen3.Qwen3RMSNorm,
        modeling_qwen3.Qwen3RotaryEmbedding,
        modeling_qwen3.apply_rotary_pos_emb,
        modeling_qwen3.eager_attention_forward,
    ),
    "gemma4_text": Family(
        gemma4.draft_layer,
        modeling_gemma4.Gemma4RMSNorm,
        gemma4.rotary,
        gemma4.rotate,
        modeling_gemma4.eager_attention_forward,
        gemma4.finish,
        gemma4.ScaledEmbedding,
    ),
}

Rotary = tuple[torch.Tensor, torch.Tensor]


def family_of(text_config: PreTrainedConfig) -> Family:
    """
    The family of a draft transformer.

    Raises:
        ValueError: If no drafter can be built on this family.
    """
    if text_config.model_type not in FAMILIES:
        raise ValueError(
            f"No drafter backbone for the family {text_config.model_type!r}; available: {', '.join(FAMILIES)}."
        )
    return FAMILIES[text_config.model_type]


def build_layers(text_config: PreTrainedConfig) -> nn.ModuleList:
    """The draft's decoder layers, attending in both directions."""
    family = family_of(text_config)
    layers = nn.ModuleList(family.layer(text_config, i) for i in range(text_config.num_hidden_layers))
    for layer in layers:
        layer.self_attn.is_causal = False
    return layers


def _split_heads(attention: nn.Module, projected: torch.Tensor) -> torch.Tensor:
    return projected.view(*projected.shape[:-1], -1, attention.head_dim)


def project_queries(attention: nn.Module, hidden: torch.Tensor, rotary: Rotary, family: Family) -> torch.Tensor:
    """Rotated queries `[R, heads, n, head_dim]` of hidden states `[R, n, hidden_size]`."""
    queries = _split_heads(attention, attention.q_proj(hidden))
    if hasattr(attention, "q_norm"):
        queries = attention.q_norm(queries)
    queries = queries.transpose(1, 2)
    return family.rotate(queries, queries, *rotary)[0]


def project_keys_values(
    attention: nn.Module, hidden: torch.Tensor, rotary: Rotary, family: Family
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated keys and values `[R, kv_heads, n, head_dim]` of hidden states `[R, n, hidden_size]`."""
    keys = _split_heads(attention, attention.k_proj(hidden))
    # Without a projection of their own, values are the keys before norm and rotation.
    values = keys if attention.v_proj is None else _split_heads(attention, attention.v_proj(hidden))
    if hasattr(attention, "v_norm"):
        values = attention.v_norm(values)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys.transpose(1, 2)
    return family.rotate(keys, keys, *rotary)[0], values.transpose(1, 2)


def attend(
    attention: nn.Module,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    family: Family,
) -> torch.Tensor:
    """
    Attention output `[R, n, hidden_size]` through the attention implementation that the model was loaded with.
    `mask` is `[R, 1, n, m]`, `True` where a query may look; `None` lets every query see every key.
    """
    implementation = attention.config._attn_implementation
    if mask is not None and mask.dtype == torch.bool and implementation in (None, "eager"):
        mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill_(~mask, torch.finfo(queries.dtype).min)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, family.eager_attention)
    dropout = attention.attention_dropout if attention.training else 0.0
    output, _ = interface(
        attention, queries, keys, values, mask, dropout=dropout, scaling=attention.scaling, is_causal=False
    )
    return attention.o_proj(output.reshape(*output.shape[:2], -1))
