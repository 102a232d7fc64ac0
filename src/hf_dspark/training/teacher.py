"""What the losses take the target's distributions to be: its LM head on its last hidden states, and nothing more."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.drafter import Drafter


logger = logging.get_logger(__name__)

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


def require_known_tokens(dataset: Any, vocab_size: int) -> None:
    """
    Raises:
        ValueError: If an example holds a token that the target doesn't have.
    """
    for i, ids in enumerate(dataset["input_ids"]):
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"Example {i} holds token {max(ids) if max(ids) >= vocab_size else min(ids)}, and the target's "
                f"vocabulary has {vocab_size}: it was tokenised for another model. Give its text instead, or the "
                "tokens of this target's tokenizer."
            )


def require_positions(dataset: Any, target: PreTrainedConfig) -> None:
    """
    Warns of examples that are longer than the target was made for; where it embeds positions, they can't be read.

    Args:
        dataset (`datasets.Dataset`): Examples with `input_ids`.
        target (`PreTrainedConfig`): The target's text config.

    Raises:
        ValueError: If the target has no embedding for an example's last position.
    """
    rope, most = getattr(target, "rope_parameters", None), getattr(target, "max_position_embeddings", None)
    longest = max(map(len, dataset["input_ids"]))
    # Scaled rotary embeddings reach further than the number says.
    if most is None or longest <= most or (rope and rope.get("rope_type", "default") != "default"):
        return
    told = (
        f"The longest example has {longest} tokens, and the target was made for {most}: `max_length={most}` cuts it."
    )
    if not rope:
        raise ValueError(told)
    logger.warning("%s Beyond them its features may mean little.", told)
