"""
Attention of a target over rows of different lengths. The rows' tokens come packed into one sequence, so that linear
layers and experts see no padding; only here are they laid side by side, each row against its own keys and values.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from ..models.rows import Layout, RowCache, RowLayer


NAME = "hf_dspark_rows"
# The cache of the forward that is on, and the implementation that attends.
_current: ContextVar[tuple[RowCache, str]] = ContextVar(NAME)


def row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    An attention function of transformers.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(1, heads, tokens, head_dim)`): Packed queries.
        key, value (`torch.Tensor` of shape `(rows, kv_heads, slots, head_dim)`): As the [`RowCache`] returned them.
        attention_mask (`torch.Tensor`, *optional*): Not looked at; the mask comes from the layout.
        **kwargs: What else the model passes: the scaling, the window, and what its own attention knows of.

    Returns:
        The output `(1, tokens, heads, head_dim)`, and no weights.
    """
    cache, implementation = _current.get()
    layout = cache.layout
    ring, window = _reach(module, cache, kwargs.get("sliding_window"))
    mask, query = layout.causal_mask(key.shape[2], ring, window), layout.unpack(query)
    # What PyTorch's attention does not know, a model's own does.
    is_known = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    if implementation == "sdpa" and is_known:
        return layout.pack(_grouped_attention(query, key, value, mask, layout, kwargs.get("scaling"))), None
    bias = layout.keep(("bias", id(mask), query.dtype), lambda: _bias(mask, query.dtype))
    output, _ = _eager_attention(module)(module, query, key, value, bias, **kwargs)
    return layout.pack(output), None


def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layout: Layout,
    scaling: float | None,
) -> torch.Tensor:
    """
    Attention output `[rows, longest, heads, head_dim]`. The queries that share a key head stand behind one another, so
    that keys and values are not repeated for them.
    """
    rows, heads, longest, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * longest, -1)
        mask = layout.keep(("grouped", id(mask), groups), lambda: mask.repeat(1, 1, groups, 1))
    output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, longest, -1).transpose(1, 2)


def _eager_attention(module: nn.Module) -> Callable:
    """The attention that a model falls back on; every model file of transformers has its own."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _reach(module: nn.Module, cache: RowCache, window: int | None) -> tuple[int | None, int | None]:
    """Size of the ring that a layer's keys lie in, if they do, and its window."""
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    if not isinstance(layer, RowLayer):
        # A layer that reads the keys and values of an earlier one of its kind.
        layer = next((other for other in cache.layers if getattr(other, "window", None) == window), None)
    if layer is None or layer.ring is None:
        return None, window
    return layer.ring, layer.window


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


class RowAttention:
    """
    Switches a target to attention over rows, for one forward at a time.

    Args:
        target (`PreTrainedModel`): The target.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        configs = {id(module.config): module.config for module in target.modules() if hasattr(module, "config")}
        self.configs = [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]
        # Kernels that take no mask can't attend to rows of different lengths; PyTorch's own takes their place, or the
        # model's own code where the model can't do with that.
        implementation = target.config.get_text_config(decoder=True)._attn_implementation
        is_eager = implementation in (None, "eager") or not target._supports_sdpa
        self.implementation = "eager" if is_eager else "sdpa"

    @contextmanager
    def over(self, cache: RowCache) -> Iterator[None]:
        """Within it the target's layers attend over the cache's open layout."""
        before = [config._attn_implementation_internal for config in self.configs]
        token = _current.set((cache, self.implementation))
        try:
            for config in self.configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, implementation in zip(self.configs, before):
                config._attn_implementation_internal = implementation
            _current.reset(token)


AttentionInterface.register(NAME, row_attention)
