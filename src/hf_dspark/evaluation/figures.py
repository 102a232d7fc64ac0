"""Which plots an evaluation leaves in its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plots
from .confidence import survival, whole_block_rounds
from .recorded import recorded_units


if TYPE_CHECKING:
    from matplotlib.figure import Figure


PLOTS_FOLDER = "plots"


def write_plots(folder: str | os.PathLike, results: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, str]:
    """
    Writes the plots that the results give rise to.

    Args:
        folder (`str` or `os.PathLike`): The folder of the results.
        results (`dict`): Of `read_results`.
        records (`list[dict[str, Any]]`): Of the log.

    Returns:
        `dict[str, str]`: the file of each, within the folder, by its caption.

    Raises:
        ImportError: Without matplotlib, naming the extra to install.
    """
    place = Path(folder) / PLOTS_FOLDER
    place.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, caption, figure in _figures(results, records):
        plots.save(figure, place / f"{name}.png")
        files[caption] = f"{PLOTS_FOLDER}/{name}.png"
    return files


def _figures(results: dict[str, Any], records: list[dict[str, Any]]) -> list[tuple[str, str, Figure]]:
    """File name, caption and figure of each."""
    found = []

    def add(name: str, caption: str, figure: Figure) -> None:
        found.append((name, caption, figure))

    if any(contender["kind"] == "drafter" for contender in results["contenders"].values()):
        add("accepted_length", "Accepted length by task", plots.accepted_length_by_task(results))
        add("conditional_acceptance", "Conditional acceptance by position", plots.conditional_acceptance(results))
        add("accepted_histogram", "Tokens committed a round", plots.acceptance_histogram(results))
    for i, each in enumerate(results["calibration"]):
        end = f"_{i + 1}" if len(results["calibration"]) > 1 else ""
        add(
            f"reliability{end}",
            f"Reliability of confidences, {each['contender']}",
            _reliability(each, results, records),
        )
        caption = f"Confidence thresholds, {each['contender']}, replayed from rounds that verified the whole block"
        add(f"thresholds{end}", caption, plots.threshold_sweep(each["thresholds"]))
    if len(results["settings"]["rows"]) > 1:
        add("throughput", "Throughput against rows", plots.throughput_against_rows(results))
    add("time", "Where the time goes", plots.time_breakdown(results))
    if results["cost_model"] and any(each["measured_speedup"] for each in results["cost_model"]["predictions"]):
        caption = "Predicted against measured speed-up"
        add("predicted", caption, plots.predicted_against_measured(results["cost_model"]))
    return found


def _reliability(entry: dict[str, Any], results: dict[str, Any], records: list[dict[str, Any]]) -> Figure:
    description = results["contenders"][entry["contender"]]
    rows, num_drafts = min(record["unit"][0] for record in records), description["num_drafts"]
    units = recorded_units(records, entry["contender"], rows, num_drafts)
    confidences, accepted = whole_block_rounds(units, num_drafts)
    temperatures = description["confidence_temperatures"]
    lines = {"uncalibrated" if temperatures else "as drafted": survival(confidences, None)}
    if temperatures:
        lines["calibrated"] = survival(confidences, temperatures)
    return plots.reliability_diagram(lines, accepted.float())
