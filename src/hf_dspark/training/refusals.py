"""Settings of a trainer that the training of a drafter can't honour, refused before work starts."""

from itertools import islice
from typing import Any

from transformers import TrainingArguments

from ..models.drafter import Drafter
from .config import DraftConfig
from .evaluation import held_out_prompts


# What transformers' losses and metrics would take; a drafter has losses of its own, and is judged by decoding.
_THEIR_LOSS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
_BLOCK_LOSS = ("cross_entropy_weight", "l1_weight", "confidence_weight")


def require_draft_config(args: Any) -> None:
    """
    Raises:
        TypeError: If the arguments are transformers' own.
    """
    if not isinstance(args, DraftConfig):
        kind = "TrainingArguments" if isinstance(args, TrainingArguments) else type(args).__name__
        raise TypeError(f"`args` must be a DraftConfig (TrainingArguments and more), not {kind}.")


def refuse_ignored(args: DraftConfig, drafter: Drafter, new_adapters: bool, arguments: dict[str, Any]) -> None:
    """
    Args:
        args ([`DraftConfig`]): The training arguments.
        drafter ([`Drafter`]): What is trained.
        new_adapters (`bool`): Whether adapters are put on it by `peft_config`.
        arguments (`dict`): Further arguments of the trainer.

    Raises:
        ValueError: Naming what would have no effect.
    """
    given = [name for name in _THEIR_LOSS if arguments.get(name) is not None]
    if given:
        raise ValueError(f"Drafters have losses and metrics of their own: leave out `{given[0]}`.")
    if args.label_smoothing_factor:
        raise ValueError("`label_smoothing_factor` has no place in a drafter's losses; leave it out.")
    if args.train_heads and not new_adapters:
        raise ValueError("`train_heads` is for new adapters: pass `peft_config`, or leave it out.")
    if drafter.config.model_type == "eagle3":
        given = [name for name in _BLOCK_LOSS if getattr(args, name)]
        if given:
            raise ValueError(f"EAGLE-3 has one loss, the cross-entropy of every step: leave out `{given[0]}`.")
    elif drafter.confidence_head is None and args.confidence_weight:
        raise ValueError("This drafter has no confidence head to train: leave out `confidence_weight`.")


def require_prompts(args: DraftConfig, sets: dict[str, Any]) -> None:
    """
    Args:
        args ([`DraftConfig`]): The training arguments.
        sets (`dict`): Held-out examples, by name.

    Raises:
        ValueError: If the best checkpoint is to be found by decoding prompts, and a set has none.
    """
    if not args.load_best_model_at_end or not (args.metric_for_best_model or "").endswith("accepted_length"):
        return
    for name, examples in sets.items():
        if not args.eval_prompts or not held_out_prompts(islice(iter(examples), 2 * args.eval_prompts), 1):
            raise ValueError(
                f"The best checkpoint is found by decoding held-out prompts, and {name} has none (all of its examples "
                "is supervised, or `eval_prompts` is 0). Give examples with prompts, or "
                "`metric_for_best_model='loss'`."
            )
