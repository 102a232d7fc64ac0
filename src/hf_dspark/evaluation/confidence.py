"""What confidences are worth, from rounds that verified the whole block: calibration, and a sweep of thresholds."""

from collections.abc import Iterable
from typing import Any

import torch

from ..generation.confidence import calibrated
from ..generation.scheduling import ConfidenceSchedule
from ..generation.settings import DraftSettings
from .calibration import expected_calibration_error, roc_auc
from .recorded import UnitRun, is_whole_block, recorded_units
from .replay import replay


THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(10))


def confidence_entries(records: list[dict[str, Any]], contenders: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """
    The field `calibration` of `results.json`.

    Args:
        records (`list[dict[str, Any]]`): Of the log.
        contenders (`dict[str, dict[str, Any]]`): Descriptions by name.
    """
    entries = []
    for name, description in contenders.items():
        if not is_whole_block(description):
            continue
        rows = min((record["unit"][0] for record in records), default=1)
        units = recorded_units(records, name, rows, description["num_drafts"])
        confidences, accepted = whole_block_rounds(units, description["num_drafts"])
        if len(confidences):
            entries.append(
                {
                    "contender": name,
                    "rounds": len(confidences),
                    **_calibration(confidences, accepted, description["confidence_temperatures"]),
                    "thresholds": _sweep(units, description),
                }
            )
    return entries


def whole_block_rounds(units: Iterable[UnitRun], num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rounds that verified the whole block and were not cut by a stop or the length limit.

    Returns:
        Confidences as the drafter gave them, and whether each draft and all before it were accepted, both of shape
        `(rounds, drafts)`.
    """
    rounds = [
        round_
        for unit in units
        for turn in unit.turns
        for row in turn.rows
        for round_ in row
        if len(round_.confidences) == round_.verified == num_drafts and round_.committed == round_.accepted + 1
    ]
    confidences = torch.tensor([round_.confidences for round_ in rounds]).reshape(-1, num_drafts)
    lengths = torch.tensor([round_.accepted for round_ in rounds], dtype=torch.long)
    return confidences, torch.arange(num_drafts) < lengths[:, None]


def survival(confidences: torch.Tensor, temperatures: list[float] | None) -> torch.Tensor:
    """Predicted probability `(rounds, drafts)` that a draft and all before it are accepted."""
    return calibrated(confidences, temperatures).cumprod(1)


def _calibration(
    confidences: torch.Tensor, accepted: torch.Tensor, temperatures: list[float] | None
) -> dict[str, Any]:
    predicted, raw = survival(confidences, temperatures), survival(confidences, None)
    positions = []
    for k in range(accepted.shape[1]):
        observed = accepted[:, k].float()
        positions.append(
            {
                "position": k + 1,
                "predicted": float(predicted[:, k].mean()),
                "observed": float(observed.mean()),
                "ece": expected_calibration_error(predicted[:, k], observed),
                "ece_uncalibrated": expected_calibration_error(raw[:, k], observed),
                "auc": roc_auc(predicted[:, k], observed),
            }
        )
    return {
        "mean_ece": sum(position["ece"] for position in positions) / len(positions),
        "mean_ece_uncalibrated": sum(position["ece_uncalibrated"] for position in positions) / len(positions),
        "positions": positions,
    }


def _sweep(units: list[UnitRun], description: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """By task, what each threshold would verify and accept a round."""
    sweep: dict[str, list[dict[str, float]]] = {}
    for task in dict.fromkeys(unit.task for unit in units):
        rows = [row for unit in units if unit.task == task for turn in unit.turns for row in turn.rows]
        if any(rows):
            sweep[task] = [_threshold(rows, threshold, description) for threshold in THRESHOLDS]
    return sweep


def _threshold(rows: list[Any], threshold: float, description: dict[str, Any]) -> dict[str, float]:
    settings = DraftSettings(
        description["num_drafts"], "confidence", threshold, temperatures=description["confidence_temperatures"]
    )
    rounds = [
        round_ for row in rows for round_ in replay([row], ConfidenceSchedule(settings), description["num_drafts"])
    ]
    accepted, verified = (sum(sum(getattr(r, name)) for r in rounds) for name in ("accepted", "verified"))
    return {
        "threshold": threshold,
        "accepted": accepted / len(rounds),
        "rejected": (verified - accepted) / len(rounds),
        "accepted_length": sum(sum(r.committed) for r in rounds) / len(rounds),
    }
