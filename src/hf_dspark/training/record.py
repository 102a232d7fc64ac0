"""What a training leaves for the model card: arguments, data, loss curve, machine and versions."""

import re
from collections.abc import Sized
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments

from ..machine import processor, versions


if TYPE_CHECKING:
    from ..models.drafter import Drafter
    from .config import DraftConfig
    from .trainer import DraftTrainer


# Of transformers' arguments, those that change what is learned.
ARGUMENTS = (
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "bf16",
    "fp16",
)
FORMS = (
    (("input_ids", "loss_mask"), "the tokens that the data's `loss_mask` marks"),
    (("prompt_ids", "completion_ids"), "the completions; prompts are not"),
    (("messages",), "every assistant turn; other turns are not"),
    (("prompt", "completion"), "the completions; prompts are not"),
    (("text",), "all of the text"),
)
_HUB_DATASET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)[/@]")


class RecordCallback(TrainerCallback):
    """
    Keeps `drafter.training_record` up to date, so that every save of the drafter tells how it was trained.

    Args:
        trainer ([`DraftTrainer`]): The trainer.
        drafter ([`Drafter`]): The drafter that it trains.
        dataset (`datasets.Dataset`): The training data as it was given.
    """

    def __init__(self, trainer: "DraftTrainer", drafter: "Drafter", dataset: Any) -> None:
        self.drafter = drafter
        self.earlier = _earlier(drafter.training_record)
        self.about = {
            "arguments": _arguments(trainer.args, drafter),
            "data": _describe_data(trainer.train_dataset, dataset),
            "machine": _machine(trainer.args),
            "versions": versions(),
        }

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        self.drafter.training_record = {
            "record_version": 1,
            **self.about,
            "updates": state.global_step,
            "epochs": state.epoch,
            "log": state.log_history,
            "earlier": self.earlier,
        }


def _earlier(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Trainings before this one, oldest first."""
    if record is None:
        return []
    return [*record.get("earlier", []), {name: value for name, value in record.items() if name != "earlier"}]


def _arguments(args: "DraftConfig", drafter: "Drafter") -> dict[str, Any]:
    own = {field.name for field in fields(args)} - {field.name for field in fields(TrainingArguments)}
    found = {name: getattr(args, name) for name in (*ARGUMENTS, *sorted(own))}
    found |= {"processes": args.world_size}
    if drafter.config.model_type != "eagle3":
        weights = args.loss_weights(drafter.default_loss)
        found |= {
            "cross_entropy_weight": weights.cross_entropy,
            "l1_weight": weights.l1,
            "confidence_weight": weights.confidence,
        }
    found = {name: getattr(value, "value", value) for name, value in found.items()}
    # Paths are nobody else's business.
    return {name: value for name, value in found.items() if value is not None and not _is_path(value)}


def _is_path(value: Any) -> bool:
    return not isinstance(value, bool | int | float | str) or (isinstance(value, str) and len(Path(value).parts) > 1)


def _describe_data(prepared: Any, given: Any) -> dict[str, Any]:
    """Counts of the data as it was trained on, and of its form and origin what it tells."""
    columns = set(getattr(given, "column_names", None) or (given[0] if isinstance(given, list) and given else ()))
    supervised = next((what for needed, what in FORMS if columns.issuperset(needed)), None)
    found = {"supervised": supervised, "datasets": _hub_datasets(given), "thinking": _thinking(given, columns)}
    if isinstance(prepared, Sized):
        found |= {"examples": len(prepared)} | _count_tokens(prepared)
    return found


def _count_tokens(dataset: Any) -> dict[str, int]:
    import pyarrow.compute as pc

    tokens = supervised = longest = 0
    for batch in dataset.with_format("arrow").iter(1000):
        tokens += pc.sum(pc.list_value_length(batch["input_ids"])).as_py()
        longest = max(longest, pc.max(pc.list_value_length(batch["input_ids"])).as_py())
        supervised += pc.sum(pc.list_flatten(batch["loss_mask"])).as_py()
    return {"tokens": tokens, "supervised_tokens": supervised, "longest": longest}


def _hub_datasets(dataset: Any) -> list[str]:
    """Hub datasets that the data was loaded from, as far as `datasets` remembers."""
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    return sorted({found[1] for source in sources if (found := _HUB_DATASET.match(source))})


def _thinking(dataset: Any, columns: set[str]) -> bool | str | None:
    """Whether the chat template's thinking mode was on, where the examples say so."""
    if "chat_template_kwargs" not in columns or not isinstance(dataset, Sized):
        return None
    examples = dataset if isinstance(dataset, list) else dataset.select_columns(["chat_template_kwargs"])
    asked = {(example["chat_template_kwargs"] or {}).get("enable_thinking") for example in examples}
    return asked.pop() if len(asked) == 1 else "mixed"


def _machine(args: TrainingArguments) -> dict[str, Any]:
    return {"device": args.device.type, "device_name": processor(args.device), "processes": args.world_size}
