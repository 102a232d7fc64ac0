"""Which positions are trained: supervised ones with a supervised successor, drawn alike however a batch is split."""

import torch

from hf_dspark.training.anchors import draw_anchors
from hf_dspark.training.data import DraftCollator


def example(seed: int, length: int = 60, supervised: range | None = None) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (length,), generator=generator).tolist()
    supervised = range(10, length) if supervised is None else supervised
    return {"input_ids": ids, "loss_mask": [int(i in supervised) for i in range(length)]}


def anchors_of(collator: DraftCollator, examples: list[dict]) -> list[list[int]]:
    batch = collator(examples)
    return [row[mask].tolist() for row, mask in zip(batch["anchors"], batch["anchor_mask"])]


def test_only_supervised_positions_with_a_supervised_successor():
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1])
    assert draw_anchors(torch.arange(9), mask, 100, seed=0).tolist() == [1, 2, 7]


def test_nothing_supervised_gives_no_anchor():
    assert draw_anchors(torch.arange(5), torch.zeros(5, dtype=torch.long), 4, seed=0).tolist() == []
    assert draw_anchors(torch.arange(5), torch.tensor([0, 1, 0, 1, 0]), 4, seed=0).tolist() == []


def test_a_draw_is_capped_ascending_and_without_repetition():
    ids, mask = torch.arange(200), torch.ones(200, dtype=torch.long)
    mask[:50] = 0
    drawn = draw_anchors(ids, mask, 20, seed=3)
    assert len(drawn) == 20 == len(set(drawn.tolist()))
    assert drawn.tolist() == sorted(drawn.tolist())
    assert drawn.min() >= 50 and drawn.max() < 199


def test_every_candidate_is_drawn_sooner_or_later():
    ids, mask = torch.arange(30), torch.ones(30, dtype=torch.long)
    drawn = {int(a) for seed in range(100) for a in draw_anchors(ids, mask, 5, seed)}
    assert drawn == set(range(29))


def test_the_draw_does_not_depend_on_the_split_into_batches():
    examples = [example(i, length=40 + 3 * i) for i in range(6)]
    collate = DraftCollator(pad_token_id=0, num_anchors=7, seed=42)
    whole = anchors_of(collate, examples)
    split = anchors_of(collate, examples[:1]) + anchors_of(collate, examples[1:4]) + anchors_of(collate, examples[4:])
    assert whole == split
    assert len({tuple(a) for a in whole}) == 6


def test_each_epoch_and_each_seed_draws_anew():
    examples = [example(0)]
    collate = DraftCollator(pad_token_id=0, num_anchors=7, seed=42)
    first = anchors_of(collate, examples)
    collate.epoch = 1
    second = anchors_of(collate, examples)
    assert first != second
    assert anchors_of(DraftCollator(0, 7, seed=43), examples) not in (first, second)
    collate.epoch = 0
    assert anchors_of(collate, examples) == first


def test_large_seeds_draw_too():
    """transformers takes seeds up to 2**32 - 1."""
    collate = DraftCollator(pad_token_id=0, num_anchors=7, seed=2**32 - 1)
    assert len(anchors_of(collate, [example(0)])[0]) == 7
