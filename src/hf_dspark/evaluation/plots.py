"""The plots: small, plain, and all in one style."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .calibration import ECE_BINS, _bin_means, expected_calibration_error


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from ..generation.profile import ThroughputProfile


SUFFIXES = (".png", ".svg", ".pdf")
# Predictions in a bin of a reliability diagram without which it is left out.
FEWEST_SHOWN = 5
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # for what comes after the last color
STYLE = {
    "axes.prop_cycle": None,  # set in `style`, where matplotlib is imported
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.constrained_layout.use": True,
    "figure.dpi": 110,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "savefig.dpi": 160,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@contextmanager
def style() -> Iterator[Any]:
    """
    The library's plot style, and `matplotlib.pyplot` to draw with; no window is opened.

    Raises:
        ImportError: Without matplotlib, naming the extra to install.

    Example:

    ```python
    >>> from hf_dspark.evaluation.plots import style

    >>> with style() as plt:
    ...     figure, axes = plt.subplots()
    ```
    """
    try:
        import matplotlib
        from cycler import cycler
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "hf-dspark[evaluate]"') from error
    if matplotlib.get_backend().lower() not in ("agg", "module://matplotlib_inline.backend_inline"):
        matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE | {"axes.prop_cycle": cycler(color=COLORS)}):
        yield plt


def check_suffix(path: str | Path) -> None:
    """
    Says before any work whether a figure can be written there.

    Raises:
        ValueError: If the suffix of `path` names no kind of picture that is written here.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"{path} is no name for a plot. End it in {', '.join(SUFFIXES)}.")


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure as the suffix of `path` says, and closes it."""
    import matplotlib.pyplot as plt

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def throughput_profile(profile: ThroughputProfile) -> Figure:
    """
    What a step and drafting cost, by the tokens in them and a line for each number of rows. Steps are shown as
    measured; the schedule takes the cheapest larger one where a smaller one is dearer.

    Args:
        profile ([`ThroughputProfile`]): The profile.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    panels = [(profile.step_seconds, "target step", "tokens in the step, all rows")]
    if profile.draft_seconds:
        panels.append((profile.draft_seconds, "drafting", "drafts a row"))
    with style() as plt:
        figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2), squeeze=False)
        for panel, (curves, title, label) in zip(axes[0], panels):
            for rows, curve in sorted(curves.items()):
                name = f"{rows} {'row' if rows == 1 else 'rows'}"
                panel.plot(list(curve), [1000 * s for s in curve.values()], marker="o", markersize=3, label=name)
            panel.set(title=title, xlabel=label, ylabel="milliseconds", ylim=(0, None))
        axes[0, 0].set_xscale("log", base=2)
        axes[0, 0].xaxis.set_major_formatter(plt.FuncFormatter(lambda tokens, _: f"{tokens:g}"))
        axes[0, 0].legend()
        return figure


