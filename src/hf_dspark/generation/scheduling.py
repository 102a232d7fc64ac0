"""
How much of a drafted block is sent through the target.

Whether a draft is verified may depend on what was known before that draft was drawn, and on nothing later; anything
later would bias the output (DSpark paper, losslessness of the schedule).
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models.drafter import Drafter
from .confidence import calibrated
from .profile import required_profile, stored_profile
from .settings import DraftSettings


logger = logging.get_logger(__name__)


class Schedule:
    """
    What a call asks its schedule, in the order of a round; this one verifies every draft.

    One object serves one call: it may remember rows, which are named by their index in the call's batch.

    Args:
        settings ([`DraftSettings`]): The call's settings.
    """

    # What statistics call it. One of your own names itself.
    name = "fixed"

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings

    def num_drafts(self, rows: int) -> int:
        """Before the draft: how many tokens to draft for each of `rows` live rows; 0 pauses drafting this round."""
        return self.settings.num_drafts

    def num_copied(self, rows: int, copying: int, acceptance: float) -> int:
        """
        Before the draft: how many tokens each of `copying` rows copies from its own text in place of a draft, of
        `rows` live rows; 0 leaves them to the drafter.

        Args:
            rows (`int`): Live rows.
            copying (`int`): Those that have something to copy.
            acceptance (`float`): The share of copied tokens that is accepted, given that those before them were.
        """
        return self.settings.num_copied

    def lengths(self, confidences: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        """
        After the draft: how many leading drafts of each live row to verify.

        Args:
            confidences (`torch.FloatTensor` of shape `(len(rows), drafts)`, *optional*):
                The drafter's, as it gave them; needed by every schedule but this one. There may be fewer drafts than
                `num_drafts` asked for, at the end of a generation.
            rows (`Sequence[int]`): The live rows that don't copy.

        Returns:
            `torch.LongTensor` of shape `(len(rows),)`, on the CPU. Where it exceeds the drafts that there are, all are
            meant.
        """
        return torch.full((len(rows),), self.settings.num_drafts)

    def observe(self, rows: Sequence[int], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """After verification: of each live row that did not copy, how many drafts were verified and accepted."""


class ConfidenceSchedule(Schedule):
    """Verifies the leading drafts whose (calibrated) confidence reaches the threshold."""

    name = "confidence"

    def lengths(self, confidences: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        keep = calibrated(confidences, self.settings.temperatures) >= self.settings.threshold
        return keep.long().cumprod(1).sum(1)


def make_schedule(settings: DraftSettings, drafter: Drafter, target: PreTrainedModel) -> Schedule:
    """
    The schedule of one call. Where none is named: the throughput schedule if this machine has been measured with this
    pair, else a fixed one.

    Args:
        settings ([`DraftSettings`]): The call's settings.
        drafter ([`Drafter`]): The drafter.
        target (`PreTrainedModel`): The target.

    Raises:
        ValueError: If the throughput schedule is asked for and this machine has not been measured.
    """
    from .throughput import ThroughputSchedule

    if isinstance(settings.schedule, Schedule):
        return settings.schedule
    if settings.schedule == "confidence":
        return ConfidenceSchedule(settings)
    profile = None
    if settings.schedule == "throughput":
        profile = required_profile(target, drafter)
    elif settings.schedule is None:
        try:
            profile = stored_profile(target, drafter)
        except ValueError as error:
            logger.warning_once(f"{error} Until then the schedule is fixed.")
    return Schedule(settings) if profile is None else ThroughputSchedule(settings, profile)
