"""
What every block length and schedule would be worth on this machine, from one run with the whole block: its rounds are
replayed under each schedule, and each replayed round costs what its drafting, its step and the rest were measured to.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..generation.profile import ThroughputProfile
from ..generation.scheduling import Schedule, make_schedule
from ..generation.settings import SCHEDULES, DraftSettings, resolve_settings
from ..generation.throughput import ThroughputSchedule
from ..models.drafter import Drafter
from .confidence import THRESHOLDS
from .contenders import Contender, parse_schedule
from .costs import Costs
from .recorded import UnitRun, is_whole_block, recorded_units
from .replay import ReplayedRound, replay
from .summary import ALL


# A setting is recommended where it is predicted to be faster than plain decoding by at least this. Closer than that,
# the error of the prediction decides which is faster.
MARGIN = 0.05


def build_cost_model(
    records: list[dict[str, Any]],
    contenders: list[Contender],
    results: list[dict[str, Any]],
    target: PreTrainedModel,
    costs: dict[str, Costs],
) -> dict[str, Any] | None:
    """
    The field `cost_model` of `results.json`.

    Args:
        records (`list[dict[str, Any]]`): Of the log.
        contenders (`list[Contender]`): What was run.
        results (`list[dict[str, Any]]`): The field `results`.
        target (`PreTrainedModel`): The target.
        costs (`dict[str, Costs]`): By the name of the contender that ran the whole block.
    """
    measured = {(e["contender"], e["rows"]): e["speedup"] for e in results if e["task"] == ALL}
    model: dict[str, Any] = {"costs": [], "predictions": [], "recommended": []}
    for contender in whole_block_contenders(contenders):
        rivals = {_as_run(each): each.name for each in contenders if each.drafter is contender.drafter}
        for rows in sorted(rows for name, rows in measured if name == contender.name):
            units = recorded_units(records, contender.name, rows, contender.drafter.num_drafts)
            if not any(row for unit in units for turn in unit.turns for row in turn.rows):
                continue  # every answer ended with the prefill's token: there is nothing to go by
            level = _levelled(costs[contender.name], units, contender, target)
            # A machine is slower now than then, and behind long texts than short ones: each unit has its own level.
            levels = [_levelled(level, [unit], contender, target) for unit in units]
            head = {"drafter": contender.description["drafter"], "rows": rows}
            found = []
            for name, settings in candidates(contender.drafter, units).items():
                rival = rivals.get(settings)
                prediction = _predict(levels, units, contender.drafter, target, settings, rival)
                estimate = {"measured_speedup": measured.get((rival, rows))}
                found.append({**head, "schedule": name, **prediction, **estimate})
            best = max(found, key=lambda prediction: prediction["speedup"])
            is_plain = best["speedup"] < 1 + MARGIN
            advice = {"schedule": best["schedule"], "speedup": best["speedup"], "plain": is_plain}
            model["costs"].append({**head, **level.as_dict(rows), "prefill_per_token": _prefill_per_token(units)})
            model["predictions"] += found
            model["recommended"].append({**head, **advice})
    return model if model["predictions"] else None


def _as_run(contender: Contender) -> DraftSettings:
    """Its settings, with the schedule that was taken where none is named."""
    ran = contender.description
    drafts = ran["num_assistant_tokens"]
    return replace(contender.settings, schedule=ran["verification_schedule"], num_drafts=drafts, most_drafts=drafts)


def whole_block_contenders(contenders: Iterable[Contender]) -> list[Contender]:
    """Of each drafter, the contender that ran its whole block."""
    found: dict[int, Contender] = {}
    for contender in contenders:
        if is_whole_block(contender.description):
            found.setdefault(id(contender.drafter), contender)
    return list(found.values())


def candidates(drafter: Drafter, units: list[UnitRun]) -> dict[str, DraftSettings]:
    """Schedules that are predicted, by name: every block length, thresholds where there are confidences, and so on."""
    names = [f"fixed:{n}" for n in range(1, drafter.num_drafts + 1)]
    rounds = (round_ for unit in units for turn in unit.turns for row in turn.rows for round_ in row)
    if any(round_.confidences for round_ in rounds):
        names += [f"confidence:{threshold}" for threshold in THRESHOLDS[1:]]
        names += [name for name in SCHEDULES if name not in ("fixed", "confidence")]
    settings = {}
    for name in names:
        arguments = parse_schedule(name)
        arguments.setdefault("num_assistant_tokens", drafter.num_drafts)
        settings[name] = resolve_settings(drafter, arguments, None)
    return settings


def replay_unit(
    unit: UnitRun, drafter: Drafter, target: PreTrainedModel, settings: DraftSettings, profile: ThroughputProfile
) -> list[list[ReplayedRound]]:
    """The rounds that a schedule would have taken, by turn."""
    rounds = []
    for turn in unit.turns:
        if settings.schedule == "throughput":
            schedule: Schedule = ThroughputSchedule(settings, profile)
        else:
            schedule = make_schedule(settings, drafter, target)
        rounds.append(list(replay(turn.rows, schedule, schedule.settings.num_drafts)))
    return rounds


def _levelled(costs: Costs, units: list[UnitRun], contender: Contender, target: PreTrainedModel) -> Costs:
    """Costs at which the whole block took what it did on these units."""
    rounds = [
        round_
        for unit in units
        for turn in replay_unit(unit, contender.drafter, target, contender.settings, costs.profile)
        for round_ in turn
    ]
    prefill = sum(turn.prefill_seconds for unit in units for turn in unit.turns)
    drafting = sum(unit.draft_seconds for unit in units)
    other = sum(unit.seconds for unit in units) - drafting - prefill
    return costs.levelled(rounds, drafting, other) if rounds else costs


def _predict(
    levels: list[Costs],
    units: list[UnitRun],
    drafter: Drafter,
    target: PreTrainedModel,
    settings: DraftSettings,
    rival: str | None,
) -> dict[str, Any]:
    """What a setting would give, and how far off that is, by the median over units, if a contender ran it."""
    speedups, seconds, committed, rounds, verified = [], 0.0, 0, 0, 0
    for costs, unit in zip(levels, units):
        turns = replay_unit(unit, drafter, target, settings, costs.profile)
        spent = sum(costs.seconds(each) + turn.prefill_seconds for each, turn in zip(turns, unit.turns))
        speedups.append(unit.tokens / spent / (unit.plain_tokens / unit.plain_seconds))
        seconds += spent
        for each in (round_ for turn in turns for round_ in turn):
            rounds += len(each.committed)
            committed += sum(each.committed)
            verified += sum(each.verified)
    return {
        "accepted_length": committed / rounds,
        "verified_per_round": verified / rounds,
        "speedup": float(np.median(speedups)),
        "tokens_per_second": sum(unit.tokens for unit in units) / seconds,
        "error": None if rival is None else _error(speedups, [unit.speedups[rival] for unit in units]),
    }


def _prefill_per_token(units: list[UnitRun]) -> float:
    turns = [turn for unit in units for turn in unit.turns]
    return sum(turn.prefill_seconds for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def _error(predicted: list[float], measured: list[float]) -> float:
    return float(np.median(np.array(predicted) / np.array(measured))) - 1
