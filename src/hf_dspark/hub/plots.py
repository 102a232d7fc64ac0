"""Plots of a model card."""

from pathlib import Path
from typing import Any

from ..evaluation.plots import save, style
from .card_facts import learning_curves, training_entries


def plot_training(record: dict[str, Any], file: Path) -> Path | None:
    """
    Draws the loss over the updates of a training and, where accepted length was measured on the way, that over the
    supervised tokens seen; nothing where there is no loss, or no matplotlib.

    Args:
        record (`dict`): The drafter's training record.
        file (`Path`): Where to, a PNG; its folder is made.
    """
    if len(training_entries(record.get("log") or [])) < 2:
        return None
    curves = learning_curves(record)
    try:
        with style() as plt:
            panels = 2 if curves else 1
            figure, axes = plt.subplots(1, panels, figsize=(4.4 * panels + 1.2 * (panels == 1), 2.8), squeeze=False)
            _draw_losses(axes[0, 0], record["log"])
            if curves:
                _draw_learning(axes[0, 1], curves)
            file.parent.mkdir(parents=True, exist_ok=True)
            save(figure, file)
    except ImportError:
        return None  # the card has the numbers as a table too
    return file


def _draw_losses(axes: Any, log: list[dict[str, Any]]) -> None:
    entries, held_out = training_entries(log), [entry for entry in log if {"eval_loss", "step"} <= entry.keys()]
    axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], linewidth=1, label="training")
    if held_out:
        steps, losses = [e["step"] for e in held_out], [e["eval_loss"] for e in held_out]
        axes.plot(steps, losses, "o-", markersize=3, linewidth=1, label="held-out examples")
        axes.legend()
    axes.set(xlabel="update", ylabel="loss")


def _draw_learning(axes: Any, curves: dict[str, list[tuple[float, float]]]) -> None:
    for name, points in curves.items():
        tokens, lengths = zip(*points)
        axes.plot([n / 1e6 for n in tokens], lengths, "o-", markersize=3, linewidth=1, label=name)
    if len(curves) > 1:
        axes.legend()
    axes.set(xlabel="million supervised tokens seen", ylabel="accepted length, held out")
