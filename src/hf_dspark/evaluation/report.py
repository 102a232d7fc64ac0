"""`report.md`: an evaluation to read."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..files import write_whole
from .bootstrap import FEWEST_PROMPTS
from .cost_model import MARGIN
from .log import REPORT_FILE
from .results import entry
from .summary import ALL, MACRO


def write_report(folder: str | os.PathLike, results: dict[str, Any], plots: dict[str, str]) -> Path:
    """
    Writes the Markdown report.

    Args:
        folder (`str` or `os.PathLike`): The folder of the results.
        results (`dict`): Of `read_results`.
        plots (`dict[str, str]`): File of each plot, within the folder, by its caption.

    Returns:
        `Path`: the file.
    """
    parts = [
        "# Evaluation\n",
        *_circumstances(results),
        "## Results\n",
        *_results(results),
        *_positions(results),
        *_equality(results),
        *_calibration(results),
        *_cost_model(results),
        *_skipped(results),
        *_plots(plots),
    ]
    file = Path(folder) / REPORT_FILE
    write_whole(file, "\n".join(parts) + "\n")
    return file


def reported(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries worth a line: with one task, those of all tasks say nothing new."""
    if len(results["tasks"]) > 1:
        return results["results"]
    return [each for each in results["results"] if each["task"] not in (ALL, MACRO)]


def few_prompts_text(results: dict[str, Any]) -> str:
    """A warning where intervals come from too few prompts; empty where none does."""
    # Prompts that are decoded at once are drawn together.
    tasks = (e["task"] for e in reported(results) if "prompts" in e and e["prompts"] / e["rows"] <= FEWEST_PROMPTS - 1)
    few = list(dict.fromkeys(tasks))
    if not few:
        return ""
    return (
        f"Too few prompts ({', '.join(few)}): intervals from fewer than {FEWEST_PROMPTS} prompts, or groups of "
        "prompts decoded at once, are too narrow. Take them, and what is advised below, as hints."
    )


def estimate_text(estimate: dict[str, Any] | None) -> str:
    """A number with its interval."""
    if not estimate or estimate["value"] is None:
        return ""
    return f"{estimate['value']:.2f} {interval_text(estimate)}".rstrip()


def interval_text(estimate: dict[str, Any]) -> str:
    """An interval alone; nothing where there is none."""
    return "" if estimate["low"] is None else f"[{estimate['low']:.2f}, {estimate['high']:.2f}]"


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; text in it can't break it."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _circumstances(results: dict[str, Any]) -> list[str]:
    target, settings, hardware = results["target"], results["settings"], results["hardware"]
    temperature = settings["temperature"]
    how = "greedy" if not temperature else f"temperature {temperature}, no top-k, no top-p"
    thinking = {None: "the template's default", True: "on", False: "off"}[settings["enable_thinking"]]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [
        ("Target", f"`{target['name']}`, {target['parameters']:,} parameters, {target['dtype']}"),
        ("Decoding", f"{how}, at most {settings['max_new_tokens']} new tokens a turn, thinking mode {thinking}"),
        ("Rows decoded at once", ", ".join(map(str, sorted(settings["rows"])))),
        ("Machine", f"{hardware['device_name']} ({hardware['device']}), {hardware['threads']} threads"),
        ("Versions", versions),
        ("Seed", settings["seed"]),
        ("Begun", results["created"]),
    ]
    for name, contender in results["contenders"].items():
        facts.append((f"`{name}`", _contender(contender)))
    note = (
        [] if results["complete"] else ["**This run was interrupted: the numbers are those of the prompts so far.**\n"]
    )
    return [*note, table(("", ""), facts)]


def _contender(contender: dict[str, Any]) -> str:
    kind = contender["kind"]
    if kind == "plain":
        return "`generate` without a drafter; what the others are compared with"
    if kind == "fast_layers":
        return "plain decoding with the packed linear layers that drafters decode with on such CPUs"
    if kind == "prompt_lookup":
        return f"prompt lookup of transformers, {contender['prompt_lookup_num_tokens']} tokens"
    size = f"{contender['parameters']:,} parameters, {contender['dtype']}"
    if kind == "assistant":
        return f"assisted generation of transformers, {size}"
    if kind == "transformers_dflash":
        return f"DFlash of transformers itself, {size}"
    schedule = contender["verification_schedule"] or "default"
    if contender["assistant_confidence_threshold"] is not None:
        schedule += f" {contender['assistant_confidence_threshold']}"
    drafts = f"{contender['num_assistant_tokens']} of {contender['num_drafts']} drafts a round"
    copied = contender.get("prompt_lookup_num_tokens")
    copies = f", up to {copied} tokens copied from the text" if copied else ""
    return f"{contender['drafter_type']}, {size}, {drafts}, {schedule} schedule{copies}"


