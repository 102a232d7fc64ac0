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
        feature_store (`str`, *optional*): Folder that keeps the target's features, so that the target runs once over
            the data and not in every epoch; its size is printed and the disk checked first. Off by default.
        eval_prompts (`int`, *optional*, defaults to 32): Held-out examples whose answers are decoded at every
            evaluation (`eval_accepted_length` and its kin); 0 computes the loss alone.
        eval_max_new_tokens (`int`, *optional*, defaults to 128): Longest of those answers.
        eval_temperature (`float`, *optional*, defaults to 0.0): Their sampling temperature; 0 is greedy.
        train_heads (`bool`, *optional*, defaults to `False`): With adapters, whether `fc`, norms, serial and
            confidence heads are trained whole beside them.
        shard_target (`bool`, *optional*, defaults to `False`): Divides the frozen target's layers over the processes
            (torch's fully sharded data parallel), for targets that one device can't hold.
        metric_for_best_model (`str`, *optional*): `"accepted_length"` with `load_best_model_at_end`, unless
            `eval_prompts` is 0.
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

    eval_prompts: int = field(default=32, metadata={"help": "Held-out examples decoded at every evaluation."})
    eval_max_new_tokens: int = field(default=128, metadata={"help": "Longest answer decoded in an evaluation."})
    eval_temperature: float = field(default=0.0, metadata={"help": "Temperature of those answers; 0 is greedy."})
    train_heads: bool = field(default=False, metadata={"help": "With adapters: train the heads whole beside them."})

    shard_target: bool = field(default=False, metadata={"help": "Divide the target's layers over the processes."})

    def __post_init__(self) -> None:
        if self.load_best_model_at_end and self.metric_for_best_model is None and self.eval_prompts:
            self.metric_for_best_model = "accepted_length"
        # Pinned memory is for copies to an accelerator; torch warns of it where there is none.
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _bfloat16_is_native()
        if self.num_anchors < 1 or self.max_length < 2 or self.logits_chunk_size < 1:
            raise ValueError("`num_anchors` and `logits_chunk_size` must be at least 1, `max_length` at least 2.")
        if self.eval_prompts < 0 or self.eval_max_new_tokens < 1 or self.eval_temperature < 0:
            raise ValueError("`eval_prompts` and `eval_temperature` can't be negative, nor `eval_max_new_tokens` 0.")
        weights = (self.cross_entropy_weight, self.l1_weight, self.confidence_weight)
        if self.loss_decay <= 0 or any(weight is not None and weight < 0 for weight in weights):
            raise ValueError("`loss_decay` must be above 0, and no weight of a loss may be negative.")
        super().__post_init__()

    def loss_weights(self, default: LossWeights) -> LossWeights:
        """The mix of the block losses: what was given, else the drafter's `default`."""
        return LossWeights(
            default.cross_entropy if self.cross_entropy_weight is None else self.cross_entropy_weight,
            default.l1 if self.l1_weight is None else self.l1_weight,
            default.confidence if self.confidence_weight is None else self.confidence_weight,
        )
