"""What the losses take the target's distributions to be: its LM head on its last hidden states, and nothing more."""

import torch
from transformers import PreTrainedModel

from ..models.drafter import Drafter


# How far the two may differ, relative to the logits: far above bfloat16's rounding, far below any scaling.
_TOLERANCE = 0.05


@torch.no_grad()
def require_plain_head(drafter: Drafter, target: PreTrainedModel) -> None:
    """
    Checks on a few tokens that the target's logits are what the losses compute them from.

    Raises:
        ValueError: If the target does more to them, such as scaling.
    """
    ids = torch.arange(min(8, drafter.config.vocab_size), device=target.device)[None]
    theirs = target(input_ids=ids, use_cache=False).logits[0].float()
    hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    ours = drafter.teacher_logits(hidden).to(theirs.device).float()
    if (ours - theirs).norm() > _TOLERANCE * theirs.norm():
        raise ValueError(
            f"{type(target).__name__}'s logits are not its LM head applied to its last hidden states (it may scale "
            "them), so a loss would compare drafts with other distributions than the target's. Train a DFlash or "
            "DSpark drafter with the loss that needs none: `cross_entropy_weight=1, l1_weight=0, confidence_weight=0`."
        )
