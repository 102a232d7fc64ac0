"""How much memory a run will take, reckoned from shapes before anything is loaded."""

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..models.drafter import Drafter
from .config import DraftConfig


# Weights, gradient and AdamW's two moments, in float32.
BYTES_PER_TRAINED = 16
# Draft logits, their softmax, the teacher's distribution and a gradient.
TENSORS_OF_LOGITS = 4
# What a decoder layer keeps for its backward, in widths of its hidden state and of its MLP.
HIDDEN_KEPT, MLP_KEPT = 12, 4


@dataclass
class MemoryEstimate:
    """
    Bytes on each device, part by part.

    Args:
        target (`int`): The target's weights.
        drafter (`int`): The drafter's weights; of what is trained also gradients and optimizer states.
        features (`int`): What a step takes from the target.
        activations (`int`): What the draft layers keep for their backward.
        logits (`int`): One chunk of logits over both vocabularies.
    """

    target: int
    drafter: int
    features: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.target + self.drafter + self.features + self.activations + self.logits


def estimate_memory(
    target: PreTrainedModel, drafter: Drafter, args: DraftConfig, longest: int, num_processes: int = 1
) -> MemoryEstimate:
    """
    Reckons from shapes; models may be on the meta device. A rough figure: attention's and the target's own scratch
    memory are not in it.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`Drafter`]): The drafter, with its adapters if it has any.
        args ([`DraftConfig`]): The training arguments.
        longest (`int`): Longest sequence of the data, in tokens.
        num_processes (`int`, *optional*, defaults to 1): Over which `shard_target` divides the target.
    """
    config, text = drafter.config, drafter.config.text_config
    size = lambda model: sum(p.numel() * p.element_size() for p in model.parameters())  # noqa: E731
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in drafter.parameters() if not p.requires_grad)
    positions = args.per_device_train_batch_size * min(longest, args.max_length)
    width = config.target_hidden_size
    target_bytes = torch.empty(0, dtype=target.dtype).element_size()
    per_row = (HIDDEN_KEPT * config.hidden_size + MLP_KEPT * text.intermediate_size) * (2 if args.bf16 else 4)
    if config.model_type == "eagle3":
        rows = positions * config.num_drafts
    else:
        anchors = min(args.num_anchors, args.max_length)
        rows = args.per_device_train_batch_size * anchors * config.block_size
    return MemoryEstimate(
        target=size(target) // (num_processes if args.shard_target else 1),
        drafter=trained * BYTES_PER_TRAINED + 4 * frozen,
        features=positions * width * (config.num_features + 1) * target_bytes,
        activations=rows * per_row * config.num_hidden_layers,
        logits=args.logits_chunk_size * (TENSORS_OF_LOGITS * config.output_size + 2 * config.vocab_size) * 4,
    )


def available_memory() -> int | None:
    """Bytes of the first accelerator, else of the machine; `None` if that can't be told."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
