"""
The throughput schedule: drafts and verifies as far as it pays on this machine at this load (DSpark paper, the
hardware-aware prefix scheduler).

It keeps to three rules that make it lossless, whatever it decides. Survival never rises along a row; candidates are
admitted in the order of (survival, position, row); and what the n-th candidate in that order must reach to be admitted
is fixed before the round's drafts are drawn, from rounds at least two ago. So whether a draft is verified depends on
nothing that was drawn at its position or behind it. Nothing reads a clock: costs come from the stored profile, so a
seed gives the same tokens again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .confidence import calibrated
from .profile import ThroughputProfile
from .scheduling import Schedule
from .settings import DraftSettings


# Per round, what older experience keeps of its weight.
MEMORY = 0.8
# Rounds of confidences that the search looks back on; MEMORY leaves the one before them a weight of a sixth.
WINDOW = 8
# Numbers of drafts that the search compares.
MOST_NUMBERS = 7
# A plan that pays is kept for so many rounds: search is dear where steps are short.
KEEP = 4
# Confidences are at least this many rounds old when they decide.
DELAY = 2
# So many drafts count for a row's predictions as they are, against how they came out.
TRUST = 4
# What a draft is hoped to be accepted with before anything is known.
HOPE = 0.8
# Drafting is planned only where it promises more than plain decoding by this factor.
MARGIN = 1.02
# A first draft that may be so much faster is followed by others before its outcome may be used.
SURE_GAIN = 1.5
# Pauses are at least this long, double each time up to the longest, and cost less than this share of plain decoding.
FIRST_PAUSE, LONGEST_PAUSE, PROBE_SHARE = 8, 512, 0.01
# Drafting stops once it has lost as many plain steps against plain decoding; gains of at most so many count against.
MOST_LOST, MOST_BANKED = 1.5, 8.0
# Rounds of drafting after which the next pause is a first one again.
SETTLED = 16


@dataclass(frozen=True)
class Costs:
    """
    Seconds at one number of rows.

    Args:
        rows (`int`): Live rows.
        steps (`np.ndarray` of shape `(rows * drafts + 1,)`): Of a step, by the drafts verified in all rows; never
            falling.
        drafts (`np.ndarray` of shape `(drafts + 1,)`): Of drafting, by the drafts a row.
    """

    rows: int
    steps: np.ndarray
    drafts: np.ndarray

    @property
    def plain_rate(self) -> float:
        """Tokens a second without drafts."""
        return self.rows / self.steps[0]


@dataclass(frozen=True)
class Plan:
    """
    What is settled before a round's drafts are drawn.

    Args:
        num_drafts (`int`): Drafts a row.
        rate (`float`): Tokens a second that are expected.
        floors (`np.ndarray`, *optional*): The least survival with which the n-th candidate is admitted; without them
            admission stops early, at the first candidate that doesn't raise the throughput.
        rows (`int`): Live rows that it is made for.
        until (`int`): The round before which it is not made anew.
    """

    num_drafts: int
    rate: float = 0.0
    floors: np.ndarray | None = None
    rows: int = 0
    until: int = 0


def search(survival: np.ndarray, weights: np.ndarray, costs: Costs) -> list[Plan]:
    """
    The global search: for each number of drafts a row, what past rounds' survivals promise, and the price of time that
    follows from it.

    Args:
        survival (`np.ndarray` of shape `(rounds, rows, drafts)`): Predicted survival of each draft in past rounds.
        weights (`np.ndarray` of shape `(rounds,)`): How much each round counts.
        costs ([`Costs`]): What steps and drafting cost.

    Returns:
        `list[Plan]`: one for each number, without floors; of a long block not every number is looked at.
    """
    drafts = survival.shape[2]
    weights = weights / weights.sum()
    numbers = np.unique(np.geomspace(1, drafts, min(drafts, MOST_NUMBERS)).round().astype(int))
    # For each number of drafts: later ones are worth nothing, so they come last.
    within = np.where(np.arange(drafts) < numbers[:, None, None, None], survival, 0.0)
    ranked = -np.sort(-within.reshape(len(numbers), len(survival), -1), axis=2)
    gained = np.concatenate([np.zeros((*ranked.shape[:2], 1)), ranked.cumsum(2)], axis=2)
    # An endless step is never the best, but must not turn sums into nan.
    steps = np.where(np.isfinite(costs.steps), costs.steps, np.finfo(float).max / 1e9)
    price = np.full(len(numbers), costs.plain_rate)
    for _ in range(2):  # Dinkelbach's method for the best ratio; two turns are close enough
        best = (gained - price[:, None, None] * steps).argmax(2)
        tokens = costs.rows + (np.take_along_axis(gained, best[..., None], 2)[..., 0] * weights).sum(1)
        price = tokens / ((steps[best] * weights).sum(1) + costs.drafts[numbers])
    return [Plan(int(n), float(rate), rows=costs.rows) for n, rate in zip(numbers, price)]


def floors(survival: np.ndarray, weights: np.ndarray, costs: Costs, plan: Plan) -> np.ndarray:
    """
    What the n-th candidate must reach: less, and no continuation of the block pays, if the candidates behind it fall
    off as they did in past rounds. Looking at every continuation rather than at the next step alone crosses the steps
    of a jagged cost curve. A candidate that is as good as expected is admitted exactly if the best total lies behind
    it.

    Args:
        survival, weights, costs: As for `search`.
        plan ([`Plan`]): Number of drafts and expected rate, which is the price of a second in tokens.

    Returns:
        `np.ndarray` of shape `(rows * plan.num_drafts,)`: at least 0, `inf` where nothing pays.
    """
    ranked = -np.sort(-survival[:, :, : plan.num_drafts].reshape(len(survival), -1), axis=1)
    expected = (ranked * (weights / weights.sum())[:, None]).sum(0)
    gained = np.concatenate([[0.0], expected.cumsum()])
    steps = costs.steps[: len(gained)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = plan.rate * (steps[None] - steps[:, None]) / (gained[None] - gained[:, None])
        ratios = np.where(np.isnan(ratios) | np.tri(len(steps), dtype=bool), np.inf, ratios)
        # Where nothing was expected there is no falling off to go by; the candidate must pay for itself.
        reached = np.where(expected > 0, expected * ratios.min(1)[:-1], plan.rate * np.diff(steps))
    return np.where(np.isnan(reached), np.inf, reached)


def rank(survival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Candidates in the order of admission.

    Args:
        survival (`np.ndarray` of shape `(rows, drafts)`): Survivals, which never rise along a row.

    Returns:
        Their survivals and their rows, each of shape `(rows * drafts,)`: larger survivals first, then smaller
        positions, then smaller rows.
    """
    # Position by position, and row by row within one: a stable sort keeps that order among equals.
    values = survival.T.reshape(-1)
    order = np.argsort(-values, kind="stable")
    return values[order], order % len(survival)


