"""Plots of a model card."""

from pathlib import Path
from typing import Any

from ..evaluation.plots import save, style
from .card_facts import training_entries


def plot_losses(log: list[dict[str, Any]], file: Path) -> Path | None:
    """
    Draws the loss over the updates of a training; nothing where there is none, or no matplotlib.

    Args:
        log (`list[dict]`): The trainer's `state.log_history`.
        file (`Path`): Where to, a PNG; its folder is made.
    """
    entries, held_out = training_entries(log), [entry for entry in log if {"eval_loss", "step"} <= entry.keys()]
    if len(entries) < 2:
        return None
    try:
        with style() as plt:
            figure, axes = plt.subplots(figsize=(5.6, 2.8))
            axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], linewidth=1, label="training")
            if held_out:
                steps, losses = [e["step"] for e in held_out], [e["eval_loss"] for e in held_out]
                axes.plot(steps, losses, "o-", markersize=3, linewidth=1, label="held-out examples")
                axes.legend()
            axes.set(xlabel="update", ylabel="loss")
            file.parent.mkdir(parents=True, exist_ok=True)
            save(figure, file)
    except ImportError:
        return None  # the card has the losses as a table too
    return file
