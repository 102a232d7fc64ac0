"""Packed linear layers give what torch's own give, up to rounding, and leave no trace."""

import pytest
import torch
from conftest import make_target
from torch import nn

from hf_dspark import DSparkDrafter, fast_linear_layers
from hf_dspark.generation import cpu_linear


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch):
    """As on a CPU of the AVX2 generation, where this one could be taken for one."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    if len(cpu_linear.types_to_pack()) < 3:
        pytest.skip("this CPU lacks the kernels for packed weights")


def is_packed(layer: nn.Linear) -> bool:
    return isinstance(layer.__dict__.get("forward"), cpu_linear._PackedForward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 33])
def test_results_are_torchs_own_up_to_rounding(dtype, bias, rows):
    torch.manual_seed(rows)
    layer = nn.Linear(96, 40, bias=bias).to(dtype)
    x = torch.randn(2, rows, 96).to(dtype)
    with torch.no_grad():
        plain = layer(x)
        with fast_linear_layers(layer):
            assert is_packed(layer)
            packed = layer(x)
    assert packed.dtype == dtype and packed.shape == plain.shape
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    # 16 bits are rounded once, at the end; in float32 every sum is.
    roundings = 96 if dtype == torch.float32 else 1
    unit = roundings * torch.finfo(dtype).eps * exact.abs().clamp_min(1)
    assert ((packed.double() - exact).abs() <= unit).all()


def test_layers_are_as_before_afterwards_also_nested_and_after_an_error():
    layer = nn.Linear(8, 8).bfloat16()
    with pytest.raises(RuntimeError, match="stop"), fast_linear_layers(layer):
        with fast_linear_layers(layer):
            pass
        assert is_packed(layer)
        raise RuntimeError("stop")
    assert not is_packed(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_needs_gradients_gets_them(dtype):
    layer = nn.Linear(8, 8).to(dtype)
    with fast_linear_layers(layer):
        layer(torch.randn(2, 8).to(dtype)).sum().backward()
    assert layer.weight.grad is not None


def test_one_row_in_float32_is_plain_decodings_product():
    layer, x = nn.Linear(96, 40), torch.randn(1, 96)
    with torch.no_grad(), fast_linear_layers(layer):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changed_weights_are_packed_anew(dtype):
    layer = nn.Linear(8, 8, bias=False).to(dtype)
    x = torch.ones(2, 8).to(dtype)
    with torch.no_grad():
        with fast_linear_layers(layer):
            layer(x)
        layer.weight.zero_()
        with fast_linear_layers(layer):
            assert torch.equal(layer(x), torch.zeros(2, 8).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("change", ["fused", "data", "one weight", "rows", "columns", "bias"])
def test_changes_that_tensors_do_not_count_are_seen(change, dtype):
    """Fused optimizers, the Trainer's default, and writes to `.data`, as merging adapters makes them."""
    layer, x = nn.Linear(96, 40).to(dtype), torch.randn(4, 96, dtype=dtype)
    with torch.no_grad(), fast_linear_layers(layer):
        layer(x)
    version = layer.weight._version
    if change == "fused":
        layer(x).sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()
    elif change == "data":
        layer.weight.data += 0.1
    elif change == "one weight":
        layer.weight.data[7, 31] += 9
    elif change == "rows":
        layer.weight.data[[3, 8]] = layer.weight.data[[8, 3]]
    elif change == "columns":
        layer.weight.data[:] = layer.weight.data.flip(1)
    else:
        layer.bias.data[7] += 9
    assert layer.weight._version == version
    with torch.no_grad():
        plain = layer(x)
        with fast_linear_layers(layer):
            assert torch.allclose(layer(x), plain, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_that_begins_anywhere_in_memory_is_packed(dtype):
    layer, x = nn.Linear(5, 3).to(dtype), torch.randn(2, 5, dtype=dtype)
    layer.weight = nn.Parameter(torch.randn(17, dtype=dtype)[1:16].view(3, 5))
    with torch.no_grad(), fast_linear_layers(layer):
        assert is_packed(layer)
        assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-2, atol=1e-2)


def test_only_plain_layers_within_range_are_packed():
    class Own(nn.Linear):
        pass

    big = nn.Linear(8, 8).bfloat16()
    big.weight.data[0, 0] = 1e6
    replaced = nn.Linear(8, 8).bfloat16()
    replaced.forward = lambda x: x
    layers = nn.ModuleList([nn.Linear(8, 8).double(), Own(8, 8).bfloat16(), big, replaced, nn.Linear(8, 8).bfloat16()])
    with fast_linear_layers(layers, None):
        assert [is_packed(layer) for layer in layers] == [False] * 4 + [True]
    assert "forward" in replaced.__dict__


def test_copies_that_would_not_fit_are_not_made(monkeypatch):
    monkeypatch.setattr(cpu_linear, "_available_memory", lambda: 100.0)
    layer = nn.Linear(8, 8).bfloat16()
    with fast_linear_layers(layer):
        assert not is_packed(layer)


def test_nothing_changes_on_a_cpu_that_needs_none(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer = nn.Linear(8, 8).bfloat16()
    with fast_linear_layers(layer):
        assert not is_packed(layer)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_decoding_with_a_drafter_uses_them_for_target_and_drafter(monkeypatch, draft_vocab_size):
    target = make_target().bfloat16()
    reduced = {"draft_vocab_size": draft_vocab_size, "token_counts": torch.arange(64)} if draft_vocab_size else {}
    drafter = DSparkDrafter.from_target(target, mask_token_id=3, **reduced).bfloat16()
    seen = set()
    original = cpu_linear._PackedForward.__call__

    def spy(self, input):
        seen.add(self.weight.data_ptr())
        return original(self, input)

    monkeypatch.setattr(cpu_linear._PackedForward, "__call__", spy)
    target.generate(torch.randint(1, 64, (1, 9)), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    used = [*target.modules(), *drafter.layers.modules(), drafter.fc]
    assert {m.weight.data_ptr() for m in used if type(m) is nn.Linear} | {drafter.head_weight().data_ptr()} <= seen
    assert not any(is_packed(m) for m in target.modules() if isinstance(m, nn.Linear))


def test_weights_that_outgrow_float16_after_packing_are_left_to_torch():
    layer = nn.Linear(8, 8).bfloat16()
    with fast_linear_layers(layer):
        assert is_packed(layer)
    layer.weight.data.mul_(1e6)
    layer.weight.data = layer.weight.data.clone()
    with fast_linear_layers(layer):
        assert not is_packed(layer)
