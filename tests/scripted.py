"""Drafters that do as they are told, so that a test decides how many drafts are accepted."""

import random

import torch

from hf_dspark import DSparkDrafter
from hf_dspark.models.drafter import Proposal


class OracleDrafter(DSparkDrafter):
    """
    Drafts the continuations that it was told (`tell`), each token wrong with probability `1 - hit_rate`. Everything
    else is a real drafter's: it takes in features, keeps a cache, and proposes no more than it is asked for.
    """

    def tell(self, sequences: list[int] | list[list[int]], hit_rate: float, seed: int = 0) -> "OracleDrafter":
        """Each of the sequences, or the only one, holds prompt and continuation, padding left out."""
        self.sequences = [list(s) for s in sequences] if isinstance(sequences[0], list) else [list(sequences)]
        self.hit_rate, self.chance = hit_rate, random.Random(seed)
        self.rounds: list[tuple[int, int]] = []
        return self

    def extend(self, cache, features, next_tokens, counts=None):
        super().extend(cache, features, next_tokens, counts)
        counts = counts or [next_tokens.shape[1]] * next_tokens.shape[0]
        known = getattr(cache, "known", [None] * len(counts))
        # What each row of the cache holds, so that rows are told apart whatever order they are in.
        pieces = next_tokens.flatten().split(counts)
        cache.known = [(told or [None]) + piece.tolist() for told, piece in zip(known, pieces)]

    def new_cache(self, context_window=None):
        cache = super().new_cache(context_window)
        drop = cache.drop_row

        def drop_row(row):
            drop(row)
            cache.known[row] = cache.known[-1]
            del cache.known[-1]

        cache.drop_row = drop_row
        return cache

    def _continuation(self, known: list[int]) -> list[int]:
        """The sequence that goes on from what a row holds; its first token is in no cache of next tokens."""
        return next(s[len(known) :] for s in self.sequences if s[1 : len(known)] == known[1:])

    def propose(self, cache, anchors, num_drafts=None, draw=None):
        num_drafts = self.num_drafts if num_drafts is None else num_drafts
        assert [known[-1] for known in cache.known] == anchors.tolist()
        # The cache holds exactly the positions before the anchor.
        assert [len(known) - 1 for known in cache.known] == cache.lengths
        rows = []
        for known in cache.known:
            tokens = []
            for right in self._continuation(known)[:num_drafts]:
                is_hit = self.chance.random() < self.hit_rate
                tokens.append(right if is_hit else (right + self.chance.randrange(1, self.config.vocab_size)))
            while len(tokens) < num_drafts:
                tokens.append(self.chance.randrange(self.config.vocab_size))
            rows.append(tokens)
        self.rounds.append((max(cache.lengths), num_drafts))
        confidences = torch.tensor([[self.chance.random() ** 0.5 for _ in tokens] for tokens in rows])
        return Proposal(torch.tensor(rows) % self.config.vocab_size, None, confidences)


class StubbornDrafter(DSparkDrafter):
    """Drafts every slot from the same logits (`insist_on`), whatever the context is."""

    def insist_on(self, logits: torch.Tensor) -> "StubbornDrafter":
        self.fixed_logits = logits
        return self

    def base_logits(self, hidden):
        return self.fixed_logits.expand(*hidden.shape[:-1], -1)
