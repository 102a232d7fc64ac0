"""Drafters that do as they are told, so that a test decides how many drafts are accepted."""

import random

import torch

from hf_dspark import DSparkDrafter
from hf_dspark.models.drafter import Proposal


class OracleDrafter(DSparkDrafter):
    """
    Drafts the continuation that it was told (`tell`), each token wrong with probability `1 - hit_rate`. Everything
    else is a real drafter's: it takes in features, keeps a cache, and proposes no more than it is asked for.
    """

    def tell(self, sequence: list[int], hit_rate: float, seed: int = 0) -> "OracleDrafter":
        """`sequence` holds prompt and continuation, padding left out."""
        self.sequence, self.hit_rate, self.chance = list(sequence), hit_rate, random.Random(seed)
        self.rounds: list[tuple[int, int]] = []
        return self

    def propose(self, cache, anchors, num_drafts=None, draw=None):
        num_drafts = self.num_drafts if num_drafts is None else num_drafts
        position = cache.get_seq_length()
        # The cache must hold exactly the positions before the anchor.
        assert self.sequence[position] == int(anchors), (position, int(anchors), self.sequence)
        tokens = []
        for right in self.sequence[position + 1 : position + 1 + num_drafts]:
            is_hit = self.chance.random() < self.hit_rate
            tokens.append(right if is_hit else (right + self.chance.randrange(1, self.config.vocab_size)))
        while len(tokens) < num_drafts:
            tokens.append(self.chance.randrange(self.config.vocab_size))
        self.rounds.append((position, num_drafts))
        confidences = torch.tensor([[self.chance.random() ** 0.5 for _ in tokens]])
        return Proposal(torch.tensor([tokens]) % self.config.vocab_size, None, confidences)


class StubbornDrafter(DSparkDrafter):
    """Drafts every slot from the same logits (`insist_on`), whatever the context is."""

    def insist_on(self, logits: torch.Tensor) -> "StubbornDrafter":
        self.fixed_logits = logits
        return self

    def base_logits(self, hidden):
        return self.fixed_logits.expand(*hidden.shape[:-1], -1)
