"""Blocks learn from what they will have when decoding: the context before their anchor, and nothing behind it."""

import pytest
import torch
from conftest import make_target

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.models.blocks import block_attention_mask, block_positions, block_supervision
from hf_dspark.training.trainer import freeze_borrowed


LENGTH, BLOCK = 20, 4


@pytest.fixture(params=[True, False], ids=["sample from anchor", "masks only"])
def block_drafter(request, tiny_target):
    torch.manual_seed(1)
    return DFlashDrafter.from_target(
        tiny_target, mask_token_id=1, num_hidden_layers=2, block_size=BLOCK, sample_from_anchor=request.param
    )


def draft_inputs(drafter, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    return torch.randint(2, 64, (1, LENGTH)), torch.randn(1, LENGTH, width)


def test_slots_stand_at_the_anchor_and_behind_it():
    assert block_positions(torch.tensor([[3, 7]]), 4).tolist() == [[[3, 4, 5, 6], [7, 8, 9, 10]]]


def test_a_block_sees_the_context_before_its_anchor_and_its_own_slots():
    mask = block_attention_mask(torch.tensor([[0, 2]]), block_size=2, context_length=4)
    assert mask[0, 0].int().tolist() == [
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0, 0, 1, 1],
    ]


@torch.no_grad()
def test_what_follows_an_anchor_does_not_move_its_block(block_drafter):
    ids, features = draft_inputs(block_drafter)
    anchors = torch.tensor([[5, 7, 12]])
    before = block_drafter.training_hidden(ids, features, anchors)
    # Of the anchor itself the token is known and the feature not yet.
    changed, other = ids.clone(), features.clone()
    changed[:, 6:] = torch.randint(2, 64, (1, LENGTH - 6))
    other[:, 5:] = torch.randn_like(other[:, 5:])
    after = block_drafter.training_hidden(changed, other, anchors)
    torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=1e-6)
    assert (after[:, 2] - before[:, 2]).abs().max() > 1e-2


@torch.no_grad()
def test_the_anchor_token_and_the_context_before_it_do_move_the_block(block_drafter):
    ids, features = draft_inputs(block_drafter)
    anchors = torch.tensor([[5]])
    before = block_drafter.training_hidden(ids, features, anchors)
    nearest = features.clone()
    nearest[:, 4] += 1.0
    assert (block_drafter.training_hidden(ids, nearest, anchors) - before).abs().max() > 1e-3
    token = ids.clone()
    token[:, 5] = token[:, 5] % 60 + 2
    assert (block_drafter.training_hidden(token, features, anchors) - before).abs().max() > 1e-3


