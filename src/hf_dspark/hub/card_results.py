"""What an evaluation's `results.json` says of one drafter: metadata for the Hub, and tables."""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..evaluation.report import few_prompts_text, reported
from ..evaluation.results import RESULTS_FILE, read_results
from ..models.configuration_drafter import NAMES
from ..models.drafter import Drafter
from .card_facts import table
from .escaping import markdown, one_line
from .names import hub_id, short_name


METRICS = {
    "accepted_length": "Accepted length",
    "tokens_per_forward": "Tokens per target forward",
    "speedup": "Speed over plain decoding",
}
TASK_NAME = "Speculative decoding"
MINE = "this_drafter"  # marks contenders in the results.json beside a drafter, where paths are cut
_HUB_FILE = "hf://datasets/"


def read_own_results(
    source: str | os.PathLike,
    drafter: Drafter,
    names: Iterable[str | None],
    base_model: str | None = None,
) -> dict[str, Any]:
    """
    An evaluation's results, with the contenders marked that are this drafter, under whatever schedule.

    Args:
        source (`str`): What `hf-dspark evaluate` wrote: a folder, or its `results.json`.
        drafter (`Drafter`): The drafter.
        names (`Iterable[str]`): What it is known as: folders and Hub ids.
        base_model (`str`, *optional*): Its target; the one that the checkpoint names by default.

    Raises:
        OSError: If there are none.
        ValueError: If they are damaged, of other drafters or another target.
    """
    results = read_results(source)
    check_results(results)
    names = [name for name in {*names, drafter.config.name_or_path} if name]
    drafters = {name: entry for name, entry in results["contenders"].items() if entry.get("kind") == "drafter"}
    place = Path(source) if Path(source).is_dir() else Path(source).parent
    is_own = any(place.resolve() == Path(name).resolve() for name in names)  # so that earlier marks are right
    mine = {name for name, entry in drafters.items() if is_own and entry.get(MINE)}
    if not mine:
        models = {entry.get("model") for entry in drafters.values()}
        own = _own_models(models, names)
        mine = {name for name, entry in drafters.items() if entry.get("model") in own}
    shown = " or ".join(sorted(map(one_line, names))) or "this drafter"
    if not mine:
        evaluated = ", ".join(sorted({one_line(entry.get("model")) for entry in drafters.values()})) or "none"
        raise ValueError(f"The results are of other drafters than {shown} (evaluated: {evaluated}).")
    kinds = {drafters[name].get("drafter_type") for name in mine}
    kind = drafter.config.model_type
    if kinds != {kind}:
        named = ", ".join(NAMES.get(other, one_line(other)) for other in kinds)
        raise ValueError(f"The results are of a {named} drafter, {shown} holds a {NAMES[kind]} drafter.")
    target, expected = results["target"].get("name"), base_model or drafter.config.target_name_or_path
    if not _fits(target, expected):
        raise ValueError(
            f"The results were made with the target {one_line(target)}, and {shown} drafts for {one_line(expected)}. "
            f"Evaluate it with {one_line(expected)}."
        )
    for name, entry in results["contenders"].items():
        entry.pop(MINE, None)
        if name in mine:
            entry[MINE] = True
    return results


