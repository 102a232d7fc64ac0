"""From the counters of single prompts to the entries of `results.json`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..generation.statistics import Speculation, accepted_histogram, count_rounds
from .bootstrap import estimate, ratio, ratios, resamples
from .confidence import confidence_entries
from .contenders import PLAIN
from .equality import DIFFERENT, EQUAL, TIE


ALL, MACRO = "all", "macro"
ESTIMATES = ("accepted_length", "tokens_per_forward", "speedup")


@dataclass
class Sample:
    """
    What one contender did on one unit (a prompt, or several decoded at once), all turns together: what the bootstrap
    draws.

    Args:
        key (`str`): Of the unit: its task, ids, and digests of what was said.
        new_tokens, target_forwards (`int`): Counts.
        seconds, plain_seconds (`float`): Wall-clock time, its own and plain decoding's.
        plain_tokens (`int`): New tokens of plain decoding.
        rounds (`list[list[int]]`): Of all rows: proposed, verified, accepted and committed tokens of each round, and
            a fifth number for copies, see [`~hf_dspark.generation.statistics.row_record`].
        confidences (`list[list[float]]`): Of all rows, those of each round; none without a confidence head.
        equality (`list[str]`): Per row and turn.
        parts (`dict[str, float]`): Seconds of draft and target.
        turns, prompts (`int`): Turns of all rows, and rows.
    """

    key: str
    new_tokens: int = 0
    target_forwards: int = 0
    seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    rounds: list[list[int]] = field(default_factory=list)
    confidences: list[list[float]] = field(default_factory=list)
    equality: list[str] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    turns: int = 0
    prompts: int = 0

    @property
    def speedup(self) -> float:
        """Tokens a second over plain decoding's: outputs may differ in length after a tie, or when sampling."""
        return (self.new_tokens / self.seconds) / (self.plain_tokens / self.plain_seconds)

    def sums(self) -> dict[str, tuple[float, float]]:
        """Numerator and denominator of each metric that is a ratio of sums."""
        drafted = [each for each in self.rounds if len(each) == 4]
        accepted, verified = (sum(each[what] for each in drafted) for what in (2, 1))
        return {
            "accepted_length": (sum(each[3] for each in self.rounds), len(self.rounds)),
            "tokens_per_forward": (self.new_tokens, self.target_forwards),
            "verification_efficiency": (accepted, verified),
        }


def collect(records: Iterable[dict[str, Any]]) -> dict[tuple[str, int, str], list[Sample]]:
    """Samples by contender, rows and task, from the records of a log."""
    samples: dict[tuple[str, int, str], list[Sample]] = {}
    for record in records:
        rows, task, ids = record["unit"]
        for name in record["turns"][0]["contenders"]:
            sample = Sample(repr((task, ids, record["digests"])), prompts=len(ids))
            for turn in record["turns"]:
                _add(sample, turn["contenders"][name], turn["contenders"][PLAIN])
            samples.setdefault((name, rows, task), []).append(sample)
    return samples


def _add(sample: Sample, run: dict[str, Any], plain: dict[str, Any]) -> None:
    sample.turns += len(run["rows"])
    sample.target_forwards += run["target_forwards"]
    sample.seconds += run["seconds"]
    sample.plain_seconds += plain["seconds"]
    sample.plain_tokens += sum(row["new_tokens"] for row in plain["rows"])
    for part in ("draft", "target", "total"):
        if f"{part}_seconds" in run:
            sample.parts[part] = sample.parts.get(part, 0.0) + run[f"{part}_seconds"]
    for row in run["rows"]:
        sample.new_tokens += row["new_tokens"]
        sample.rounds += row.get("rounds", [])
        sample.confidences += row.get("confidences", [])
        if "equality" in row:
            sample.equality.append(row["equality"])