def reliability_diagram(
    survival: dict[str, torch.Tensor], accepted: torch.Tensor, positions: Sequence[int] = (1, 3, 5, 7)
) -> Figure:
    """
    Predicted against observed prefix acceptance (DSpark paper, figure 6), a panel a draft position. The area of a dot
    grows with the number of predictions behind it, and bins with fewer than five are not shown (they count in the
    error); the diagonal is perfect calibration.

    Args:
        survival (`dict[str, torch.Tensor]`): What the lines are called, and the predicted probability
            `(rounds, drafts)` that a draft and all before it are accepted.
        accepted (`torch.Tensor` of shape `(rounds, drafts)`): Whether they were.
        positions (`Sequence[int]`, *optional*, defaults to 1, 3, 5, 7): Draft positions, from 1; those that the
            drafter does not have are left out.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    positions = [position for position in positions if position <= accepted.shape[1]]
    with style() as plt:
        figure, axes = plt.subplots(
            1, len(positions), figsize=(2.5 * len(positions) + 0.4, 2.9), sharey=True, squeeze=False
        )
        for panel, position in zip(axes[0], positions):
            panel.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle="--")
            for name, predicted in survival.items():
                column = predicted[:, position - 1], accepted[:, position - 1]
                counts, means, outcomes = _bin_means(*column, ECE_BINS)
                filled = counts >= FEWEST_SHOWN
                error = expected_calibration_error(*column)
                (line,) = panel.plot(means[filled], outcomes[filled], linewidth=1, label=f"{name}, ECE {error:.1%}")
                sizes = 4 + 60 * counts[filled] / counts.sum()
                panel.scatter(means[filled], outcomes[filled], s=sizes, color=line.get_color(), zorder=3)
            panel.set(title=f"draft {position}", xlabel="predicted", xlim=(0, 1), ylim=(0, 1), aspect="equal")
            panel.legend(loc="upper left", frameon=True, framealpha=0.85, edgecolor="none")
        axes[0, 0].set_ylabel("observed prefix acceptance")
        return figure


def accepted_length_by_task(results: dict[str, Any]) -> Figure:
    """
    Accepted length of each drafter and schedule, by task, with 95 % intervals.

    Args:
        results (`dict`): Of an evaluation, see `docs/evaluate.md`.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    names, tasks = _drafted(results), _tasks(results, "macro")
    entries = _entries(results)
    with style() as plt:
        figure, axes = plt.subplots(figsize=(min(11.0, max(4.5, 0.3 * len(tasks) * (len(names) + 1) + 1)), 3.2))
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            estimates = [entries[name, task]["accepted_length"] for task in tasks]
            values = [estimate["value"] for estimate in estimates]
            values = [float("nan") if value is None else value for value in values]
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(tasks))]
            axes.bar(places, values, width * 0.92, label=_short(results, name), color=COLORS[i % len(COLORS)])
            axes.errorbar(places, values, _error_bars(estimates), fmt="none", ecolor="#333333", elinewidth=0.8)
        axes.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(tasks)), [_verbatim(task) for task in tasks])
        axes.set(ylabel="accepted length")
        axes.grid(axis="x", visible=False)
        _legend_above(figure, axes)
        return figure


def conditional_acceptance(results: dict[str, Any], tasks: Sequence[str] | None = None) -> Figure:
    """
    Acceptance at each draft position, given that all before it were accepted (DSpark paper, figure 2): a panel a task,
    a line a drafter and schedule. Positions that fewer than 10 rounds reached are left out.

    Args:
        results (`dict`): Of an evaluation.
        tasks (`Sequence[str]`, *optional*): Which tasks; all by default.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    tasks, entries = list(tasks or _tasks(results)), _entries(results)
    with style() as plt:
        figure, panels = _panels(plt, len(tasks), 2.3, 2.2)
        most = 1
        for panel, task in zip(panels, tasks):
            for i, name in enumerate(_drafted(results)):
                shown = [p for p in entries[name, task]["positions"] if p["reached"] >= 10]
                if shown:
                    most = max(most, shown[-1]["position"])
                    x, y = [p["position"] for p in shown], [p["conditional"] for p in shown]
                    panel.plot(
                        x, y, marker="o", markersize=3, label=_short(results, name), color=COLORS[i % len(COLORS)]
                    )
            panel.set(title=_verbatim(task), ylim=(0, 1))
        for panel in panels:
            panel.set_xticks(range(1, most + 1))
            panel.set_xlim(0.7, most + 0.3)
        figure.supxlabel("draft position", fontsize=9)
        figure.supylabel("conditional acceptance", fontsize=9)
        _legend_above(figure, *panels)
        return figure


def acceptance_histogram(results: dict[str, Any]) -> Figure:
    """
    How many tokens rounds commit: their share by number of tokens, for each drafter and schedule.

    Args:
        results (`dict`): Of an evaluation.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    names, entries = _drafted(results), _entries(results)
    with style() as plt:
        figure, axes = plt.subplots(figsize=(5.2, 3.0))
        width = 0.8 / len(names)
        most = max(len(entries[name, "all"]["accepted_histogram"]) for name in names)
        for i, name in enumerate(names):
            counts = entries[name, "all"]["accepted_histogram"]
            shares = [count / max(1, sum(counts)) for count in counts]
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(1, len(counts) + 1)]
            axes.bar(places, shares, width * 0.92, label=_short(results, name), color=COLORS[i % len(COLORS)])
        axes.set(xlabel="committed tokens a round, the target's own included", ylabel="share of rounds")
        axes.set_xticks(range(1, most + 1))
        axes.grid(axis="x", visible=False)
        _legend_above(figure, axes)
        return figure


