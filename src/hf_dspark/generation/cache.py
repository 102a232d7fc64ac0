"""The target's cache across rounds: every row of it always ends right before its anchor."""

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from ..models.rows import Layout, RowCache, RowLayer


def prepare_for_rollback(cache: Cache) -> None:
    """
    Makes the prefilled cache able to forget rejected drafts.

    Raises:
        ValueError: If it can't, as with recurrent or linear attention; only the prefill tells of those.
    """
    if not cache.is_croppable:
        raise ValueError(
            "The target's cache can't be rolled back (recurrent or linear attention), so rejected drafts couldn't be "
            "forgotten. Call `generate` without `assistant_model`."
        )
    cache.activate_past_recording()


def forget_rejected(cache: Cache, num_verified: int, num_committed: int) -> None:
    """After a forward over the anchor and `num_verified` drafts, keeps what `num_committed` new tokens leave valid."""
    # Also called with nothing to remove: sliding-window layers trim themselves then.
    cache.crop(-(num_verified + 1 - num_committed))


def can_be_ragged(target: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """
    Whether a target's rows can have their own lengths in one forward.

    Its layers must attend, through the attention interface of transformers, to keys and values of a dynamic cache:
    recurrent layers, static and offloaded caches can't. And a row's positions must be those of its tokens, which is
    not so behind padding on the right.
    """
    cache = model_kwargs["cache"]
    kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or ()
    real, positions = prompt_mask(input_ids, model_kwargs), model_kwargs.get("position_ids")
    return (
        kinds <= {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}
        and not cache.offloading
        and target._supports_attention_backend
        # The window of chunked attention moves in jumps.
        and not set(layer_types) - {"full_attention", "sliding_attention"}
        and bool((real[:, 1:] >= real[:, :-1]).all())
        and (positions is None or bool((positions[..., -1] == real.sum(1) - 1).all()))
    )


def prompt_mask(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """What of the prompts (and of what a cache holds before them) is no padding, `(rows, length)`."""
    mask = model_kwargs.get("attention_mask")
    return torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()


def to_rows(cache: Cache, real: torch.Tensor, longest_forward: int) -> RowCache:
    """
    A prefilled cache as one whose rows have their own lengths; the old one is emptied.

    Args:
        cache (`Cache`): A dynamic cache of `(rows, heads, slots, dim)` layers, with a slot for every column of `real`
            (or for the last ones, in layers with a window).
        real (`torch.BoolTensor` of shape `(rows, columns)`): What is no padding.
        longest_forward (`int`): Most tokens that a later forward adds to a row.
    """
    layers = []
    for layer in cache.layers:
        if isinstance(layer, DummyLayer):
            layers.append(layer)
            continue
        window = layer.sliding_window if layer.is_sliding else None
        row_layer = RowLayer(window + longest_forward if window else None, window)
        if layer.is_initialized:
            stored = real[:, -layer.keys.shape[2] :]
            counts = stored.sum(1)
            layout = Layout((real.sum(1) - counts).tolist(), counts.tolist(), layer.keys.device)
            index = stored.flatten().nonzero()[:, 0]
            packed = (x.transpose(1, 2).flatten(0, 1)[index].transpose(0, 1)[None] for x in (layer.keys, layer.values))
            row_layer.write(*packed, layout)
            layer.reset()
        layers.append(row_layer)
    return RowCache(layers, real.sum(1).tolist())
