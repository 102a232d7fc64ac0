"""The order of training examples, drawn from seed and epoch alone: a resumed epoch goes on as it began."""

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class GroupedByLength(LengthGroupedSampler):
    """
    transformers' sampler of examples of similar length, which draws from the global generator: a run that resumes in
    the middle of an epoch would draw another order.

    Args:
        lengths (`list[int]`): Tokens of each example.
        batch_size (`int`): Examples of an update and process.
        seed (`int`): Seed of the order.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer as an epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return super().__iter__()