def contenders_of(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The contenders that [`read_own_results`] has marked."""
    return {name: entry for name, entry in results["contenders"].items() if entry.get(MINE)}


def _own_models(models: set[Any], names: list[str]) -> set[Any]:
    found = {model for model in models if any(_is_same(model, name) for name in names)}
    if found or len(models) != 1:
        return found
    # One drafter that had no name, or whose folder was moved since.
    (model,) = models
    is_elsewhere = isinstance(model, str) and (hub_id(model) or Path(model).is_dir())
    was_moved = short_name(model) in {short_name(name) for name in names}
    return models if model is None or (was_moved and not is_elsewhere) else set()


def _is_same(model: Any, name: str) -> bool:
    if not isinstance(model, str):
        return False
    if model == name or (hub_id(model) and hub_id(model) == hub_id(name)):
        return True
    place = Path(name).resolve()
    # A relative path may have been written in another working directory.
    return Path(model).resolve() == place or place.as_posix().endswith(f"/{Path(model).as_posix()}")


def _fits(target: Any, expected: Any) -> bool:
    if not isinstance(target, str) or not isinstance(expected, str):
        return True
    if hub_id(target) and hub_id(expected):
        return hub_id(target) == hub_id(expected)
    return short_name(target) == short_name(expected)


def check_results(results: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: If a field that the card reads is not as `hf-dspark evaluate` writes it.
    """

    def check(value: Any, kind: Any, name: str) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{RESULTS_FILE} is damaged: `{name}` is {one_line(repr(value), 40)}. Evaluate again.")

    def check_all(entries: Any, name: str, fields: dict[str, Any]) -> None:
        check(entries, list, name)
        for i, entry in enumerate(entries):
            check(entry, dict, f"{name}[{i}]")
            for field, kind in fields.items():
                check(entry.get(field), kind, f"{name}[{i}].{field}")

    estimate, maybe_list = dict | int | float | None, list | None
    for name in ("target", "settings", "versions", "hardware", "contenders"):
        check(results[name], dict, name)
    for name, contender in results["contenders"].items():
        check(contender, dict, f"contenders.{name}")
    check_all(results["tasks"], "tasks", {"name": str, "source": str, "skipped": maybe_list})
    fields = dict.fromkeys(METRICS, estimate) | {"positions": maybe_list, "equality": dict | None}
    check_all(results["results"], "results", {"contender": str, "task": str, "rows": int, **fields})
    check_all(results["calibration"], "calibration", {"positions": maybe_list})
    for part, values in (("results", ("marginal", "conditional")), ("calibration", ("predicted", "observed"))):
        for i, entry in enumerate(results[part]):
            for metric in METRICS:
                if isinstance(entry.get(metric), dict):
                    check(entry[metric].get("value"), int | float | None, f"{part}[{i}].{metric}.value")
            check_all(
                entry.get("positions") or [],
                f"{part}[{i}].positions",
                {"position": int, **dict.fromkeys(values, estimate)},
            )


def is_ours(result: EvalResult) -> bool:
    """Whether an entry of a card's metadata was made here."""
    return result.task_name == TASK_NAME and result.metric_type in METRICS


def eval_results(
    results: dict[str, Any], contenders: dict[str, dict[str, Any]], repo_id: str | None
) -> list[EvalResult]:
    """
    The measured numbers as the Hub's metadata has them, one for each task, schedule, number of rows and metric: of
    what `generate` does without arguments, where that was run, else of every schedule.
    """
    own = {name: contender for name, contender in contenders.items() if contender.get("schedule") == "own"}
    contenders = own or contenders
    tasks = {task["name"]: task for task in results["tasks"]}
    found = []
    for entry in entries(results, contenders):
        if entry["task"] not in tasks:
            continue  # sums over tasks are of no dataset
        contender = contenders[entry["contender"]]
        for metric, title in METRICS.items():
            value = _value(entry.get(metric))
            if value is not None:
                found.append(
                    EvalResult(
                        task_type="text-generation",
                        task_name=TASK_NAME,
                        dataset_type=one_line(dataset_of(tasks[entry["task"]])),
                        dataset_name=one_line(entry["task"]),
                        metric_type=metric,
                        metric_value=round(value, 4),
                        metric_name=f"{title} ({_setting(contender)}, {_rows(entry['rows'])})",
                        source_name=f"results.json of {repo_id}" if repo_id else None,
                        source_url=f"https://huggingface.co/{repo_id}/blob/main/results.json" if repo_id else None,
                    )
                )
    return found


def dataset_of(task: dict[str, Any]) -> str:
    """The Hub dataset that a task's prompts came from, else the task's own name."""
    source = task["source"].removeprefix(_HUB_FILE)
    if source != task["source"]:
        source = "/".join(source.split("/")[:2])
    return hub_id(source) or task["name"]


def entries(results: dict[str, Any], contenders: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of these contenders."""
    return [entry for entry in reported(results) if entry["contender"] in contenders]


def _value(estimate: Any) -> float | None:
    value = estimate.get("value") if isinstance(estimate, dict) else estimate
    return value if value is not None and math.isfinite(value) else None


def _estimate(estimate: Any) -> str:
    value = _value(estimate)
    if value is None:
        return "–"
    low, high = (estimate.get("low"), estimate.get("high")) if isinstance(estimate, dict) else (None, None)
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"


def _setting(contender: dict[str, Any]) -> str:
    schedule = one_line(contender.get("schedule") or "own", 40)
    drafts = contender.get("num_assistant_tokens") or contender.get("num_drafts")
    threshold, resolved = contender.get("assistant_confidence_threshold"), contender.get("verification_schedule")
    meant = f" ({one_line(resolved, 40)})" if schedule == "own" and resolved else ""
    follows = "confidence" in (schedule, resolved) and isinstance(threshold, int | float)
    copied = contender.get("prompt_lookup_num_tokens")
    copies = f", up to {one_line(copied, 10)} tokens copied" if copied else ""
    return f"{schedule} schedule{meant}{f' at {threshold:g}' if follows else ''}, {drafts} drafts{copies}"


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


def summary(results: dict[str, Any]) -> str:
    """How the numbers below were made."""
    settings, target = results["settings"], results["target"]
    hardware, versions = results["hardware"], results["versions"]
    sampling = settings.get("temperature")
    thinking = {True: "on", False: "off"}.get(settings.get("enable_thinking"), "as the chat template has it")
    named = ", ".join(f"{markdown(name)} {markdown(version)}" for name, version in versions.items())
    threads = f", {markdown(hardware['threads'])} threads" if hardware.get("threads") else ""
    sentences = [
        f"Target: {markdown(hub_id(target.get('name')) or Path(str(target.get('name'))).name)} in "
        f"{markdown(target.get('dtype'))}. "
        f"Decoding: {f'sampled at temperature {sampling}' if sampling else 'greedy'}, at most "
        f"{markdown(settings.get('max_new_tokens'))} new tokens, thinking mode {thinking}.",
        f"Machine: {markdown(hardware.get('device_name') or hardware.get('device'))}{threads}. Versions: {named}. "
        f"Begun {markdown(results['created'])}.",
        "Accepted length is committed tokens a round, the target's own included. In brackets: 95 % intervals over "
        "prompts.",
    ]
    if few := few_prompts_text(results):
        sentences.append(f"**{markdown(few, limit=1000)}**")
    if not results["complete"]:
        sentences.insert(0, "**The evaluation was not finished: these numbers are of a part of it.**")
    skipped = sum(len(task.get("skipped") or []) for task in results["tasks"])
    if skipped:
        sentences.append(f"{skipped} unusable prompts were left out.")
    return "\n\n".join(sentences)


def parts(results: dict[str, Any], contenders: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Tables by schedule and number of rows, then acceptance by position and calibration."""
    found = []
    for name, contender in contenders.items():
        mine = entries(results, [name])
        for rows in sorted({entry["rows"] for entry in mine}):
            part = [entry for entry in mine if entry["rows"] == rows]
            found.append(
                {"title": f"With {markdown(_setting(contender))}, {_rows(rows)}:", "table": _tasks_table(part)}
            )
        everything = [entry for entry in results["results"] if (entry["contender"], entry["task"]) == (name, "all")]
        whole = [entry for entry in everything if entry.get("positions")]
        if whole:
            positions = min(whole, key=lambda entry: entry["rows"])["positions"]
            title = f"Acceptance by position ({markdown(_setting(contender))}):"
            found.append({"title": title, "table": _positions_table(positions)})
    for entry in results["calibration"]:
        if entry.get("contender") in contenders and entry.get("positions"):
            title = f"Calibration of the confidences ({markdown(_setting(contenders[entry['contender']]))}):"
            found.append({"title": title, "table": _calibration_table(entry)})
    return found


def _tasks_table(part: list[dict[str, Any]]) -> str:
    rows = (
        [
            markdown(entry["task"]),
            markdown(entry.get("prompts", "–")),
            *(_estimate(entry.get(metric)) for metric in METRICS),
            _equality(entry.get("equality")),
        ]
        for entry in part
    )
    return table(("Task", "Prompts", *METRICS.values(), "Same text as plain decoding"), rows)


def _equality(equality: dict[str, int] | None) -> str:
    if not equality:
        return "–"
    counts = {name: markdown(equality.get(name, 0)) for name in ("checked", "equal", "ties", "different")}
    ties = f", {counts['ties']} near-ties" if equality.get("ties") else ""
    different = f", **{counts['different']} different**" if equality.get("different") else ""
    return f"{counts['equal']} of {counts['checked']}{ties}{different}"


def _positions_table(positions: list[dict[str, Any]]) -> str:
    rows = ([str(p["position"]), *map(_estimate, (p.get("marginal"), p.get("conditional")))] for p in positions)
    return table(("Position", "Accepted", "Accepted, if all before it were"), rows)


def _calibration_table(entry: dict[str, Any]) -> str:
    names = ("predicted", "observed", "ece", "auc")
    rows: Iterable[list[str]] = (
        [str(p["position"]), *(_estimate(p.get(name)) for name in names)] for p in entry["positions"]
    )
    return table(("Position", "Predicted survival", "Observed", "ECE", "AUC"), rows)
