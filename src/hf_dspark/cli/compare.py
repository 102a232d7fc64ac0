"""`hf-dspark compare`: two evaluations side by side."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option


NAMES = {"accepted_length": "accepted length", "tokens_per_forward": "tokens a forward", "speedup": "speed-up"}


def compare(
    first: Annotated[str, Argument(metavar="A", help="A folder that `hf-dspark evaluate` wrote.")],
    second: Annotated[str, Argument(metavar="B", help="Another one.")],
    seed: Annotated[int, Option(min=0, help="Of the intervals.")] = 0,
) -> None:
    """
    Tell how B differs from A on the prompts that both have, and whether that is noise.

    A difference is noise if its 95 % interval, by resampling the prompts of both at once, holds zero. With fewer than
    20 prompts none is called real.
    """
    from ..evaluation.bootstrap import FEWEST_PROMPTS
    from ..evaluation.comparison import compare_results

    comparison = compare_results(first, second, seed)
    console = Console()
    if comparison["facts"]:
        console.print(_facts(comparison["facts"], first, second))
    for line in _alone(comparison["alone"]):
        console.print(Text(line))
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in comparison["rows"]:
        runs.setdefault((_pair(row), row["rows"]), []).append(row)
    for (pair, rows), entries in runs.items():
        console.print(_table(f"{pair}, {rows} row{'s' if rows > 1 else ''}", entries))
    if any(metric["noise"] is None for row in comparison["rows"] for metric in row["metrics"].values()):
        hint = f"Intervals from fewer than {FEWEST_PROMPTS} prompts are too narrow to call a difference real."
        console.print(f"{hint} Evaluate on more.", style="dim")
    hint = "Speeds of two processes differ by machine noise too, which no interval here holds. Run both again to see."
    console.print(hint, style="dim")


def _facts(facts: list[dict[str, Any]], first: str, second: str) -> Table:
    table = Table(title="They differ in", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("", first, second):
        table.add_column(Text(name), overflow="fold")
    for fact in facts:
        table.add_row(Text(fact["name"]), Text(str(fact["first"])), Text(str(fact["second"])))
    return table


def _alone(alone: dict[str, dict[str, Any]]) -> list[str]:
    """What of each is not compared."""
    lines = []
    for name, side in zip("AB", alone.values()):
        if not side["complete"]:
            lines.append(f"{name} was interrupted, and is compared on its prompts so far.")
        left = [*side["contenders"], *(f"{count} prompts of {task}" for task, count in side["prompts"].items())]
        if left:
            lines.append(f"Only in {name}, and left out: {', '.join(left)}.")
    return lines


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    from ..evaluation.report import interval_text

    table = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in ("task", "prompts", "", "A", "B", "B - A", "95 % interval", "verdict"):
        table.add_column(name, justify="right" if name in ("prompts", "A", "B", "B - A") else "left")
    for row in rows:
        task, prompts = Text(row["task"]), str(row["prompts"])
        for name, metric in row["metrics"].items():
            difference = metric["difference"]
            table.add_row(
                task,
                prompts,
                NAMES[name],
                f"{metric['first']:.2f}",
                f"{metric['second']:.2f}",
                f"{difference['value']:+.2f}",
                interval_text(difference),
                {None: "too few prompts", True: "noise", False: "differs"}[metric["noise"]],
            )
            task = prompts = ""
    return table


def _pair(row: dict[str, Any]) -> str:
    return row["first"] if row["first"] == row["second"] else f"{row['first']} / {row['second']}"
