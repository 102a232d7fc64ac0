"""How much of a drafted block is sent through the target."""

from ..models.drafter import Proposal
from .settings import DraftSettings


def verification_length(settings: DraftSettings, proposal: Proposal) -> int:
    """
    Number of leading drafts to verify.

    Whether a draft is verified depends on its confidence, which is known before the draft itself is drawn; anything
    later would bias the output (DSpark paper, losslessness of the schedule).
    """
    drafts = proposal.tokens.shape[1]
    if settings.schedule == "fixed":
        return drafts
    keep = proposal.confidences[0] >= settings.threshold
    return int(keep.long().cumprod(0).sum())