def summarise(records: list[dict[str, Any]], contenders: dict[str, dict[str, Any]], seed: int) -> dict[str, Any]:
    """
    The fields `results` and `calibration` of `results.json`.

    Args:
        records (`list[dict[str, Any]]`): Of the log.
        contenders (`dict[str, dict[str, Any]]`): Their descriptions by name, in the order of the results.
        seed (`int`): Of the intervals.
    """
    samples, results = collect(records), []
    for name, description in contenders.items():
        is_drafter = description["kind"] == "drafter"
        for rows in sorted({rows for each, rows, _ in samples if each == name}):
            by_task = {task: group for (each, r, task), group in samples.items() if (each, r) == (name, rows)}
            pooled = [sample for group in by_task.values() for sample in group]
            head = {"contender": name, "rows": rows}
            results += [{**head, "task": task, **_entry(group, seed, is_drafter)} for task, group in by_task.items()]
            results.append({**head, "task": ALL, **_entry(pooled, seed, is_drafter)})
            results.append({**head, "task": MACRO, **_macro(by_task, seed, is_drafter)})
    return {"results": results, "calibration": confidence_entries(records, contenders)}


def metric(name: str, samples: list[Sample], draws: np.ndarray) -> tuple[float, np.ndarray]:
    """A metric of some samples: its value, and what it is in every draw (`nan` with one sample: it tells nothing)."""
    if name == "speedup":
        values = np.array([sample.speedup for sample in samples])
        value, drawn = float(np.median(values)), np.median(values[draws], axis=1)
    else:
        above, below = np.array([sample.sums()[name] for sample in samples], dtype=float).T
        value, drawn = ratio(above, below), ratios(above, below, draws)
    return value, drawn if len(samples) > 1 else np.full(len(draws), np.nan)


def _entry(samples: list[Sample], seed: int, is_drafter: bool) -> dict[str, Any]:
    draws = resamples(len(samples), seed)
    found = {name: estimate(*metric(name, samples, draws)) for name in (*ESTIMATES, "verification_efficiency")}
    seconds = sum(sample.seconds for sample in samples)
    new_tokens = sum(sample.new_tokens for sample in samples)
    stats = count_rounds([sample.rounds for sample in samples])
    entry = {
        "prompts": sum(sample.prompts for sample in samples),
        "turns": sum(sample.turns for sample in samples),
        "new_tokens": new_tokens,
        "rounds": stats.rounds if is_drafter else None,
        "target_forwards": sum(sample.target_forwards for sample in samples),
        "accepted_length": found["accepted_length"] if is_drafter else None,
        "tokens_per_forward": found["tokens_per_forward"],
        "speedup": found["speedup"],
        "tokens_per_second": new_tokens / seconds,
        "seconds": _seconds(samples, seconds),
        "drafts": None,
        "positions": [],
        "accepted_histogram": [],
        "equality": _equality(samples),
    }
    if is_drafter:
        entry |= {
            "drafts": {
                "proposed": sum(stats.proposed),
                "verified": sum(stats.verified),
                "accepted": sum(stats.accepted),
                "copied": stats.copied,
                "copied_accepted": stats.copied_accepted,
                "verification_efficiency": found["verification_efficiency"],
            },
            "positions": _positions(stats),
            "accepted_histogram": accepted_histogram(stats),
        }
    return entry


def _macro(by_task: dict[str, list[Sample]], seed: int, is_drafter: bool) -> dict[str, Any]:
    macro = {}
    for name in ESTIMATES:
        values, drawn = zip(
            *(metric(name, group, resamples(len(group), seed + i)) for i, group in enumerate(by_task.values()))
        )
        macro[name] = estimate(float(np.mean(values)), np.mean(drawn, axis=0))
    if not is_drafter:
        macro["accepted_length"] = None
    return macro


def _seconds(samples: list[Sample], total: float) -> dict[str, float]:
    parts = {part: sum(sample.parts.get(part, 0.0) for sample in samples) for part in ("draft", "target")}
    if not any(parts.values()):
        return {"total": total}
    return {"total": total, **parts, "other": total - sum(parts.values())}


def _positions(stats: Speculation) -> list[dict[str, Any]]:
    columns = zip(
        stats.proposed,
        stats.verified,
        stats.reached,
        stats.accepted,
        stats.marginal_acceptance,
        stats.conditional_acceptance,
    )
    names = ("proposed", "verified", "reached", "accepted", "marginal", "conditional")
    return [{"position": k, **dict(zip(names, values))} for k, values in enumerate(columns, start=1)]


def _equality(samples: list[Sample]) -> dict[str, int] | None:
    found = [outcome for sample in samples for outcome in sample.equality]
    if not found:
        return None
    return {
        "checked": len(found),
        "equal": found.count(EQUAL),
        "ties": found.count(TIE),
        "different": found.count(DIFFERENT),
    }
