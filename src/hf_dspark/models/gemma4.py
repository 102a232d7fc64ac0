"""What the modules of Gemma 4 do otherwise than those of the other families."""

import copy

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .configuration_gemma4 import FULL, LEFT_OUT


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
