"""`hf-dspark evaluate`: what drafters are worth on tasks, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer import BadParameter, Option

from .options import TargetOption


def evaluate(
    tasks: Annotated[
        list[str] | None,
        Option(
            help="Names of the paper's tasks (gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench, "
            "alpaca, arena-hard-v2; from the Hub), .jsonl files with `prompt`, `messages` or `turns` "
            "in each line, or folders of such files."
        ),
    ] = None,
    prompts: Annotated[list[str] | None, Option(help="Prompts of your own.")] = None,
    target: TargetOption = None,
    drafter: Annotated[
        list[str] | None, Option(help="Its drafters: folders, Hub ids or `embedded`.", show_default="embedded")
    ] = None,
    output: Annotated[Path, Option(help="Folder of the results; an interrupted run in it goes on.")] = Path(
        "evaluation"
    ),
    schedules: Annotated[
        list[str] | None,
        Option(
            help="How much is drafted and verified: fixed (the whole block), fixed:3, confidence:0.5, throughput, or "
            "own (as the drafter's settings say). Each drafter is run under each; +lookup:5 behind one also copies up "
            "to 5 tokens where the text repeats itself.",
            show_default="own fixed",
        ),
    ] = None,
    baselines: Annotated[list[str] | None, Option(help="What else to run: prompt_lookup, fast_layers.")] = None,
    assistant: Annotated[
        str | None, Option(help="A small language model to compare with, in transformers' assisted generation.")
    ] = None,
    rows: Annotated[
        list[int] | None, Option(min=1, help="Prompts decoded at once; each number is run.", show_default="1")
    ] = None,
    samples: Annotated[
        int | None, Option(min=1, help="Prompts per task, a seeded sample.", show_default="all")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2, help="How long an answer may be, in tokens.")] = 256,
    temperature: Annotated[
        float, Option(min=0.0, help="0 always takes the likeliest token; above it, tokens are sampled.")
    ] = 0.0,
    thinking: Annotated[
        bool | None,
        Option("--thinking/--no-thinking", help="Thinking mode, for templates that know it.", show_default="theirs"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Number type of the target; auto takes the one it was saved in."),
    ] = "auto",
    drafter_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, Option(help="That of the drafters.", show_default="the target's")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Of samples, sampled tokens and intervals.")] = 0,
    skip_bad: Annotated[
        bool, Option("--skip-bad", help="Leave out and count what is unusable in task files, rather than stop.")
    ] = False,
    cost_model: Annotated[
        bool, Option(help="Predict what other settings would be worth here; needs the schedule fixed.")
    ] = True,
) -> None:
    """
    Measure drafters on tasks: acceptance, speed, and whether the text is that of plain decoding.

    Prints a table, and leaves a folder with all numbers (results.json), a report (report.md) and plots.
    """
    if not tasks and not prompts:
        raise BadParameter("name tasks with --tasks, or give your own prompts with --prompts.")

    import torch

    from ..evaluation.benchmark import EvaluationConfig, evaluate_drafter
    from ..hub.pairs import drafter_folder
    from .decoding import find_target, load_target

    config = EvaluationConfig(
        schedules=schedules or ["own", "fixed"],
        baselines=baselines or [],
        rows=rows or [1],
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        enable_thinking=thinking,
        seed=seed,
        skip_bad=skip_bad,
        cost_model=cost_model,
    )
    model, tokenizer = load_target(find_target(target, drafter or []), dtype)
    with _progress() as bar:
        work = bar.add_task("prompts", total=None)
        results = evaluate_drafter(
            model,
            [drafter_folder(name) for name in drafter or [None]],
            tasks or [],
            output,
            config,
            prompts=prompts or [],
            tokenizer=tokenizer,
            assistant=assistant,
            drafter_dtype=getattr(torch, drafter_dtype) if drafter_dtype else None,
            progress=lambda done, all_: bar.update(work, completed=done, total=all_),
        )
    _print(Console(), results, output)


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print(console: Console, results: dict[str, Any], output: Path) -> None:
    from ..evaluation.report import few_prompts_text, recommendation, reported

    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for each in reported(results):
        if each["contender"] != "plain":
            runs.setdefault((each["contender"], each["rows"]), []).append(each)
    for (name, rows), entries in runs.items():
        console.print(_table(f"{name}, {rows} row{'s' if rows > 1 else ''}", entries))
    console.print("In brackets, 95 % intervals. Speed-up is over plain decoding in this process.", style="dim")
    if few := few_prompts_text(results):
        console.print(Text(few))
    skipped = sum(len(task["skipped"]) for task in results["tasks"])
    if skipped:
        prompts = "prompt" if skipped == 1 else "prompts"
        console.print(Text(f"{skipped} unusable {prompts} left out, which report.md names."))
    for each in (results["cost_model"] or {}).get("recommended", ()):
        console.print(Text(recommendation(each).replace("`", "")))
    console.print(Text(f"{output}: results.json, report.md, plots, prompts.jsonl"), soft_wrap=True)


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    from ..evaluation.report import estimate_text

    table = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("task", min_width=10)
    for name in ("accepted length", "tokens a forward", "speed-up"):
        table.add_column(name, justify="right", min_width=17, no_wrap=True)
    table.add_column("same text", justify="right")
    for each in entries:
        table.add_row(
            Text(each["task"]),
            *(estimate_text(each[name]) for name in ("accepted_length", "tokens_per_forward", "speedup")),
            _same_text(each.get("equality")),
        )
    return table


def _same_text(equality: dict[str, int] | None) -> str:
    if not equality:
        return ""
    ties = f", {equality['ties']} ties" if equality["ties"] else ""
    return f"{equality['equal']}/{equality['checked']}{ties}"
