"""Counters of a speculative run, and what is derived from them. Every metric of the library is defined here."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class Speculation:
    """
    What happened in a run. A round is one target forward after the prefill; the token that the prefill itself gives
    belongs to no round.

    Args:
        accepted_lengths (`list[list[int]]`): Per row, the committed tokens of each round, the target's own included;
            tokens cut off by a stop or by the length limit do not count.
        proposed, verified, reached, accepted (`list[int]`): Per draft position, the rounds that drafted it, that sent
            it through the target, that did so and accepted everything before it, and that committed it.
        target_forwards (`int`): Forwards of the target, the prefill included.
        generated_tokens (`int`): New tokens, over all rows.
        draft_seconds, target_seconds, total_seconds (`float`): Wall-clock time; what is neither draft nor target is
            everything else.
    """

    accepted_lengths: list[list[int]] = field(default_factory=lambda: [[]])
    proposed: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    target_forwards: int = 0
    generated_tokens: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return sum(len(row) for row in self.accepted_lengths)

    @property
    def mean_accepted_length(self) -> float:
        """Committed tokens a round; `nan` without a round."""
        return sum(map(sum, self.accepted_lengths)) / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per target forward, the prefill included; plain decoding of one row has 1."""
        return self.generated_tokens / self.target_forwards if self.target_forwards else float("nan")

    @property
    def verification_efficiency(self) -> float:
        """Share of the verified drafts that were accepted; `nan` if none was verified."""
        return sum(self.accepted) / sum(self.verified) if sum(self.verified) else float("nan")

    @property
    def marginal_acceptance(self) -> list[float]:
        """Per draft position, the share of the rounds verifying it that accepted it."""
        return [a / v if v else float("nan") for a, v in zip(self.accepted, self.verified)]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Per draft position, the same among the rounds that accepted everything before it."""
        return [a / r if r else float("nan") for a, r in zip(self.accepted, self.reached)]

    def record_round(self, num_proposed: int, num_verified: int, num_accepted: int, num_committed: int) -> None:
        """Counts one round of one row."""
        for counts, number in (
            (self.proposed, num_proposed),
            (self.verified, num_verified),
            (self.reached, min(num_verified, num_accepted + 1)),
            (self.accepted, num_accepted),
        ):
            counts.extend([0] * (num_proposed - len(counts)))
            for k in range(number):
                counts[k] += 1
        self.accepted_lengths[0].append(num_committed)

    @contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        """Adds the time of a block to `what` (`"draft"`, `"target"` or `"total"`)."""
        start = time.perf_counter()
        yield
        if device.type == "cuda" and what != "total":
            torch.cuda.synchronize(device)
        name = f"{what}_seconds"
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """
    [`~transformers.generation.GenerateDecoderOnlyOutput`] with the statistics of the run.

    Args:
        speculation ([`Speculation`]): The counters.
    """

    speculation: Speculation | None = None
