"""The handlers that change the pair."""

from __future__ import annotations

from typing import Any

import drafting
import gradio as gr
import views
from pairs import Pair, PairError, Pairs


def up_to(most: int) -> dict[str, Any]:
    """The range of a slider from 1 on. With nothing to choose it stands still, as gradio has none with one stop."""
    return {"minimum": 1, "maximum": max(most, 2), "step": 1, "interactive": most > 1}


class PairChoice:
    """
    Lets a visitor bring a pair of their own; it is theirs alone.

    Args:
        pairs (`Pairs`): The models.
    """

    def __init__(self, pairs: Pairs):
        self.pairs = pairs

    def load(self, target_id: str, drafter_id: str) -> dict[str, Any]:
        """Load what a visitor named."""
        try:
            pair = self.pairs.load(target_id, drafter_id)
        except PairError as error:
            return {"pair_notice": views.notice(str(error), "error"), "status": str(error)}
        words = f"Loaded. Chat and race now use {pair.drafter_name}."
        return {
            "key": (target_id.strip(), drafter_id.strip()),
            "pair_notice": views.notice(words, "good"),
            **self._shown(pair),
            "status": words,
        }

    def reset(self) -> dict[str, Any]:
        words = "Chat and race use this Space's own pair again."
        return {
            "key": None,
            "pair_notice": views.notice(words, "good"),
            **self._shown(self.pairs.own),
            "status": words,
        }

    def _shown(self, pair: Pair) -> dict[str, Any]:
        choices = drafting.schedules(pair)
        return {
            "pair_line": views.pair_line(pair),
            "schedule": gr.Radio(choices, value=choices[0][1]),
            "threshold": gr.Slider(interactive=False),
            "drafts": gr.Slider(value=pair.num_drafts, **up_to(pair.num_drafts)),
            "measures": views.measures(None, pair.num_drafts),
        }
