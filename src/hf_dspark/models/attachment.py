"""What ties a drafter to its target: whether they belong together, and the parts that are borrowed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .configuration_drafter import DrafterConfig


if TYPE_CHECKING:
    from .drafter import Drafter

logger = logging.get_logger(__name__)


@dataclass
class TargetParts:
    """What a drafter uses of its target, by reference; of the head, a reduced vocabulary's rows are copied once."""

    embedding: nn.Module
    head: nn.Module
    softcapping: float | None = None
    draft_head: nn.Linear | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @property
    def head_weight(self) -> torch.Tensor:
        weight = plain_weight(self.head)
        if weight is None:
            raise ValueError(
                f"The target's LM head is quantised ({type(self.head).__name__}), so it serves for drafting over the "
                "whole vocabulary only. For anything else load the target without quantising its LM head."
            )
        return weight.detach()

    @property
    def head_bias(self) -> torch.Tensor | None:
        bias = getattr(self.head, "bias", None)
        return None if bias is None else bias.detach()

    def head_of(self, token_ids: torch.Tensor, device: torch.device, dtype: torch.dtype) -> nn.Linear:
        """A head over some tokens alone: a copy of their rows."""
        # Training can't use tensors that were made in inference mode, and may follow a call that was in it.
        with torch.inference_mode(False):
            rows, bias = (
                None if part is None else nn.Parameter(part[token_ids.to(part.device)].to(device, dtype), False)
                for part in (self.head_weight, self.head_bias)
            )
            head = nn.Linear(*rows.shape[::-1], bias=bias is not None, device="meta")
            head.weight, head.bias = rows, bias
        return head

    def serves(self, head: nn.Module, drafter: "Drafter") -> bool:
        """Whether these are a target's parts, in the drafter's place and type as it is now."""
        rows = self.draft_head
        if rows is None:
            return self.head is head
        return self.head is head and (rows.weight.device, rows.weight.dtype) == (drafter.device, drafter.dtype)


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """A layer's weight, if it is one that can be read: `None` for packed, quantised ones."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def soft_cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Bends logits so that none passes the cap, if there is one."""
    return torch.tanh(logits / cap) * cap if cap else logits


def check_belongs(config: DrafterConfig, target: PreTrainedModel) -> None:
    """
    Checks that a drafter and a target belong together, before any forward.

    Raises:
        TypeError: If the target is no causal language model.
        ValueError: Naming what differs.
    """
    if isinstance(getattr(target, "config", None), DrafterConfig):
        raise TypeError("The target is itself a drafter. Pass the full model as target, the drafter as assistant.")
    if getattr(target.config, "is_encoder_decoder", False) or target.get_output_embeddings() is None:
        raise TypeError(
            f"{type(target).__name__} is no decoder-only language model with an LM head; drafters need one."
        )
    text = target.config.get_text_config()
    for what, ours, theirs in (
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("vocabulary size", config.vocab_size or None, text.vocab_size),
        ("number of layers", config.num_target_layers, text.num_hidden_layers),
    ):
        if ours is not None and ours != theirs:
            made_for = f" (made for {config.target_name_or_path})" if config.target_name_or_path else ""
            raise ValueError(
                f"Drafter and target don't belong together: the drafter{made_for} expects a target with {what} "
                f"{ours}, this one has {theirs}. Use the target that the drafter was trained for."
            )
    width = getattr(plain_weight(target.get_input_embeddings()), "shape", (text.hidden_size,))[-1]
    if width != text.hidden_size and not config.own_embedding:
        raise ValueError(
            f"The target embeds tokens in a width of {width} and its layers have {text.hidden_size}: a drafter can't "
            "borrow such an embedding, and this one has none of its own."
        )
    # Borrowed embeddings enter the draft directly.
    if config.hidden_size != text.hidden_size and not (config.own_embedding and config.own_head):
        raise ValueError(
            f"The drafter's hidden size {config.hidden_size} differs from the target's {text.hidden_size}, so it "
            "can't borrow the target's embedding and LM head, and it has none of its own."
        )


def warn_about_types(drafter: "Drafter", target: PreTrainedModel) -> None:
    """Different types work, cast at the boundary; some are a bad idea."""
    if torch.float16 in (drafter.dtype, target.dtype):
        logger.warning_once(
            "float16 overflows on the hidden states of some targets, and then few drafts are accepted. bfloat16 or "
            "float32 are safer."
        )
    if drafter.dtype != target.dtype:
        logger.warning_once(
            f"The drafter is in {drafter.dtype}, its target in {target.dtype}; features are cast between them."
        )