def stop_early(ranked: np.ndarray, costs: Costs, num_drafts: int) -> int:
    """How many of the ranked candidates are admitted until the first that does not raise the throughput."""
    tokens = costs.rows + np.concatenate([[0.0], ranked.cumsum()])
    rates = tokens / (costs.drafts[num_drafts] + costs.steps[: len(tokens)])
    return int((np.diff(rates) > 0).cumprod().sum())


class ThroughputSchedule(Schedule):
    """
    Drafts and verifies as far as it pays, and pauses drafting where it does not.

    Args:
        settings ([`DraftSettings`]): The call's settings.
        profile ([`ThroughputProfile`]): What steps and drafting cost here.
    """

    name = "throughput"

    def __init__(self, settings: DraftSettings, profile: ThroughputProfile) -> None:
        super().__init__(replace(settings, num_drafts=settings.most_drafts or settings.num_drafts))
        self.profile = profile
        self.round = -1
        self.plan = Plan(0)
        self.pause, self.next_pause = 0, FIRST_PAUSE
        self.is_probing = False
        # Seconds lost against plain decoding since drafting was last resumed, and rounds of drafting since then.
        self.lost, self.streak = 0.0, 0
        # (round, rows, survival (rows, drafts)): those that are too new to decide, and those that may.
        self.waiting: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.past: deque[tuple[int, np.ndarray, np.ndarray]] = deque(maxlen=WINDOW)
        # By row, how many drafts were accepted and how many predicted to be, both fading.
        self.outcomes = np.zeros((0, 2))
        self.live: list[int] = []
        self.predicted: np.ndarray | None = None
        self._costs: dict[int, Costs] = {}
        self._copy_steps: dict[int, np.ndarray] = {}
        # Live rows of the round, those that copy included.
        self.rows = 0

    # ------------------------------------------------------------------ before the draft

    def num_drafts(self, rows: int) -> int:
        self.rows = rows
        self.round += 1
        while self.waiting and self.waiting[0][0] <= self.round - DELAY:
            self.past.append(self.waiting.popleft())
        self.plan = self._next_plan(self.costs(rows))
        self.streak = self.streak + 1 if self.plan.num_drafts else 0
        return self.plan.num_drafts

    def num_copied(self, rows: int, copying: int, acceptance: float) -> int:
        numbers = np.arange(self.settings.num_copied + 1)
        if rows not in self._copy_steps:
            self._copy_steps[rows] = self.profile.step_costs(rows, len(numbers) - 1)
        steps = self._copy_steps[rows]
        tokens = copying * (acceptance**numbers).cumsum()
        # The copying rows' share of a plain step, and what the copies add to it.
        seconds = steps[0] * copying / rows + steps[copying * numbers] - steps[0]
        # In that time, plain decoding and drafting as it was last planned would give tokens too.
        worth = tokens - max(rows / steps[0], self.plan.rate) * seconds
        return int(worth.argmax()) if worth.max() > 0 else 0

    def costs(self, rows: int) -> Costs:
        """Costs at `rows` live rows."""
        if rows not in self._costs:
            drafts = self.settings.num_drafts
            self._costs[rows] = Costs(
                rows, self.profile.step_costs(rows, drafts), self.profile.draft_costs(rows, drafts)
            )
        return self._costs[rows]

    def _next_plan(self, costs: Costs) -> Plan:
        if self.pause:
            self.pause -= 1
            return Plan(0)
        if not can_pay(costs):
            # Rows leave, and then it may.
            return Plan(0)
        if not self.past:
            return self._first_plan(costs)
        if self.plan.floors is not None and self.plan.rows == costs.rows and self.round < self.plan.until:
            return self.plan
        survival, weights = self._memory(costs.rows)
        best = max(search(survival, weights, costs), key=lambda plan: plan.rate)
        pays = best.rate > MARGIN * costs.plain_rate and self.lost <= MOST_LOST * costs.steps[0]
        if not pays and not self.is_probing:
            return self._begin_pause(costs, best.num_drafts)
        if not pays:
            # What the probe shows can be used only `DELAY` rounds later.
            self.pause = DELAY - 1
        self.is_probing = False
        if self.streak > SETTLED:
            self.next_pause = FIRST_PAUSE
        until = self.round + (KEEP if pays else 1)
        return replace(best, floors=floors(survival, weights, costs, best), until=until)

    def _first_plan(self, costs: Costs) -> Plan:
        """Nothing is known: a few rounds to find out, if they may pay."""
        hopes = HOPE ** np.arange(1, self.settings.num_drafts + 1)
        best = max(search(np.tile(hopes, (1, costs.rows, 1)), np.ones(1), costs), key=lambda plan: plan.rate)
        if best.rate > costs.plain_rate:
            # Unless much is to be gained, the rounds until these confidences may be used are plain ones.
            self.pause = DELAY - 1 if best.rate < SURE_GAIN * costs.plain_rate else 0
            return Plan(best.num_drafts)
        if not self.is_probing:
            return self._begin_pause(costs, best.num_drafts)
        self.is_probing, self.pause = False, DELAY - 1
        return Plan(best.num_drafts)

    def _begin_pause(self, costs: Costs, num_drafts: int) -> Plan:
        """Pauses drafting; the pause ends in a round that drafts to see whether it would pay by now."""
        dear = costs.drafts[num_drafts] / (PROBE_SHARE * costs.steps[0])
        self.pause = max(self.next_pause, min(int(dear), LONGEST_PAUSE)) - 1
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
        self.is_probing, self.lost = True, 0.0
        return Plan(0)

    def _memory(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Survivals `(rounds, rows, drafts)` of past rounds and their weights `(rounds,)`, of `num_rows` rows."""
        rounds = []
        for _, rows, survival in self.past:
            live = np.isin(rows, self.live).nonzero()[0]
            # Rows that are decoded one after another learn from those before them.
            live = live if len(live) else np.arange(len(rows))
            # Some of those live in the last round may have finished in it; which, the count alone doesn't tell.
            rounds.append(survival[live[np.arange(num_rows) * len(live) // num_rows]])
        ages = np.array([self.round - number for number, _, _ in self.past])
        return np.stack(rounds), MEMORY ** (ages - ages.min())

    # ------------------------------------------------------------------ after the draft

    def lengths(self, confidences: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        survival = self._survival(confidences, rows)
        self.predicted = survival
        ranked, owners = rank(survival)
        if self.plan.floors is None:
            admitted = stop_early(ranked, self.costs(self.rows), self.plan.num_drafts)
        else:
            admitted = int(((ranked >= self.plan.floors[: len(ranked)]) & (ranked > 0)).cumprod().sum())
        self.waiting.append((self.round, np.array(rows), self._continued(survival)))
        return torch.from_numpy(np.bincount(owners[:admitted], minlength=len(rows)))

    def _survival(self, confidences: torch.Tensor, rows: Sequence[int]) -> np.ndarray:
        """Survivals `(rows, drafts)`, each row's corrected by how its earlier predictions came out."""
        survival = calibrated(confidences, self.settings.temperatures).double().numpy().cumprod(1)
        survival = survival * self._corrections(rows)[:, None]
        return np.minimum.accumulate(np.nan_to_num(survival.clip(0.0, 1.0)), axis=1)

    def _corrections(self, rows: Sequence[int]) -> np.ndarray:
        """Of each row, what its predictions are multiplied with."""
        if len(self.outcomes) <= max(rows):
            self.outcomes = np.concatenate([self.outcomes, np.zeros((max(rows) + 1 - len(self.outcomes), 2))])
        accepted, predicted = self.outcomes[list(rows)].T
        return ((accepted + TRUST) / (predicted + TRUST)).clip(0.2, 2.0)

    def _continued(self, survival: np.ndarray) -> np.ndarray:
        """Survivals of the whole block: positions that were not drafted fall off as the last drafted one did."""
        missing = self.settings.num_drafts - survival.shape[1]
        if not missing:
            return survival
        last = survival[:, -1:]
        before = survival[:, -2:-1] if survival.shape[1] > 1 else np.ones_like(last)
        ratio = np.divide(last, before, out=np.zeros_like(last), where=before > 0)
        return np.concatenate([survival, last * ratio ** np.arange(1, missing + 1)], axis=1)

    # ------------------------------------------------------------------ after verification

    def observe(self, rows: Sequence[int], verified: Sequence[int], accepted: Sequence[int]) -> None:
        self.live = list(rows)
        if not self.plan.num_drafts or self.predicted is None:
            return
        was_verified = np.arange(self.predicted.shape[1]) < np.asarray(verified)[:, None]
        predicted = (self.predicted * was_verified).sum(1) / self._corrections(rows)
        self.outcomes[list(rows)] = MEMORY * self.outcomes[list(rows)] + np.stack([accepted, predicted], axis=1)
        costs = self.costs(self.rows)
        spent = costs.drafts[self.plan.num_drafts] + costs.steps[min(sum(verified), len(costs.steps) - 1)]
        # What plain decoding would have needed for these tokens.
        saved = costs.steps[0] * (1 + sum(accepted) / self.rows)
        self.lost = max(self.lost + spent - saved, -MOST_BANKED * costs.steps[0])
        self.predicted = None


def can_pay(costs: Costs) -> bool:
    """Whether drafting would be faster than plain decoding if every draft were accepted."""
    numbers = np.arange(1, len(costs.drafts))
    verified = costs.rows * numbers
    return bool(((costs.rows + verified) / (costs.drafts[1:] + costs.steps[verified]) > costs.plain_rate).any())