@torch.no_grad()
def test_blocks_do_not_see_each_other(block_drafter):
    ids, features = draft_inputs(block_drafter)
    together = block_drafter.training_hidden(ids, features, torch.tensor([[5, 6, 7]]))
    alone = block_drafter.training_hidden(ids, features, torch.tensor([[6]]))
    torch.testing.assert_close(together[:, 1], alone[:, 0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_block_is_trained_as_it_decodes(block_drafter):
    """The training forward's hidden states are those of a decoding round at the same anchor."""
    ids, features = draft_inputs(block_drafter)
    trained = block_drafter.training_hidden(ids, features, torch.tensor([[9]]))[:, 0]
    cache = block_drafter.new_cache()
    block_drafter.extend(cache, features[:, :9], ids[:, 1:10])
    torch.testing.assert_close(block_drafter.block_hidden(cache, ids[:, 9]), trained, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_eagle3_does_not_see_what_follows(tiny_target):
    # Drafters that begin as their target don't read embeddings yet.
    drafter = Eagle3Drafter.from_target(tiny_target, num_drafts=3, init_from_target=False)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    ids, features = draft_inputs(drafter)
    changed, other = ids.clone(), features.clone()
    changed[:, 11:] = changed[:, 11:] % 60 + 2
    other[:, 10:] += 1.0
    for k, (before, after) in enumerate(zip(drafter.unroll(ids, features), drafter.unroll(changed, other))):
        # Step k at position t has been fed the tokens up to t + 1 + k.
        torch.testing.assert_close(after[:, : 10 - k], before[:, : 10 - k], rtol=0, atol=1e-5)
        assert (after[:, 10 - k] - before[:, 10 - k]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_eagle3_unrolls_at_some_columns_as_at_all(rope_type):
    """
    Prompts and padding are only looked at: what is supervised doesn't need their later steps. Nor does it matter
    where the tables of rotary embeddings depend on the longest position.
    """
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 1e4}
    target = make_target(max_position_embeddings=LENGTH - 2, rope_parameters=rope)
    drafter = Eagle3Drafter.from_target(target, num_drafts=3)
    ids, features = draft_inputs(drafter)
    columns = torch.tensor([[3, 4, 9]]).expand(len(ids), -1)
    for whole, some in zip(drafter.unroll(ids, features), drafter.unroll(ids, features, columns)):
        torch.testing.assert_close(some, whole[:, [3, 4, 9]])


@pytest.mark.parametrize(
    "rows,columns",
    [
        ([[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]], [[2, 3, 4], [0, 1, 2]]),
        ([[1, 1, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]], [[0, 1, 3, 4, 5], [0, 1, 2, 3, 4]]),
        ([[0, 0, 0, 0, 0, 0]], [[0]]),
    ],
)
def test_eagle3_unrolls_where_a_step_is_supervised(rows, columns, tiny_target):
    drafter = Eagle3Drafter.from_target(tiny_target, num_drafts=3)
    assert drafter._supervised_columns(torch.tensor(rows, dtype=torch.bool)).tolist() == columns


def test_the_serial_head_is_fed_the_token_before_each_draft(tiny_target):
    """Drafts after the first learn from the true token before them, and the last token of a block feeds nothing."""
    drafter = DSparkDrafter.from_target(tiny_target, mask_token_id=1, block_size=BLOCK, markov_rank=8)
    freeze_borrowed(drafter)
    ids, features = draft_inputs(drafter)
    ids = torch.arange(2, 2 + LENGTH)[None]
    drafter(
        input_ids=ids,
        target_features=features,
        target_last_hidden=torch.randn(1, LENGTH, 32),
        anchors=torch.tensor([[5]]),
    ).loss.backward()
    used = drafter.markov_head.markov_w1.weight.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert used == ids[0, 5 : 5 + BLOCK].tolist()


# ---------------------------------------------------------------------- supervision


def supervise(loss_mask: list[int], anchors: list[int], anchor_mask: list[bool] | None = None, decay=None):
    mask = torch.tensor([loss_mask])
    anchor_mask = torch.tensor([anchor_mask or [True] * len(anchors)])
    ids = torch.arange(100, 100 + len(loss_mask))[None]
    return block_supervision(ids, mask, torch.tensor([anchors]), anchor_mask, 3, decay)


def test_draft_k_learns_the_token_k_places_behind_the_first():
    positions, labels, weights = supervise([1] * 8, [0, 3])
    assert positions.tolist() == [[[1, 2, 3], [4, 5, 6]]]
    assert labels.tolist() == [[[101, 102, 103], [104, 105, 106]]]
    assert weights.tolist() == [[[1, 1, 1], [1, 1, 1]]]


def test_supervision_of_a_block_stops_at_its_first_unsupervised_token():
    assert supervise([1, 1, 0, 1, 1, 1, 1], [0, 2])[2].tolist() == [[[1, 0, 0], [1, 1, 1]]]


def test_supervision_ends_with_the_sequence():
    assert supervise([1] * 5, [3, 4])[2].tolist() == [[[1, 0, 0], [0, 0, 0]]]


def test_anchors_that_are_none_are_not_supervised():
    assert supervise([1] * 8, [0, 0], [True, False])[2].tolist() == [[[1, 1, 1], [0, 0, 0]]]


def test_weights_decay_along_the_block():
    weights = supervise([1] * 8, [1], decay=2.0)[2]
    torch.testing.assert_close(weights[0, 0], torch.exp(-torch.arange(3) / 2.0))
