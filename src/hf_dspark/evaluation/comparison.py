"""Two evaluations side by side: what differs, and whether it is noise."""

import os
from typing import Any

from .bootstrap import FEWEST_PROMPTS, estimate, resamples
from .contenders import PLAIN
from .log import read_log
from .results import read_results
from .summary import ALL, ESTIMATES, Sample, collect, metric


# Of the results' facts, those that change numbers.
FACTS = ("target", "settings", "versions", "hardware")


def compare_results(first: str | os.PathLike, second: str | os.PathLike, seed: int = 0) -> dict[str, Any]:
    """
    Compares two evaluations on the prompts that both have. A difference is noise if its 95 % interval, by resampling
    prompts of both at once, holds zero. From fewer than 20 prompts intervals are too narrow to call one real. Speeds
    of two processes differ by what the machine did meanwhile, too, which no interval over prompts holds.

    Args:
        first, second (`str` or `os.PathLike`): Folders that `evaluate_drafter` wrote.
        seed (`int`, *optional*, defaults to 0): Of the intervals.

    Returns:
        `dict`: `facts`, a list of `{"name", "first", "second"}` of what differs in target, settings, versions and
        hardware; `alone`, for `first` and `second` whether the run is `complete`, its `contenders` without a
        counterpart, and the number of `prompts` that the other has not, by task; and `rows`, a list of

        - `first`, `second` (`str`): the contenders, paired by name, or by schedule where names differ;
        - `rows` (`int`), `task` (`str`), `prompts` (`int`): on what;
        - `metrics` (`dict`): by metric `first` and `second` (numbers), `difference` (an estimate: second minus first)
          and `noise` (`bool`, or `None` where the interval does not hold zero but comes from fewer than 20 prompts, or
          from fewer than 20 groups of prompts that were decoded at once).

    Raises:
        OSError: If a folder holds no results.
        ValueError: If they have no prompt or no contender in common.

    Example:

    ```python
    >>> from hf_dspark.evaluation.comparison import compare_results

    >>> compare_results("runs/before", "runs/after")["rows"]  # doctest: +SKIP
    ```
    """
    results = read_results(first), read_results(second)
    samples = collect(read_log(first)), collect(read_log(second))
    rows = []
    for a, b in pair_contenders(results[0]["contenders"], results[1]["contenders"]):
        for number in sorted({r for name, r, _ in samples[0] if name == a} & {r for n, r, _ in samples[1] if n == b}):
            ours = {task: each for (name, r, task), each in samples[0].items() if (name, r) == (a, number)}
            theirs = {task: each for (name, r, task), each in samples[1].items() if (name, r) == (b, number)}
            pairs = {task: _shared(ours[task], theirs[task]) for task in ours if task in theirs}
            pairs = {task: pair for task, pair in pairs.items() if pair[0]}
            if len(pairs) > 1:
                pairs |= {ALL: tuple([s for pair in pairs.values() for s in pair[side]] for side in (0, 1))}
            for task, pair in pairs.items():
                metrics = {name: _difference(name, *pair, seed) for name in ESTIMATES if _has(name, *pair)}
                prompts = sum(sample.prompts for sample in pair[0])
                rows.append(
                    {"first": a, "second": b, "rows": number, "task": task, "prompts": prompts, "metrics": metrics}
                )
    if not rows:
        raise ValueError(f"{first} and {second} have no contender, or no prompt, in common.")
    pairs = pair_contenders(results[0]["contenders"], results[1]["contenders"])
    alone = {
        side: {
            "complete": results[i]["complete"],
            "contenders": sorted(set(results[i]["contenders"]) - {PLAIN} - {pair[i] for pair in pairs}),
            "prompts": _alone(samples[i], samples[1 - i]),
        }
        for i, side in enumerate(("first", "second"))
    }
    return {"facts": differing_facts(*results), "alone": alone, "rows": rows}


def pair_contenders(first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Names of contenders to compare: the same name, or else drafters in order with the same schedule."""
    pairs = [(name, name) for name in first if name in second and first[name]["kind"] != "plain"]
    left = [name for name in first if name not in second]
    right = [name for name in second if name not in first]
    for a in left:
        for b in right:
            if first[a]["kind"] == second[b]["kind"] and first[a].get("schedule") == second[b].get("schedule"):
                pairs.append((a, b))
                right.remove(b)
                break
    return pairs


def differing_facts(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """What differs in the circumstances of two results."""
    facts = []
    for group in FACTS:
        for name in first[group] | second[group]:
            a, b = first[group].get(name), second[group].get(name)
            if a != b:
                facts.append({"name": f"{group}.{name}", "first": a, "second": b})
    return facts


def _shared(first: list[Sample], second: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples of the units that both have, in one order."""
    others = {sample.key: sample for sample in second}
    shared = [sample for sample in first if sample.key in others]
    return shared, [others[sample.key] for sample in shared]


def _alone(
    mine: dict[tuple[str, int, str], list[Sample]], theirs: dict[tuple[str, int, str], list[Sample]]
) -> dict[str, int]:
    """By task, the prompts that only one run has (another text under the same id is another prompt)."""
    found: dict[str, int] = {}
    for (name, rows, task), samples in mine.items():
        keys = {sample.key for sample in theirs.get((name, rows, task), ())}
        count = sum(sample.prompts for sample in samples if sample.key not in keys)
        if name == PLAIN and count:
            found[task] = max(count, found.get(task, 0))
    return found


def _has(name: str, *sides: list[Sample]) -> bool:
    """Whether a metric exists there: only drafters have an accepted length."""
    return name != "accepted_length" or all(sample.rounds for samples in sides for sample in samples)


def _difference(name: str, first: list[Sample], second: list[Sample], seed: int) -> dict[str, Any]:
    draws = resamples(len(first), seed)
    (a, drawn_a), (b, drawn_b) = (metric(name, samples, draws) for samples in (first, second))
    difference = estimate(b - a, drawn_b - drawn_a)
    return {"first": a, "second": b, "difference": difference, "noise": _is_noise(difference, len(first))}


def _is_noise(difference: dict[str, Any], count: int) -> bool | None:
    if difference["low"] is None:
        return None
    holds_zero = difference["low"] <= 0 <= difference["high"]
    return None if count < FEWEST_PROMPTS and not holds_zero else holds_zero
