"""`hf-dspark profile`: measure once what decoding costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import BadParameter, Option

from .options import DrafterOption, DtypeOption, TargetOption


if TYPE_CHECKING:
    from ..generation.profile import ThroughputProfile


def profile(
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = "auto",
    rows: Annotated[str, Option(help="Numbers of rows that decode together.")] = "1,2,4,8,16,32",
    context: Annotated[int, Option(min=1, help="Tokens of each prompt.")] = 32,
    seconds: Annotated[
        float, Option(min=0.0, help="How long to measure each number of rows; slow machines take longer.")
    ] = 5.0,
    threads: Annotated[int | None, Option(min=1, help="CPU threads.", show_default="torch's own")] = None,
    plot: Annotated[Path | None, Option(help="Where to draw the curves (.png, .svg, .pdf).")] = None,
) -> None:
    """
    Measure this machine, so that the throughput schedule knows what pays.

    The target's steps and drafting are timed by the decoding loop, for several numbers of rows. The result is kept for
    this pair, number type, processor, number of threads and library versions; from then on `generate` uses it.
    """
    numbers = _numbers(rows)
    if plot:
        from ..evaluation.plots import check_suffix

        check_suffix(plot)

    import torch

    from ..generation.profile import profile_path
    from ..generation.profiling import profile_throughput
    from .decoding import find_target, load_drafter, load_target

    target = find_target(target, [drafter] if drafter else [])
    if threads:
        torch.set_num_threads(threads)
    model, _ = load_target(target, dtype)
    measured = profile_throughput(model, load_drafter(drafter, model), numbers, context, seconds)
    console = Console(highlight=False)
    print_profile(console, measured)
    console.print(f"Kept in {profile_path(measured.conditions)}", soft_wrap=True)
    if plot:
        from ..evaluation.plots import save, throughput_profile

        save(throughput_profile(measured), plot)
        console.print(f"Drawn in {plot}", soft_wrap=True)


def _numbers(rows: str) -> list[int]:
    try:
        numbers = [int(number) for number in rows.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadParameter(f"--rows takes positive numbers with commas between them, not {rows!r}.")
    return numbers


def print_profile(console: Console, profile: ThroughputProfile) -> None:
    """Milliseconds of a step by tokens a row, and of drafting by drafts a row; a line for each number of rows."""
    place = profile.conditions
    threads = f", {place['threads']} threads" if place["threads"] else ""
    console.print(f"Milliseconds on {place['processor']}, {place['target']['dtype']}{threads}\n", soft_wrap=True)
    console.print("Target steps, by tokens a row")
    tokens = profile.step_seconds.items()
    console.print(_curves({rows: {n // rows: seconds for n, seconds in curve.items()} for rows, curve in tokens}))
    if profile.draft_seconds:
        console.print("\nDrafting, by drafts a row")
        console.print(_curves(profile.draft_seconds))


def _curves(curves: dict[int, dict[int, float]]) -> Table:
    numbers = sorted({number for curve in curves.values() for number in curve})
    table = Table(box=None, pad_edge=False, header_style="dim")  # eight columns of 999.9 fit 80 columns
    for name in ("rows", *map(str, numbers)):
        table.add_column(name, justify="right", no_wrap=True)
    for rows, curve in sorted(curves.items()):
        cells = (curve.get(number) for number in numbers)
        table.add_row(str(rows), *("" if cell is None else f"{1000 * cell:.1f}" for cell in cells))
    return table
