"""What a training leaves for the model card: arguments, data, loss curve, machine and versions."""

import re
from collections.abc import Sized
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments

from ..machine import processor, versions
from ..models.adapter_records import RECORD_VERSION, describe_adapters
from ..models.loading import earlier_trainings
from .resuming import run_identity


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
        weights (`dict[str, str | None]`): Fingerprints of the `target`, and of the `base` that new adapters sit on.
    """

    def __init__(
        self, trainer: "DraftTrainer", drafter: "Drafter", dataset: Any, weights: dict[str, str | None]
    ) -> None:
        self.drafter = drafter
        self.base_record = drafter.training_record
        self.adapters = drafter.active_adapters() if drafter.has_adapters else []
        self.about = {
            "record_version": RECORD_VERSION,
            "run": run_identity(drafter, trainer.train_dataset, weights),
            "adapters": _adapters(drafter),
            "arguments": _arguments(trainer.args, drafter),
            "data": _describe_data(trainer.train_dataset, dataset),
            "machine": _machine(trainer.args),
            "versions": versions(),
        }

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        record = {
            **self.about,
            "updates": state.global_step,
            "epochs": state.epoch,
            "log": state.log_history,
            "earlier": earlier_trainings(self.base_record),
        }
        self.drafter.training_record = record
        if self.adapters:
            self.drafter.adapter_records = {None: self.base_record, **dict.fromkeys(self.adapters, record)}

    on_log = on_step_end


def _adapters(drafter: "Drafter") -> dict[str, Any] | None:
    """What the trained adapters are and which drafter they sit on; `None` where all of the drafter is trained."""
    if not drafter.has_adapters:
        return None
    config = drafter.peft_config[drafter.active_adapters()[0]]
    return describe_adapters(config, config.base_model_name_or_path)


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
