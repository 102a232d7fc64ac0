"""Many requests in one batch, simulated, with the library's own throughput schedule deciding what is checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_dspark.generation.profile import ThroughputProfile
from hf_dspark.generation.settings import DraftSettings
from hf_dspark.generation.throughput import ThroughputSchedule


ROUNDS = 48
SPREAD = 0.12  # how much requests differ in how well they are guessed, and the drafts of one request


@dataclass(frozen=True)
class Load:
    """
    What is simulated. Times are in units of a step over few tokens.

    Args:
        rows (`int`): Requests in the batch.
        drafts (`int`): Drafts a request, at most.
        acceptance (`float`): How likely a draft is accepted, if those before it were.
        free_tokens (`int`): Tokens that a step of the target computes in the time of one; from there on its time grows
            in proportion.
        draft_cost (`float`): Time in which the drafter drafts for all requests.
    """

    rows: int
    drafts: int
    acceptance: float
    free_tokens: int
    draft_cost: float

    def step_cost(self, tokens: int) -> float:
        return max(1.0, tokens / self.free_tokens)

    @property
    def profile(self) -> ThroughputProfile:
        """What the schedule is told of this machine."""
        tokens = {*range(self.rows, self.rows * (self.drafts + 1) + 1)}
        steps = {number: self.step_cost(number) for number in tokens}
        # The schedule takes only times above zero.
        drafting = dict.fromkeys(range(1, self.drafts + 1), max(self.draft_cost, 1e-9))
        return ThroughputProfile({self.rows: steps}, {self.rows: drafting})


@dataclass(frozen=True)
class Outcome:
    """
    What came of it.

    Args:
        scheduled, all_checked, plain (`float`): Tokens in the time of a step over few tokens: with the schedule, with
            every draft checked, without drafts.
        lengths (`list[int]`): Drafts checked of each request, in the last round that drafted.
        mean_length (`float`): Drafts checked a request, over all rounds.
        paused (`int`): Rounds without drafting, of `ROUNDS`.
    """

    scheduled: float
    all_checked: float
    plain: float
    lengths: list[int]
    mean_length: float
    paused: int


def simulate(load: Load, seed: int = 0) -> Outcome:
    """Play `ROUNDS` rounds. Confidences are right on average; what is accepted is drawn with them."""
    chance = np.random.default_rng(seed)
    schedule = ThroughputSchedule(DraftSettings(load.drafts, "throughput"), load.profile)
    skill = chance.normal(load.acceptance, SPREAD, load.rows)
    rows = list(range(load.rows))
    times, tokens, verified, paused, lengths = np.zeros(2), np.zeros(2), 0, 0, [0] * load.rows
    for _ in range(ROUNDS):
        confidences = chance.normal(skill[:, None], SPREAD, (load.rows, load.drafts)).clip(0.01, 0.99)
        # How many of each request's drafts are right, up to the first that is not.
        right = (chance.random(confidences.shape) < confidences).cumprod(1).sum(1)
        tokens[1] += load.rows + right.sum()
        times[1] += load.draft_cost + load.step_cost(load.rows * (load.drafts + 1))

        number = schedule.num_drafts(load.rows)
        chosen = np.zeros(load.rows, dtype=int)
        if number:
            chosen = schedule.lengths(torch.from_numpy(confidences[:, :number]), rows).numpy()
            times[0] += load.draft_cost
            lengths = chosen.tolist()
        accepted = np.minimum(chosen, right)
        schedule.observe(rows, chosen.tolist(), accepted.tolist())
        tokens[0] += load.rows + accepted.sum()
        times[0] += load.step_cost(load.rows + chosen.sum())
        verified += chosen.sum()
        paused += not number
    scheduled, all_checked = tokens / times
    plain = load.rows / load.step_cost(load.rows)
    return Outcome(scheduled, all_checked, plain, lengths, verified / (ROUNDS * load.rows), paused)
