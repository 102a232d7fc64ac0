"""What a round costs on this machine, at the level of a run."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.profile import ThroughputProfile
from .replay import ReplayedRound


@dataclass(frozen=True)
class Costs:
    """
    Seconds of drafting and of all else in a round: the shape of a profile's curves, at the level of a run.

    Args:
        profile ([`ThroughputProfile`]): The curves.
        num_drafts (`int`): Most drafts a row.
        prefill (`float`): Seconds of a target forward over prompts, per token.
        step_level, draft_level (`float`, *optional*, defaults to 1.0): What the curves are multiplied with.
    """

    profile: ThroughputProfile
    num_drafts: int
    prefill: float
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

    def seconds(self, rounds: Iterable[ReplayedRound], prompt_tokens: int) -> float:
        """Of a generation: the prefill, then these rounds."""
        return self.prefill * prompt_tokens + sum(sum(self.parts(each)) for each in rounds)

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
            "prefill_per_token": self.prefill,
        }


@torch.no_grad()
def measure_prefill(target: PreTrainedModel, tokens: int, repeats: int = 5) -> float:
    """Seconds of a target forward over a prompt of so many tokens, per token; the median of some."""
    vocabulary = target.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(target.device)
    taken = []
    for _ in range(repeats):
        start = _now(target.device)
        target(ids, logits_to_keep=1)
        taken.append(_now(target.device) - start)
    return statistics.median(taken) / tokens


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
