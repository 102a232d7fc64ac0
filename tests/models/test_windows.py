"""Sliding layers of block drafters: what a slot sees, and that decoding and training see the same."""

import pytest
import torch
from conftest import make_target

from hf_dspark import DFlashDrafter
from hf_dspark.models.blocks import Window, block_attention_mask


def seen(window: Window | None, anchor: int = 6, block_size: int = 3, context_length: int = 8) -> list[list[int]]:
    """For each slot the context positions that it sees, and then the slots, as positions behind the context."""
    mask = block_attention_mask(torch.tensor([[anchor]]), block_size, context_length, window)
    assert mask.shape == (1, 1, block_size, context_length + block_size)
    return [row.nonzero().flatten().tolist() for row in mask[0, 0]]


def test_without_a_window_all_before_the_anchor_and_the_block():
    everything = [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert seen(None) == [everything] * 3


def test_counted_from_each_slot():
    # Slots stand at 6, 7 and 8, and see less than 4 positions away.
    assert seen(Window(4)) == [[3, 4, 5, 8, 9, 10], [4, 5, 8, 9, 10], [5, 8, 9, 10]]


def test_shorter_than_the_block():
    assert seen(Window(2)) == [[5, 8, 9], [8, 9, 10], [9, 10]]


def test_counted_from_the_anchor():
    assert seen(Window(2, from_anchor=True)) == [[4, 5, 8, 9, 10]] * 3


def test_causal_inside_the_block():
    assert seen(Window(4, causal=True)) == [[3, 4, 5, 8], [4, 5, 8, 9], [5, 8, 9, 10]]


def test_blocks_do_not_see_each_other():
    mask = block_attention_mask(torch.tensor([[2, 5]]), 2, 6, Window(3))[0, 0]
    assert mask[:2, 6:].tolist() == [[True, True, False, False]] * 2
    assert mask[2:, 6:].tolist() == [[False, False, True, True]] * 2


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [2, 5, 100])
@torch.no_grad()
def test_decoding_sees_what_training_sees(from_anchor, causal, window):
    """Also where the context is shorter than the window, and whatever was taken in at once."""
    target = make_target("qwen3")
    drafter = DFlashDrafter.from_target(target, num_hidden_layers=2, mask_token_id=63, block_size=4)
    text = drafter.config.text_config
    text.layer_types, text.sliding_window = ["sliding_attention", "full_attention"], window
    drafter.config.window_from_anchor, drafter.config.sliding_causal = from_anchor, causal
    torch.manual_seed(0)
    for layer in drafter.layers:
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    ids = torch.randint(0, 63, (1, 16))
    features = torch.randn(1, 16, drafter.fc.in_features)
    anchors = torch.tensor([[1, 7, 12]])
    together, cache, past = drafter.training_hidden(ids, features, anchors), drafter.new_cache(), 0
    for n, anchor in enumerate(anchors[0].tolist()):
        drafter.extend(cache, features[:, past:anchor], None)
        past = anchor
        torch.testing.assert_close(drafter.block_hidden(cache, ids[:, anchor]), together[:, n])


@torch.no_grad()
def test_what_lies_outside_the_window_does_not_matter():
    target = make_target("qwen3")
    drafter = DFlashDrafter.from_target(target, num_hidden_layers=1, mask_token_id=63, block_size=4)
    text = drafter.config.text_config
    text.layer_types, text.sliding_window = ["sliding_attention"], 5
    features = torch.randn(2, 12, drafter.fc.in_features)
    # The first slot, at 12, sees 8 to 11.
    features[1, 8:] = features[0, 8:]
    cache = drafter.new_cache()
    drafter.extend(cache, features, None)
    hidden = drafter.block_hidden(cache, torch.tensor([3, 3]))
    torch.testing.assert_close(hidden[0], hidden[1])
    assert not torch.equal(features[0], features[1])
