"""
What another schedule would have done, from rounds that verified the whole block.

A recorded round tells how far the drafts behind its anchor were right. A schedule that verifies less commits part of
that run and starts its next round inside it, where the rest of the run is still ahead of it; a fresh block drafted
from there is taken to be right exactly that far, which is cautious: a draft made from nearer is rather better. Where a
whole block was right, nobody knows whether one more draft would have been; it is taken to be.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..generation.scheduling import Schedule


@dataclass(frozen=True)
class RecordedRound:
    """
    A round that verified the whole block.

    Args:
        committed (`int`): Committed tokens.
        accepted (`int`): Accepted drafts among them.
        verified (`int`): Verified drafts: fewer than the block at the end of a generation.
        confidences (`tuple[float, ...]`): Of the drafts, as the drafter gave them; none without a confidence head.
        room (`int`, *optional*): Tokens that the row could still take, where that is less than a whole block and the
            target's own token.
    """

    committed: int
    accepted: int
    verified: int
    confidences: tuple[float, ...] = ()
    room: int | None = None


@dataclass
class ReplayedRound:
    """
    A round under another schedule.

    Args:
        drafts (`int`): Tokens drafted for each row; 0 where drafting paused.
        verified, accepted, committed (`list[int]`): Of each live row.
    """

    drafts: int
    verified: list[int]
    accepted: list[int]
    committed: list[int]


class _Row:
    """Where a row is in its recorded rounds: `offset` tokens of round `index` are committed already."""

    def __init__(self, rounds: Sequence[RecordedRound]) -> None:
        self.rounds, self.index, self.offset = rounds, 0, 0
        self.left = sum(round_.committed for round_ in rounds)
        self.block = max((round_.verified for round_ in rounds), default=0)
        self.beyond = self._beyond()

    @property
    def room(self) -> float:
        """Tokens that the row can still take: without end, where no recorded round came near the length limit."""
        return self.left + self.beyond

    def run(self) -> int:
        """How many drafts from here are right."""
        total, offset = 0, self.offset
        for round_ in self.rounds[self.index :]:
            total, offset = total + round_.accepted - offset, 0
            if not self._is_all_right(round_):
                break
            total += 1  # the target's own token behind a whole block
        return total

    def confidences(self, drafts: int) -> list[float]:
        """Those of the next drafts. What no draft was recorded for gets the last one's; zero without any."""
        found: list[float] = []
        offset = self.offset
        for round_ in self.rounds[self.index :]:
            found, offset = [*found, *round_.confidences[offset:]], 0
            if len(found) >= drafts or not self._is_all_right(round_):
                break
            found.append(round_.confidences[-1] if round_.confidences else 0.0)
        last = found[-1] if found else 0.0
        return [*found, *[last] * drafts][:drafts]

    def advance(self, verified: int) -> tuple[int, int]:
        """Commits a round; returns how many drafts were accepted, and how many tokens committed."""
        accepted = min(verified, self.run(), self.left)
        committed = min(accepted + 1, self.left)
        self.left -= committed
        self.offset += committed
        while self.left and self.offset >= self.rounds[self.index].committed:
            self.offset -= self.rounds[self.index].committed
            self.index += 1
        return accepted, committed

    def _beyond(self) -> float:
        """How much longer than the text the row could have become."""
        behind = self.left
        for round_ in self.rounds:
            if round_.room is not None:
                return round_.room - behind
            behind -= round_.committed
        return math.inf

    def _is_all_right(self, round_: RecordedRound) -> bool:
        return round_.accepted == round_.verified == self.block and round_.committed > round_.accepted


def replay(rows: Sequence[Sequence[RecordedRound]], schedule: Schedule, max_drafts: int) -> Iterator[ReplayedRound]:
    """
    The rounds that a schedule would have taken for rows that are decoded together.

    Args:
        rows (`Sequence[Sequence[RecordedRound]]`): Recorded rounds of each row.
        schedule ([`Schedule`]): A fresh schedule.
        max_drafts (`int`): Most that a row can draft a round.
    """
    states = [_Row(rounds) for rounds in rows]
    has_confidences = any(round_.confidences for rounds in rows for round_ in rounds)
    while live := [i for i, state in enumerate(states) if state.left]:
        rooms = [states[i].room for i in live]
        drafts = int(min(schedule.num_drafts(len(live)), max_drafts, max(rooms) - 1))
        lengths = [0] * len(live)
        if drafts:
            confidences = torch.tensor([states[i].confidences(drafts) for i in live]) if has_confidences else None
            wanted = schedule.lengths(confidences, live).clamp(max=drafts).tolist()
            lengths = [int(min(length, room - 1)) for length, room in zip(wanted, rooms)]
        outcome = [states[i].advance(length) for i, length in zip(live, lengths)]
        accepted, committed = map(list, zip(*outcome))
        schedule.observe(live, lengths, accepted)
        yield ReplayedRound(drafts, lengths, accepted, committed)
