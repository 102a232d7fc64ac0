"""Counters of a speculative run, and what is derived from them. Every metric of the library is defined here."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class Round:
    """
    What happened in one round, by live row. Rows that copied are kept apart from those that the drafter drafted for.

    Args:
        rows (`list[int]`): The rows, as indices in the batch.
        proposed (`int`): Drafts of each row, or tokens that it copied.
        scheduled, verified, accepted (`list[int]`):
            How many of a row's drafts the schedule chose, how many went through the target (no more than the row had
            room for), and how many were committed.
        confidences (`torch.FloatTensor` of shape `(len(rows), proposed)`, *optional*):
            What the drafter expected of each draft, uncalibrated; on the CPU.
        is_copy (`bool`): Whether the drafts were copied from the rows' own texts.
    """

    rows: list[int]
    proposed: int
    scheduled: list[int]
    verified: list[int]
    accepted: list[int]
    confidences: torch.Tensor | None = None
    is_copy: bool = False


@dataclass
class Speculation:
    """
    What happened in a run. A round of a row is one target forward after the prefill that the row takes part in; the
    token that the prefill itself gives belongs to no round.

    Args:
        accepted_lengths (`list[list[int]]`): Per row, the committed tokens of each round, the target's own included;
            tokens cut off by a stop or by the length limit do not count.
        history (`list[Round]`): Every round, with the rows that took part.
        target_forwards (`int`): Forwards of the target, the prefill included.
        generated_tokens (`int`): New tokens, over all rows.
        draft_seconds, target_seconds, preparation_seconds, total_seconds (`float`): Wall-clock time; what is none of
            the first three is everything else. Preparation makes a model's linear layers ready on some CPUs: a
            model's first call packs their weights, later ones see whether they have changed.
        schedule (`str`): The schedule that ran: `"fixed"`, `"confidence"`, `"throughput"`, or what one of your own
            calls itself.

    Per draft position, over all rows, `proposed`, `verified`, `reached` and `accepted` count the rounds that drafted
    it, that sent it through the target, that did so and accepted everything before it, and that committed it. They
    tell of the drafter alone; `copied` and `copied_accepted` count the tokens that were copied instead, see
    [`Lookup`], and sent through the target, and those of them that were committed.
    """

    accepted_lengths: list[list[int]] = field(default_factory=lambda: [[]])
    history: list[Round] = field(default_factory=list)
    target_forwards: int = 0
    generated_tokens: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    preparation_seconds: float = 0.0
    total_seconds: float = 0.0
    schedule: str = "fixed"

    def __repr__(self) -> str:
        proposed, verified, accepted = (sum(counts) for counts in (self.proposed, self.verified, self.accepted))
        prepared = f", preparing layers {self.preparation_seconds:.2f}" if self.preparation_seconds >= 0.005 else ""
        copies = f"; {self.copied} tokens copied, {self.copied_accepted} accepted" if self.copied else ""
        return (
            f"Speculation({self.generated_tokens} tokens in {self.target_forwards} target forwards, "
            f"{self.tokens_per_forward:.2f} a forward; mean accepted length {self.mean_accepted_length:.2f} over "
            f"{self.rounds} rounds; {self.schedule} schedule; {proposed} drafts proposed, {verified} verified, "
            f"{accepted} accepted{copies}; {self.total_seconds:.2f} s, of which target {self.target_seconds:.2f}, "
            f"drafter {self.draft_seconds:.2f}{prepared})"
        )

    @property
    def proposed(self) -> list[int]:
        return self._per_position(lambda r: [r.proposed] * len(r.rows))

    @property
    def verified(self) -> list[int]:
        return self._per_position(lambda r: r.verified)

    @property
    def reached(self) -> list[int]:
        return self._per_position(lambda r: [min(v, a + 1) for v, a in zip(r.verified, r.accepted)])

    @property
    def accepted(self) -> list[int]:
        return self._per_position(lambda r: r.accepted)

    @property
    def copied(self) -> int:
        """Copied tokens that went through the target."""
        return sum(sum(r.verified) for r in self.history if r.is_copy)

    @property
    def copied_accepted(self) -> int:
        """Copied tokens that were committed."""
        return sum(sum(r.accepted) for r in self.history if r.is_copy)

    @property
    def rounds(self) -> int:
        """Rounds of all rows."""
        return sum(len(row) for row in self.accepted_lengths)

    @property
    def most_drafts(self) -> int:
        """Drafts of a row in the round that drafted most."""
        return max((r.proposed for r in self.history if not r.is_copy), default=0)

    @property
    def mean_drafts(self) -> float:
        """Drafts of a row a round, paused rounds and those with copies included; `nan` without a round."""
        return sum(self.proposed) / self.rounds if self.rounds else float("nan")

    @property
    def mean_verified(self) -> float:
        """Drafts and copied tokens of a row that went through the target a round; `nan` without a round."""
        return (sum(self.verified) + self.copied) / self.rounds if self.rounds else float("nan")

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

    def record_round(
        self,
        rows: list[int],
        proposed: int,
        scheduled: list[int],
        verified: list[int],
        accepted: list[int],
        committed: list[int],
        confidences: torch.Tensor | None = None,
        is_copy: bool = False,
    ) -> None:
        """Keeps one round; `committed` counts the tokens that each row gained, the rest is as in [`Round`]."""
        self.history.append(Round(rows, proposed, scheduled, verified, accepted, confidences, is_copy))
        for row, number in zip(rows, committed):
            self.accepted_lengths[row].append(number)

    def _per_position(self, lengths: Callable[[Round], Iterable[int]]) -> list[int]:
        """How many rows' rounds got as far as each draft position."""
        counts = [0] * self.most_drafts
        for r in self.history:
            for length in () if r.is_copy else lengths(r):
                for k in range(length):
                    counts[k] += 1
        return counts

    @contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        """Adds the time of a block to `what` (`"draft"`, `"target"`, `"preparation"` or `"total"`)."""
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


def row_record(speculation: Speculation, row: int) -> dict[str, Any]:
    """What is logged of a row: its rounds, as [`count_rounds`] takes them, and their confidences if there are any."""
    rounds, confidences, committed = [], [], iter(speculation.accepted_lengths[row])
    for each in speculation.history:
        if row in each.rows:
            i = each.rows.index(row)
            # A copy is told by a fifth number.
            counts = [each.proposed, each.verified[i], each.accepted[i], next(committed)]
            rounds.append([*counts, 1] if each.is_copy else counts)
            confidences.append([] if each.confidences is None else [round(c, 6) for c in each.confidences[i].tolist()])
    return {"rounds": rounds, "confidences": confidences} if any(confidences) else {"rounds": rounds}


def count_rounds(rows: Sequence[Iterable[Sequence[int]]]) -> Speculation:
    """
    Counters of rows' recorded rounds, each its numbers of proposed, verified, accepted and committed tokens; behind
    them, a 1 if the drafts were copied.
    """
    speculation = Speculation(accepted_lengths=[[] for _ in rows])
    for row, rounds in enumerate(rows):
        for proposed, verified, accepted, committed, *is_copy in rounds:
            speculation.record_round(
                [row], proposed, [verified], [verified], [accepted], [committed], is_copy=any(is_copy)
            )
    return speculation


def accepted_histogram(speculation: Speculation) -> list[int]:
    """How many rounds committed 1, 2, 3, ... tokens; index 0 is one token. Empty without a round."""
    lengths = [length for row in speculation.accepted_lengths for length in row]
    return [lengths.count(length) for length in range(1, max(lengths, default=0) + 1)]
