"""What an evaluation's `results.json` says of one drafter: metadata for the Hub, and tables."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..evaluation.report import few_prompts_text, reported
from ..models.configuration_drafter import NAMES
from ..models.drafter import Drafter
from .card_facts import table
from .escaping import markdown, one_line
from .names import hub_id


METRICS = {
    "accepted_length": "Accepted length",
    "tokens_per_forward": "Tokens per target forward",
    "speedup": "Speed over plain decoding",
}
_HUB_FILE = "hf://datasets/"


def contenders_of(
    results: dict[str, Any], drafter: Drafter, folder: str | os.PathLike, repo_id: str | None
) -> dict[str, dict[str, Any]]:
    """
    The contenders of an evaluation that are this drafter, under whatever schedule.

    Args:
        results (`dict`): What `evaluation.results.read_results` returned.
        drafter (`Drafter`): The drafter.
        folder (`str`): Its folder.
        repo_id (`str`, *optional*): Its Hub id.

    Raises:
        ValueError: If none is, or it can't be told.
    """
    drafters = {name: entry for name, entry in results["contenders"].items() if entry.get("kind") == "drafter"}
    models = {entry.get("model") for entry in drafters.values()}
    names = {str(folder), drafter.config.name_or_path, repo_id} - {None, ""}
    mine = {model for model in models if model in names or any(_is_same(model, name) for name in names)}
    if not mine and len(models) == 1:
        mine = models
    if not mine:
        evaluated = ", ".join(sorted(map(one_line, models))) or "none"
        raise ValueError(f"The results are of other drafters than {folder} (evaluated: {evaluated}).")
    found = {name: entry for name, entry in drafters.items() if entry.get("model") in mine}
    kinds = {entry.get("drafter_type") for entry in found.values()}
    kind = drafter.config.model_type
    if kinds != {kind}:
        named = ", ".join(NAMES.get(other, one_line(other)) for other in kinds)
        raise ValueError(f"The results are of a {named} drafter, {folder} holds a {NAMES[kind]} drafter.")
    return found


def _is_same(model: Any, name: str) -> bool:
    return isinstance(model, str) and Path(model).resolve() == Path(name).resolve()


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
                        task_name="Speculative decoding",
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
    return estimate["value"] if isinstance(estimate, dict) else estimate


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
    return f"{schedule} schedule{meant}{f' at {threshold:g}' if follows else ''}, {drafts} drafts"


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
