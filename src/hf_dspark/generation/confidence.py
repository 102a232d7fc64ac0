"""What a drafter's confidences are taken for: temperatures fitted on real rounds correct them."""

from collections.abc import Sequence

import torch


def calibrated(confidences: torch.Tensor, temperatures: Sequence[float] | None) -> torch.Tensor:
    """
    Confidences with their temperatures: `σ(logit(c_k) / T_k)` (DSpark paper, sequential temperature scaling).

    Args:
        confidences (`torch.FloatTensor` of shape `(..., drafts)`): A drafter's confidences.
        temperatures (`Sequence[float]`, *optional*): One a draft position, at least `drafts` of them; none by default.

    Returns:
        `torch.FloatTensor` of the same shape, float32 on the CPU.
    """
    confidences = confidences.detach().float().cpu()
    if temperatures is None:
        return confidences
    divisors = torch.tensor(temperatures[: confidences.shape[-1]], dtype=torch.float32)
    return torch.sigmoid(torch.logit(confidences) / divisors)