def _results(results: dict[str, Any]) -> list[str]:
    rows = [
        (
            each["contender"],
            each["rows"],
            each["task"],
            each.get("prompts"),
            estimate_text(each["accepted_length"]),
            estimate_text(each["tokens_per_forward"]),
            estimate_text(each["speedup"]),
            _number(each.get("tokens_per_second"), 1),
        )
        for each in reported(results)
    ]
    header = ("", "rows", "task", "prompts", "accepted length", "tokens per forward", "speed-up", "tokens a second")
    note = (
        "Accepted length: committed tokens a round, the target's own included. Speed-up: tokens a second over those "
        "of plain decoding in the same process, median over prompts. In brackets 95 % intervals, by bootstrap over "
        "prompts."
    )
    note += " `all` has all prompts together, `macro` is the mean over tasks.\n" if len(results["tasks"]) > 1 else "\n"
    few = few_prompts_text(results)
    return [table(header, rows), note, *([f"**{few}**\n"] if few else [])]


def _positions(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, rows in _drafter_runs(results):
        positions = entry(results, name, rows=rows)["positions"]
        for kind in ("conditional", "marginal"):
            lines.append((name, rows, kind, *(_number(each[kind]) for each in positions)))
    if not lines:
        return []
    width = max(map(len, lines)) - 3
    padded = [(*line, *[""] * (width + 3 - len(line))) for line in lines]
    header = ("", "rows", "acceptance", *range(1, width + 1))
    return ["### Acceptance by draft position\n", table(header, padded)]


def _drafter_runs(results: dict[str, Any]) -> list[tuple[str, int]]:
    return [(e["contender"], e["rows"]) for e in results["results"] if e["task"] == "all" and e["drafts"]]


def _equality(results: dict[str, Any]) -> list[str]:
    found = [e for e in results["results"] if e["task"] == "all" and e["equality"]]
    if not found:
        return []
    rows = [
        (e["contender"], e["rows"], *(e["equality"][k] for k in ("checked", "equal", "ties", "different")))
        for e in found
    ]
    rule = "Outputs against plain decoding, a turn each. " + (
        "In float32 they must be equal.\n"
        if results["target"]["dtype"] == "float32"
        else "A tie is a first mismatch where plain decoding's logits of the two tokens differ by at most 2 units in "
        "the last place of bfloat16.\n"
    )
    return [
        "### Same text as plain decoding\n",
        rule,
        table(("", "rows", "checked", "equal", "ties", "different"), rows),
    ]


def _calibration(results: dict[str, Any]) -> list[str]:
    parts = []
    for each in results["calibration"]:
        rows = [
            (
                p["position"],
                _number(p["predicted"]),
                _number(p["observed"]),
                _number(p["ece"], 3),
                _number(p["ece_uncalibrated"], 3),
                _number(p["auc"]),
            )
            for p in each["positions"]
        ]
        header = ("position", "predicted", "observed", "ECE", "ECE uncalibrated", "AUC")
        what = f"`{each['contender']}`, {each['rounds']} rounds, mean ECE {_number(each['mean_ece'], 3)}:\n"
        parts += [what, table(header, rows)]
    if not parts:
        return []
    intro = "Predicted and observed survival of the prefix, over rounds that verified the whole block.\n"
    return ["### Confidence\n", intro, *parts]


def _cost_model(results: dict[str, Any]) -> list[str]:
    model = results["cost_model"]
    if not model:
        return []
    parts = ["## Which setting to use\n"]
    for each in model["recommended"]:
        parts.append(f"- {recommendation(each)}")
    rows = [
        (
            each["drafter"],
            each["rows"],
            each["schedule"],
            _number(each["accepted_length"]),
            _number(each["verified_per_round"], 1),
            _number(each["speedup"]),
            estimate_text(each["measured_speedup"]),
            "" if each["error"] is None else f"{each['error']:+.1%}",
        )
        for each in model["predictions"]
    ]
    header = (
        "drafter",
        "rows",
        "schedule",
        "accepted length",
        "verified a round",
        "predicted speed-up",
        "measured",
        "error",
    )
    note = (
        "\nPredicted from the rounds that verified the whole block, replayed under each schedule, and from what "
        "drafting, steps of the target and the rest cost on this machine. The whole block itself sets each prompt's "
        "level, so its own prediction says little. The error is the median over prompts.\n"
    )
    return [*parts, note, table(header, rows)]


def recommendation(each: dict[str, Any]) -> str:
    """What to do, in a sentence."""
    who = f"`{each['drafter']}` with {each['rows']} row{'s' if each['rows'] > 1 else ''}"
    best, speedup = f"`{each['schedule']}`", f"{each['speedup']:.2f} times"
    if each["plain"]:
        if each["speedup"] <= 1:
            return f"{who}: decode plainly. The best schedule, {best}, is predicted to run at {speedup} its speed."
        return (
            f"{who}: plain decoding is as good here. The best schedule, {best}, is predicted to run at {speedup} its "
            f"speed, and a prediction is too rough to tell less than {MARGIN:.0%}."
        )
    return f"{who}: use {best}, predicted to be {speedup} as fast as plain decoding."


def _skipped(results: dict[str, Any]) -> list[str]:
    skipped = [each for task in results["tasks"] for each in task["skipped"]]
    if not skipped:
        return []
    return [
        f"## Left out: {len(skipped)}\n",
        table(("where", "why"), ((each["where"], each["why"]) for each in skipped)),
    ]


def _plots(plots: dict[str, str]) -> list[str]:
    if not plots:
        return []
    return ["## Plots\n", *(f"{caption}\n\n![{caption}]({file})\n" for caption, file in plots.items())]
