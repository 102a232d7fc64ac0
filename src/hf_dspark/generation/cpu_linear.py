"""
Linear layers on CPUs of the AVX2 generation, which most laptops have.

There torch multiplies a single row quickly and a few rows slowly. In 16 bits it takes one row after the other, so that
a forward over 8 tokens costs several over one, and checking drafts can't pay. Kernels that torch ships for x86 take a
few rows at nearly the cost of one, once the weights are packed: FBGEMM's for 16 bits, summing in float32, and oneDNN's
for float32.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging


logger = logging.get_logger(__name__)

_HALF = (torch.bfloat16, torch.float16)
# Rows that oneDNN's packing is laid out for, and most rows that it then serves better than torch's own product.
_FLOAT_LAYOUT, _MOST_FLOAT_ROWS = 4, 16
_LARGEST_HALF = torch.finfo(torch.float16).max
# Of so many weights of a layer the values are remembered, to see whether they have changed.
_SAMPLED = 64
# The packed weights of a layer, and the weights that they were made from.
_packed: weakref.WeakKeyDictionary[nn.Linear, tuple[tuple, Any]] = weakref.WeakKeyDictionary()
# How many callers have a layer switched at the moment.
_users: weakref.WeakKeyDictionary[nn.Linear, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def fast_linear_layers(*models: nn.Module | None) -> Iterator[None]:
    """
    Within it, linear layers on this CPU run on packed copies of their weights, where that is faster.

    Inputs and outputs keep their type; products are summed in float32, as torch's own kernels do, so results differ
    from theirs by rounding alone. The copies take as much memory as the weights and are kept as long as the model; a
    model whose copies would take over half of the free memory stays as it is, with a warning. Decoding with a drafter
    does this by itself. A plain `generate` of one prompt computes one row a step, which torch does best, and gains
    nothing but a faster prompt; around it, it tells the drafter's gain from that of the layers.

    Args:
        *models (`nn.Module`): The models, in float32 or 16 bits. Those on other devices stay as they are.

    Example:

    ```python
    >>> from hf_dspark import fast_linear_layers

    >>> with fast_linear_layers(model):  # doctest: +SKIP
    ...     model.generate(**inputs)
    ```
    """
    layers = [layer for model in models if model is not None for layer in _layers_to_pack(model)]
    # All are packed before any is switched: if memory runs out, the models are as they were.
    forwards = {layer: _PackedForward(layer) for layer in layers}
    with _lock:
        for layer, forward in forwards.items():
            _users[layer] = _users.get(layer, 0) + 1
            layer.forward = forward
    try:
        yield
    finally:
        with _lock:
            for layer in forwards:
                _users[layer] -= 1
                if not _users[layer]:
                    layer.__dict__.pop("forward", None)


class _PackedForward:
    """What stands in for a layer's `forward`."""

    def __init__(self, layer: nn.Linear) -> None:
        self.weight, self.bias, self.packed = layer.weight, layer.bias, _pack(layer)
        self.is_half = layer.weight.dtype in _HALF
        multiply = torch.ops.quantized.linear_dynamic_fp16 if self.is_half else torch.ops.mkldnn._linear_pointwise
        # Choosing among overloads takes as long as a small product.
        self.multiply = multiply.default

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        # The packed kernels know neither gradients nor autocast.
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            rows = input.numel() // input.shape[-1]
            if self.is_half and rows != 1:
                return self.multiply(input.float(), self.packed).to(self.weight.dtype)
            if not self.is_half and 1 < rows <= _MOST_FLOAT_ROWS:
                return self.multiply(input, self.packed, self.bias, "none", [], "")
        return F.linear(input, self.weight, self.bias)


def types_to_pack() -> tuple[torch.dtype, ...]:
    """The number types that this CPU multiplies slowly and has faster kernels for."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return ()
    half = _HALF if "fbgemm" in torch.backends.quantized.supported_engines else ()
    return (*half, torch.float32) if hasattr(torch.ops.mkldnn, "_linear_pointwise") else half


def _layers_to_pack(model: nn.Module) -> list[nn.Linear]:
    types = types_to_pack()
    layers = [module for module in model.modules() if type(module) is nn.Linear and _can_be_packed(module, types)]
    size = sum(layer.weight.nbytes for layer in layers if layer not in _packed)
    if size > _available_memory() / 2:
        logger.warning_once(
            f"Packed copies of the linear layers would speed up several tokens a forward on this CPU, but take "
            f"{size / 1e9:.1f} GB, more than half of the free memory. Decoding goes on without them."
        )
        return []
    return layers


def _can_be_packed(layer: nn.Linear, types: tuple[torch.dtype, ...]) -> bool:
    weight = layer.weight
    return (
        weight.dtype in types
        and weight.device.type == "cpu"
        and weight.numel() > 0
        # Sharded, quantised and the like have their own way to multiply. So has a replaced `forward`.
        and type(weight) in (nn.Parameter, torch.Tensor)
        and isinstance(layer.__dict__.get("forward"), _PackedForward | None)
        # What float16 can't hold stays with torch's kernels; bfloat16 weights too small for it are rounded by 2^-25.
        and (_is_packed(layer) or weight.dtype not in _HALF or weight.detach().abs().max() <= _LARGEST_HALF)
    )


def _is_packed(layer: nn.Linear) -> bool:
    """Whether there is a packed copy of the weights as they are now; one of other weights is forgotten."""
    if layer in _packed and _packed[layer][0] != _state(layer):
        _packed.pop(layer, None)
    return layer in _packed


def _state(layer: nn.Linear) -> tuple:
    """
    What tells weights from those that were packed. Fused optimizers and writes to `.data` leave their version as it
    is, so the bits are looked at: all of them in one number that knows the rows' order, as fast as memory is, and some
    themselves.
    """
    weight, bias = layer.weight.detach(), layer.bias
    version = None if weight.is_inference() else weight._version
    size = weight.itemsize
    is_aligned = weight.is_contiguous() and (weight.storage_offset() * size | weight.shape[1] * size) % 8 == 0
    bits = weight.contiguous().view(torch.int64 if is_aligned else torch.int16)
    total = int((bits.sum(1) * torch.arange(1, len(bits) + 1)).sum())
    # An odd step spreads them over the columns.
    sample = bits.flatten()[:: max(bits.numel() // _SAMPLED, 1) | 1].tolist()
    return weight.dtype, weight.shape, version, total, sample, None if bias is None else bias.tolist()


def _pack(layer: nn.Linear) -> Any:
    if layer not in _packed:
        weight = layer.weight.detach()
        if weight.dtype in _HALF:
            bias = None if layer.bias is None else layer.bias.detach().float()
            packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _FLOAT_LAYOUT)
        _packed[layer] = _state(layer), packed
    return _packed[layer][1]


def _available_memory() -> float:
    """Bytes that can be had without swapping; unlimited where that can't be read."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")