def threshold_sweep(sweep: dict[str, list[dict[str, float]]]) -> Figure:
    """
    What confidence thresholds do (DSpark paper, figure 5): a panel a task, and in it a bar for every threshold with
    the accepted and rejected drafts of a round; the line is the share of verified drafts that are accepted.

    Args:
        sweep (`dict[str, list[dict[str, float]]]`): By task, for each `threshold` the drafts `accepted` and `rejected`
            a round.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    with style() as plt:
        figure, panels = _panels(plt, len(sweep), 2.5, 2.3)
        for number, (panel, (task, points)) in enumerate(zip(panels, sweep.items())):
            x = [point["threshold"] for point in points]
            accepted, rejected = ([point[name] for point in points] for name in ("accepted", "rejected"))
            panel.bar(x, accepted, 0.08, color=COLORS[2], label="accepted")
            panel.bar(x, rejected, 0.08, bottom=accepted, color="#cccccc", label="rejected")
            rates = panel.twinx()
            shares = [a / (a + r) if a + r else float("nan") for a, r in zip(accepted, rejected)]
            rates.plot(x, shares, color=COLORS[1], marker="o", markersize=3, label="acceptance rate")
            rates.set(ylim=(0, 1))
            rates.grid(visible=False)
            rates.tick_params(axis="y", colors=COLORS[1])
            panel.set(title=_verbatim(task))
            panel.set_xticks([0, 0.3, 0.6, 0.9])
            panel.grid(axis="x", visible=False)
            if number == 0:
                lines = [part for each in (panel, rates) for part in each.get_legend_handles_labels()[0]]
                figure.legend(handles=lines, loc="outside upper center", ncols=3)
        figure.supxlabel("confidence threshold", fontsize=9)
        figure.supylabel("drafts a round", fontsize=9)
        return figure


def throughput_against_rows(results: dict[str, Any]) -> Figure:
    """
    Tokens a second of all rows together against the number of rows, and below it the drafts verified per row and round
    (DSpark paper, figure 8).

    Args:
        results (`dict`): Of an evaluation over several numbers of rows.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    measured = [e for e in results["results"] if e["task"] == "all"]
    rows = sorted({e["rows"] for e in measured})
    with style() as plt:
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(5.0, 4.6), sharex=True, gridspec_kw={"height_ratios": [2, 1]}
        )
        for i, name in enumerate(results["contenders"]):
            mine = sorted((e for e in measured if e["contender"] == name), key=lambda e: e["rows"])
            look = {"marker": "o", "markersize": 3.5, "color": "#333333" if i == 0 else COLORS[(i - 1) % len(COLORS)]}
            x = [e["rows"] for e in mine]
            above.plot(x, [e["tokens_per_second"] for e in mine], label=_short(results, name), **look)
            if mine[0]["drafts"]:
                below.plot(
                    x, [(e["drafts"]["verified"] + e["drafts"]["copied"]) / max(1, e["rounds"]) for e in mine], **look
                )
        above.set(ylabel="tokens a second, all rows", ylim=(0, None))
        below.set(ylabel="verified drafts a round", xlabel="rows decoded at once", ylim=(0, None))
        below.set_xscale("log", base=2)
        below.set_xticks(rows, rows)
        below.minorticks_off()
        _legend_above(figure, above)
        return figure


