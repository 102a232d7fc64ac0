"""`DraftTrainer`: trains a drafter against its frozen target, whose features are computed in the same step."""

from collections import defaultdict
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.utils import logging

from ..generation.features import concatenate_features, hidden_state_indices
from ..models.blocks import block_supervision
from ..models.drafter import Drafter
from .config import DraftConfig
from .data import DraftCollator, prepare_dataset
from .feature_store import FeatureStore


logger = logging.get_logger(__name__)


class _EpochCallback(TrainerCallback):
    """Tells the collator the epoch, so that every epoch draws new anchors, also after a resume."""

    def __init__(self, collator: DraftCollator) -> None:
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.collator.epoch = int((state.epoch or 0) + 1e-6)


class DraftTrainer(Trainer):
    """
    Trains a drafter for a target, on transformers' [`~transformers.Trainer`].

    The target stays frozen; its features are computed in the training step and nothing is written to disk but
    checkpoints, which are complete drafters.

    Args:
        model ([`Drafter`]): The drafter, from `from_target` or `from_pretrained`. Its parameters are trained in
            float32.
        target_model (`PreTrainedModel` or `str`): The target, or its Hub id or folder.
        args ([`DraftConfig`], *optional*): Training arguments.
        train_dataset (`datasets.Dataset`): Examples with `messages`, or `prompt` and `completion`, or tokens (see
            `training.data.tokenize_example`). Best written by the target itself.
        eval_dataset (`datasets.Dataset`, *optional*): Held-out examples.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; needed for text.
        **kwargs: Further arguments of [`~transformers.Trainer`].

    Raises:
        TypeError: If `model` is no drafter, or the target none that can have one.
        ValueError: If drafter and target don't belong together, or nothing in the data is supervised.

    Example:

    ```python
    >>> from hf_dspark import DraftConfig, DraftTrainer, DSparkDrafter

    >>> drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer)  # doctest: +SKIP
    >>> trainer = DraftTrainer(  # doctest: +SKIP
    ...     model=drafter,
    ...     target_model=target,
    ...     args=DraftConfig(output_dir="my-drafter"),
    ...     train_dataset=dataset,
    ...     processing_class=tokenizer,
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    def __init__(
        self,
        model: Drafter,
        target_model: PreTrainedModel | str,
        args: DraftConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, Drafter):
            raise TypeError(
                f"`model` must be the drafter to train, not a {type(model).__name__}. Make one with "
                "`DSparkDrafter.from_target(target)`; the model that it drafts for is `target_model`."
            )
        args = DraftConfig(output_dir=f"{model.config.model_type}-drafter") if args is None else args
        if isinstance(target_model, str):
            target_model = AutoModelForCausalLM.from_pretrained(target_model)
        self.target_model = target_model.eval().requires_grad_(False).to(args.device)
        model = model.to(args.device)
        if model.dtype != torch.float32:
            # AdamW's small steps vanish in bfloat16; autocast gives its speed without that.
            logger.warning("Training in float32 parameters; the drafter was loaded in %s.", model.dtype)
            model = model.float()
        model.attach(self.target_model)
        freeze_borrowed(model)
        if args.dataloader_persistent_workers:
            raise ValueError("`dataloader_persistent_workers` would draw the same anchors every epoch; turn it off.")
        collator = kwargs.pop("data_collator", None) or DraftCollator(
            pad_token_id=(processing_class.pad_token_id if processing_class is not None else None) or 0,
            num_anchors=args.num_anchors,
            seed=args.data_seed if args.data_seed is not None else args.seed,
        )
        self.feature_store = None
        if args.feature_store:
            self.feature_store = FeatureStore(args.feature_store, self.target_model, model.config.target_layer_ids)
        self._terms = {"train": defaultdict(list), "eval": defaultdict(list)}
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=prepare_dataset(train_dataset, processing_class, args.max_length),
            eval_dataset=prepare_dataset(eval_dataset, processing_class, args.max_length),
            processing_class=processing_class,
            **kwargs,
        )
        evaluated = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        sized = [data for data in (self.train_dataset, *evaluated) if hasattr(data, "__len__")]
        if self.feature_store is not None:
            self.feature_store.check_disk(ids for data in sized for ids in data["input_ids"])
        if hasattr(self.train_dataset, "__len__"):
            longest = max(map(len, self.train_dataset["input_ids"]))
            model.config.max_trained_length = max(longest, model.config.max_trained_length or 0)
        # compute_loss divides by the weights of the whole accumulated batch.
        self.loss_is_scaled_for_ga = True
        self.add_callback(_EpochCallback(collator))

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "loss_mask"]

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        """The sum of all loss weights of the accumulated batch, on all processes."""
        total = torch.stack([self._total_weight(batch) for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    def _total_weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        config = self.accelerator.unwrap_model(self.model).config
        if config.model_type == "eagle3":
            return (batch["loss_mask"][:, :-1] * batch["attention_mask"][:, 1:]).sum().float()
        inputs = (batch[k] for k in ("input_ids", "loss_mask", "anchors", "anchor_mask"))
        return block_supervision(*inputs, config.num_drafts, self.args.loss_decay)[2].sum()

    @torch.no_grad()
    def target_states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, target_layer_ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The frozen target's features `(batch, length, layers * hidden_size)` and last hidden states `(batch, length,
        hidden_size)` for right-padded sequences.
        """
        store = self.feature_store
        sequences = [ids[: int(n)] for ids, n in zip(input_ids, attention_mask.sum(-1))] if store else []
        stored = store.load(sequences) if store else None
        if stored is not None:
            return tuple(states.to(input_ids.device) for states in stored)
        # Padding is on the right and attention causal: no mask is needed.
        outputs = self.target_model.base_model(
            input_ids=input_ids, output_hidden_states=hidden_state_indices(target_layer_ids), use_cache=False
        )
        features = concatenate_features(outputs.hidden_states, target_layer_ids)
        last_hidden = outputs.last_hidden_state
        if store:
            # As they will be read back: a step must not depend on what is on disk already.
            features, last_hidden = features.to(torch.bfloat16), last_hidden.to(torch.bfloat16)
            store.save(sequences, features, last_hidden)
        return features, last_hidden

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        drafter = self.accelerator.unwrap_model(model)
        features, last_hidden = self.target_states(
            inputs["input_ids"], inputs["attention_mask"], drafter.config.target_layer_ids
        )
        batch = {
            "input_ids": inputs["input_ids"],
            "target_features": features,
            "target_last_hidden": last_hidden,
            "loss_mask": inputs["loss_mask"],
            "normalizer": num_items_in_batch,
            "chunk_size": self.args.logits_chunk_size,
        }
        if drafter.config.model_type == "eagle3":
            batch["attention_mask"] = inputs["attention_mask"]
        else:
            batch["anchors"], batch["anchor_mask"] = inputs["anchors"], inputs["anchor_mask"]
            batch["loss_weights"] = self.args.loss_weights(drafter.default_loss)
            batch["loss_decay"] = self.args.loss_decay
        outputs = model(**batch)
        for name, value in outputs.terms.items():
            self._terms["train" if model.training else "eval"][name].append(value)
        # DDP averages over processes what is already divided by the sum over all of them.
        loss = outputs.loss * (self.accelerator.num_processes if model.training else 1)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in [`~transformers.Trainer`], with the same anchors every time."""
        epoch, self.data_collator.epoch = self.data_collator.epoch, 0
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.data_collator.epoch = epoch

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=self._total_weight(inputs))
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        prefix = "eval_" if mode == "eval" else ""
        # In training each value is a share of the whole update's, accumulated and over all processes.
        shares = self.args.gradient_accumulation_steps * self.accelerator.num_processes if mode == "train" else 1
        for name, values in self._terms[mode].items():
            if values and values[0].dim() == 0:
                logs[prefix + name] = float(self.accelerator.reduce(torch.stack(values).mean(), "mean")) * shares
        self._terms[mode].clear()
        super().log(logs, start_time)


def freeze_borrowed(drafter: Drafter) -> None:
    """An embedding or LM head of the drafter's own stands in for the target's, which is frozen."""
    for module in (drafter.embed_tokens, drafter.lm_head):
        if module is not None:
            module.requires_grad_(False)
