"""What a round costs on this machine, at the level of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..generation.profile import ThroughputProfile
from .replay import ReplayedRound


@dataclass(frozen=True)
class Costs:
    """
    Seconds of drafting and of all else in a round: the shape of a profile's curves, at the level of a run.

    Args:
        profile ([`ThroughputProfile`]): The curves.
        num_drafts (`int`): Most drafts a row.
        step_level, draft_level (`float`, *optional*, defaults to 1.0): What the curves are multiplied with.
    """

    profile: ThroughputProfile
    num_drafts: int
    step_level: float = 1.0
    draft_level: float = 1.0
    _curves: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def parts(self, round_: ReplayedRound) -> tuple[float, float]:
        """Seconds of a round: of drafting, and of the target's step with all the rest."""
        rows = len(round_.verified)
        if rows not in self._curves:
            self._curves[rows] = (
                self.profile.draft_costs(rows, self.num_drafts),
                self.profile.step_costs(rows, self.num_drafts),
            )
        draft, step = self._curves[rows]
        return self.draft_level * float(draft[round_.drafts]), self.step_level * float(step[sum(round_.verified)])

    def seconds(self, rounds: Iterable[ReplayedRound]) -> float:
        """Of a generation behind its prefill."""
        return sum(sum(self.parts(each)) for each in rounds)

    def levelled(self, rounds: Sequence[ReplayedRound], draft_seconds: float, other_seconds: float) -> "Costs":
        """
        The same curves, scaled so that these rounds take what they took in a run.

        Args:
            rounds (`Sequence[ReplayedRound]`): What was run.
            draft_seconds, other_seconds (`float`): What drafting took, and what all else but the prefills.
        """
        drafts, steps = (sum(parts) for parts in zip(*(self.parts(each) for each in rounds)))
        return replace(
            self,
            draft_level=self.draft_level * draft_seconds / drafts if drafts else self.draft_level,
            step_level=self.step_level * other_seconds / steps,
            _curves={},
        )

    def as_dict(self, rows: int) -> dict[str, Any]:
        """Its entry in `results.json`, with the curves at this number of rows."""
        drafts = self.profile.draft_costs(rows, self.num_drafts) * self.draft_level
        steps = self.profile.step_costs(rows, self.num_drafts) * self.step_level
        return {
            "steps": {str(rows + k): float(seconds) for k, seconds in enumerate(steps)},
            "drafts": {str(n): float(seconds) for n, seconds in enumerate(drafts) if n},
        }
