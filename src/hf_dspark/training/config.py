"""Arguments of a drafter's training."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from ..models.losses import LossWeights


def _bfloat16_is_native() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


@dataclass
class DraftConfig(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with what drafter training adds. Defaults are the DSpark paper's where it
    names one (learning rate 6e-4, 4 % warm-up, 10 epochs, 512 anchors a sequence).

    Args:
        max_length (`int`, *optional*, defaults to 2048): Longest sequence in tokens; longer ones are cut at the end.
        num_anchors (`int`, *optional*, defaults to 512): Blocks trained per sequence (DFlash, DSpark), at most.
        loss_decay (`float`, *optional*, defaults to 4.0): Weight of draft `k` of a block is `exp(-k / loss_decay)`.
        cross_entropy_weight, l1_weight, confidence_weight (`float`, *optional*):
            Mix of the block losses; the paper's for the drafter's kind where not given (DSpark 0.1 / 0.9 / 1.0,
            DFlash 1 / 0 / 0).
        logits_chunk_size (`int`, *optional*, defaults to 512): Draft positions whose logits exist at once.
        feature_store (`str`, *optional*): Folder in which the target's features are kept after the first epoch, so
            that later ones don't run the target; its size is printed first. Off by default.
        bf16 (`bool`, *optional*): bfloat16 autocast over float32 parameters; on where the GPU has it.

    Example:

    ```python
    >>> from hf_dspark import DraftConfig

    >>> args = DraftConfig(output_dir="my-drafter", per_device_train_batch_size=8, num_anchors=128)
    >>> args.learning_rate
    0.0006
    ```
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "The initial learning rate for AdamW."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Total number of training epochs."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps, or their share if below 1."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "The learning rate schedule."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Maximum gradient norm."})
    logging_steps: float = field(default=10, metadata={"help": "Log every this many updates, or share if below 1."})
    bf16: bool | None = field(default=None, metadata={"help": "bfloat16 autocast; on where the GPU has it."})
    max_length: int = field(default=2048, metadata={"help": "Longest sequence in tokens; longer ones are cut."})
    num_anchors: int = field(default=512, metadata={"help": "Most blocks trained per sequence."})
    loss_decay: float = field(default=4.0, metadata={"help": "Decay, in tokens, of a draft's weight in its block."})
    cross_entropy_weight: float | None = field(default=None, metadata={"help": "Weight of the cross-entropy."})
    l1_weight: float | None = field(default=None, metadata={"help": "Weight of the L1 distance to the target."})
    confidence_weight: float | None = field(default=None, metadata={"help": "Weight of the confidence loss."})
    logits_chunk_size: int = field(default=512, metadata={"help": "Draft positions whose logits exist at once."})
    feature_store: str | None = field(default=None, metadata={"help": "Folder that keeps features between epochs."})

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _bfloat16_is_native()
        if self.num_anchors < 1 or self.max_length < 2 or self.logits_chunk_size < 1:
            raise ValueError("`num_anchors` and `logits_chunk_size` must be at least 1, `max_length` at least 2.")
        super().__post_init__()

    def loss_weights(self, default: LossWeights) -> LossWeights:
        """The mix of the block losses: what was given, else the drafter's `default`."""
        return LossWeights(
            default.cross_entropy if self.cross_entropy_weight is None else self.cross_entropy_weight,
            default.l1 if self.l1_weight is None else self.l1_weight,
            default.confidence if self.confidence_weight is None else self.confidence_weight,
        )