def time_breakdown(results: dict[str, Any]) -> Figure:
    """
    Where the time of a new token goes: the target, the drafter, and everything else, for each contender with the
    smallest number of rows. What is not ours to split is one bar.

    Args:
        results (`dict`): Of an evaluation.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    entries = _entries(results)
    names = [name for name in results["contenders"] if (name, "all") in entries]
    shown = [_short(results, name) for name in names]
    parts = {"target": COLORS[0], "draft": COLORS[1], "other": "#999999", "total": "#bbbbbb"}
    labels = {"target": "target", "draft": "drafter", "other": "everything else", "total": "not split"}
    with style() as plt:
        figure, axes = plt.subplots(figsize=(6.0, 0.38 * len(names) + 1.3))
        for part, color in parts.items():
            widths, starts = [], []
            for name in names:
                seconds, tokens = entries[name, "all"]["seconds"], entries[name, "all"]["new_tokens"]
                split = {key: 1000 * value / tokens for key, value in seconds.items()}
                is_split = "target" in split
                order = ("target", "draft", "other") if is_split else ("total",)
                widths.append(split[part] if part in order else 0)
                starts.append(sum(split[p] for p in order[: order.index(part)]) if part in order else 0)
            if any(widths):
                axes.barh(shown, widths, 0.7, left=starts, color=color, label=labels[part])
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds a new token")
        axes.grid(axis="y", visible=False)
        _legend_above(figure, axes)
        return figure


def predicted_against_measured(cost_model: dict[str, Any]) -> Figure:
    """
    Predicted against measured speed-up of every setting that was run, with the measured one's 95 % interval. The grey
    band is 10 % to either side.

    Args:
        cost_model (`dict`): Of an evaluation.

    Returns:
        `matplotlib.figure.Figure`: to be saved or shown.
    """
    run = [each for each in cost_model["predictions"] if each["measured_speedup"]]
    drafters = {each["drafter"] for each in run}
    with style() as plt:
        figure, axes = plt.subplots(figsize=(4.4, 4.0))
        numbers = [each["speedup"] for each in run] + [
            each["measured_speedup"][key] for each in run for key in ("value", "low", "high")
        ]
        numbers = [number for number in numbers if number is not None]
        low, high = 0.92 * min(numbers), 1.08 * max(numbers)
        axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#eeeeee", zorder=0)
        axes.plot([low, high], [low, high], color="#999999", linewidth=0.8, linestyle="--")
        for i, each in enumerate(run):
            estimate, color = each["measured_speedup"], COLORS[i % len(COLORS)]
            label = each["schedule"] if len(drafters) == 1 else f"{each['drafter']} {each['schedule']}"
            label += f", {each['rows']} rows" if each["rows"] > 1 else ""
            bars = _error_bars([estimate])
            marker = MARKERS[i // len(COLORS) % len(MARKERS)]
            look = {"fmt": marker, "markersize": 4, "color": color, "elinewidth": 0.8}
            axes.errorbar([estimate["value"]], [each["speedup"]], xerr=bars, label=_verbatim(label), **look)
        axes.set(xlabel="measured speed-up", ylabel="predicted speed-up", xlim=(low, high), ylim=(low, high))
        _legend_above(figure, axes)
        return figure


def _entries(results: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Entries by contender and task, of the smallest number of rows that each was run with."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for each in sorted(results["results"], key=lambda each: -each["rows"]):
        found[each["contender"], each["task"]] = each
    return found


def _drafted(results: dict[str, Any]) -> list[str]:
    """Names of the contenders with a drafter."""
    return [name for name, contender in results["contenders"].items() if contender["kind"] == "drafter"]


def _short(results: dict[str, Any], name: str) -> str:
    """A contender's name in legends: the schedule says it all where there is one drafter."""
    drafters = {results["contenders"][each]["drafter"] for each in _drafted(results)}
    is_clear = len(drafters) == 1 and name in _drafted(results)
    return _verbatim(results["contenders"][name]["schedule"] if is_clear else name)


def _verbatim(text: str) -> str:
    """Text that is no mathematics to matplotlib, and that a legend doesn't leave out."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def _tasks(results: dict[str, Any], mean: str | None = None) -> list[str]:
    """Names of the tasks that were run, and of the mean over several if it is asked for."""
    run = {each["task"] for each in results["results"]}
    names = [task["name"] for task in results["tasks"] if task["name"] in run]
    return [*names, mean] if mean and len(names) > 1 else names


def _error_bars(estimates: list[dict[str, Any]]) -> list[list[float]]:
    """Distances from the values down and up; none where there is no interval."""
    return [
        [max(0.0, sign * (e[end] - e["value"])) if e[end] is not None else 0.0 for e in estimates]
        for end, sign in (("low", -1), ("high", 1))
    ]


def _panels(plt: Any, count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure with a grid of panels, at most five side by side."""
    columns = min(count, 5)
    lines = -(-count // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(4.0, width * columns + 0.4), height * lines + 0.7), squeeze=False, sharey=True
    )
    panels = list(axes.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def _legend_above(figure: Figure, *axes: Any) -> None:
    """One legend over the figure, each name once."""
    found = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels())}
    widest = 0.09 * max(map(len, found), default=1) + 0.6  # inches, about
    columns = max(1, min(len(found), int(figure.get_figwidth() // widest)))
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=columns)
