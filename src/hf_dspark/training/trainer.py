"""`DraftTrainer`: trains a drafter against its frozen target, whose features are computed in the same step."""

from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from ..generation.features import concatenate_features, hidden_state_indices
from ..models.adapters import underlying_drafter
from ..models.blocks import block_supervision
from ..models.drafter import Drafter
from ..models.fingerprint import weights_fingerprint
from ..models.loading import save_training_record
from .adapters import add_adapters, leave_out_card, refuse_loaded_adapters
from .checkpoints import last_complete_checkpoint, saving_whole
from .config import DraftConfig
from .data import DraftCollator, prepare_dataset, require_known_tokens, require_positions
from .evaluation import decode_prompts, decoding_metrics, held_out_prompts
from .feature_store import FeatureStore, amount
from .finite import require_finite_gradients, require_finite_loss
from .record import RecordCallback
from .refusals import refuse_ignored, require_draft_config, require_prompts
from .resuming import refuse_overwriting, require_optimizer, require_same_run
from .sampling import GroupedByLength
from .teacher import require_plain_head


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

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
    checkpoints, which are complete drafters (or adapters, with `peft_config`). A step that meets NaN ends the run with
    an error that names the tensor.

    Args:
        model ([`Drafter`] or `PeftModel`): The drafter, from `from_target` or `from_pretrained`, or trainable adapters
            around one. Its parameters are trained in float32.
        target_model (`PreTrainedModel` or `str`): The target, or its Hub id or folder.
        args ([`DraftConfig`], *optional*): Training arguments.
        train_dataset (`datasets.Dataset`): Examples with `messages`, or `prompt` and `completion`, or tokens (see
            `training.data.tokenize_example`). Best written by the target itself.
        eval_dataset (`datasets.Dataset`, *optional*): Held-out examples, or a `dict` of several such sets. The prompts
            of the first `args.eval_prompts` are really decoded at every evaluation, see `decode_held_out`.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; needed for text.
        peft_config (`peft.PeftConfig`, *optional*): Trains adapters on a loaded drafter instead of all of it, by
            default on every linear of its layers. Checkpoints are then adapters, which
            `AutoDrafter.from_pretrained` and `drafter.load_adapter` take.
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
        model: "Drafter | PeftModel",
        target_model: PreTrainedModel | str,
        args: DraftConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: "PeftConfig | None" = None,
        **kwargs: Any,
    ) -> None:
        drafter = underlying_drafter(model)
        if drafter is None:
            raise TypeError(
                f"`model` must be the drafter to train, not a {type(model).__name__}. Make one with "
                "`DSparkDrafter.from_target(target)`; the model that it drafts for is `target_model`."
            )
        refuse_loaded_adapters(model, drafter)
        args = DraftConfig(output_dir=f"{drafter.config.model_type}-drafter") if args is None else args
        require_draft_config(args)
        refuse_ignored(args, drafter, peft_config is not None, kwargs)
        if isinstance(target_model, str):
            target_model = AutoModelForCausalLM.from_pretrained(target_model)
        self.target_model = target_model.eval().requires_grad_(False)
        weights = {"target": weights_fingerprint(self.target_model.base_model), "base": None}
        if args.shard_target:
            shard_layers(self.target_model, args)
        self.target_model.to(args.device)
        drafter.to(args.device)
        if drafter.dtype != torch.float32:
            # AdamW's small steps vanish in bfloat16; autocast gives its speed without that.
            logger.warning("Training in float32 parameters; the drafter was loaded in %s.", drafter.dtype)
            drafter.float()
        drafter.attach(self.target_model)
        needs_teacher = drafter.config.model_type == "eagle3" or args.loss_weights(drafter.default_loss).needs_teacher
        # A sharded target has to meet its first forward in training.
        if needs_teacher and not args.shard_target:
            require_plain_head(drafter, self.target_model)
        freeze_borrowed(drafter)
        if peft_config is not None:
            if model is not drafter:
                raise ValueError("The drafter is wrapped in adapters already: leave out `peft_config`.")
            set_seed(args.seed)  # a resumed run begins as the first did
            weights["base"] = weights_fingerprint(drafter)
            model = add_adapters(drafter, peft_config, args.train_heads)
        if model is not drafter:
            leave_out_card(model)
        if args.dataloader_persistent_workers:
            raise ValueError("`dataloader_persistent_workers` would draw the same anchors every epoch; turn it off.")
        collator = kwargs.pop("data_collator", None) or DraftCollator(
            pad_token_id=(processing_class.pad_token_id if processing_class is not None else None) or 0,
            num_anchors=args.num_anchors,
            seed=args.data_seed if args.data_seed is not None else args.seed,
        )
        self._terms = defaultdict(list)  # of the updates since the last log
        self._evaluated = defaultdict(float)  # of the evaluation that is on: sums over all supervised tokens
        self._updates_since_log = 0
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            train_dataset=prepare_dataset(train_dataset, processing_class, args.max_length),
            eval_dataset=prepare_dataset(eval_dataset, processing_class, args.max_length),
            processing_class=processing_class,
            **kwargs,
        )
        evaluated = _sets(self.eval_dataset)
        require_prompts(args, evaluated)
        self.feature_store = None
        if args.feature_store:
            if args.shard_target:
                raise ValueError(
                    "`feature_store` is filled by each process at its own pace, and `shard_target` needs all in step. "
                    "Leave one of them out."
                )
            self.feature_store = self._open_feature_store([self.train_dataset, *evaluated.values()])
        for data in (self.train_dataset, *evaluated.values()):
            if hasattr(data, "__len__"):
                require_known_tokens(data, drafter.config.vocab_size)
                require_positions(data, self.target_model.config.get_text_config())
        if hasattr(self.train_dataset, "__len__"):
            longest = max(map(len, self.train_dataset["input_ids"]))
            drafter.config.max_trained_length = max(longest, drafter.config.max_trained_length or 0)
        # compute_loss divides by the weights of the whole accumulated batch.
        self.loss_is_scaled_for_ga = True
        self.add_callback(_EpochCallback(collator))
        self._recorder = RecordCallback(self, drafter, train_dataset, weights)
        self.add_callback(self._recorder)

    @property
    def drafter(self) -> Drafter:
        """The drafter that is trained, adapters in place."""
        return underlying_drafter(self.accelerator.unwrap_model(self.model))

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, **kwargs: Any) -> Any:
        """
        As in [`~transformers.Trainer`]; `True` resumes from the last checkpoint that was written to its end.

        Raises:
            ValueError: If there is none, or it is of another run; or if a new run would write over one that is there.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir, self.args.should_save)
            if resume_from_checkpoint is None:
                raise ValueError(f"{self.args.output_dir} holds no complete checkpoint to resume from; start afresh.")
        if resume_from_checkpoint:
            require_optimizer(resume_from_checkpoint)
            require_same_run(resume_from_checkpoint, self._recorder.about)
        goes_on_here = resume_from_checkpoint and _is_in(resume_from_checkpoint, self.args.output_dir)
        if self.args.save_strategy != "no" and not goes_on_here:
            refuse_overwriting(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        with saving_whole(self._get_output_dir(trial), self.state.global_step):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        # A whole drafter saves its record itself; of adapters peft does the saving.
        if self.args.should_save and self.drafter.has_adapters:
            record = self.drafter.adapter_record(self.drafter.active_adapters()[0])
            save_training_record(output_dir or self.args.output_dir, record)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)
        self._updates_since_log += self.accelerator.sync_gradients
        # float16's scaler skips such steps by itself.
        if self.accelerator.sync_gradients and self.accelerator.scaler is None:
            require_finite_gradients(self.drafter, self.state.global_step, self.args.output_dir)
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        return GroupedByLength(sampler.lengths, sampler.batch_size, seed)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "loss_mask"]

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        """The sum of all loss weights of the accumulated batch, on all processes; `None` where a stream has ended."""
        if not batch_samples:
            return None
        total = torch.stack([self._total_weight(batch) for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(total).sum() if self.args.world_size > 1 else total

    def _total_weight(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        config = self.drafter.config
        if config.model_type == "eagle3":
            return (batch["loss_mask"][:, :-1] * batch["attention_mask"][:, 1:]).sum().float()
        inputs = (batch[k] for k in ("input_ids", "loss_mask", "anchors", "anchor_mask"))
        return block_supervision(*inputs, config.num_drafts, self.args.loss_decay)[2].sum()

    def _open_feature_store(self, datasets: list[Any]) -> FeatureStore:
        datasets = [data for data in datasets if data is not None]
        if not all(hasattr(data, "__len__") for data in datasets):
            raise ValueError("`feature_store` keeps a fixed set of examples; train without it on a streamed dataset.")
        store = FeatureStore(
            self.args.feature_store,
            self.target_model,
            self.drafter.config.target_layer_ids,
            (example for data in datasets for example in data),
            self.processing_class,
        )
        store.check_disk()
        return store

    def _fill_feature_store(self, target_layer_ids: list[int]) -> None:
        store = self.feature_store
        if self.accelerator.is_main_process:
            store.prepare()
        self.accelerator.wait_for_everyone()
        store.fill(
            lambda ids, mask: self.target_states(ids.to(self.args.device), mask, target_layer_ids),
            self.args.per_device_train_batch_size,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            progress=self.accelerator.is_main_process and not self.args.disable_tqdm,
        )
        self.accelerator.wait_for_everyone()
        store.refresh()
        logger.warning("Feature store %s: %s on disk.", store.folder, amount(store.bytes_on_disk()))

    @torch.no_grad()
    def target_states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, target_layer_ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The frozen target's features `(batch, length, layers * hidden_size)` and last hidden states `(batch, length,
        hidden_size)` for right-padded sequences.
        """
        # Padding is on the right and attention causal: no mask is needed.
        outputs = self.target_model.base_model(
            input_ids=input_ids, output_hidden_states=hidden_state_indices(target_layer_ids), use_cache=False
        )
        return concatenate_features(outputs.hidden_states, target_layer_ids), outputs.last_hidden_state

    def _states_of(
        self, inputs: dict[str, torch.Tensor], target_layer_ids: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`target_states`], from the feature store where there is one."""
        if self.feature_store is None:
            return self.target_states(inputs["input_ids"], inputs["attention_mask"], target_layer_ids)
        if not self.feature_store.is_full:
            self._fill_feature_store(target_layer_ids)
        lengths = inputs["attention_mask"].sum(-1).tolist()
        rows = ([row[:n] for row, n in zip(inputs[name], lengths)] for name in ("input_ids", "loss_mask"))
        return tuple(states.to(inputs["input_ids"].device) for states in self.feature_store.load(*rows))

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        drafter = self.drafter
        features, last_hidden = self._states_of(inputs, drafter.config.target_layer_ids)
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
        if model.training:
            states = {"the target's features": features, "the target's last hidden states": last_hidden}
            require_finite_loss(outputs, states, self.state.global_step, self.args.output_dir)
            for name, value in outputs.terms.items():
                self._terms[name].append(value)
        # DDP averages over processes what is already divided by the sum over all of them.
        loss = outputs.loss * (self.accelerator.num_processes if model.training else 1)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """
        As in [`~transformers.Trainer`], with the same anchors every time. Of several sets (a `dict`) it also gives the
        mean `eval_accepted_length`, by which the best checkpoint is then chosen.
        """
        sets = self.eval_dataset if eval_dataset is None else eval_dataset
        epoch, self.data_collator.epoch = self.data_collator.epoch, 0
        try:
            metrics = super().evaluate(eval_dataset, *args, **kwargs)
        finally:
            self.data_collator.epoch = epoch
        lengths = [metrics.get(f"eval_{name}_accepted_length") for name in sets] if isinstance(sets, dict) else []
        if lengths and None not in lengths:
            mean = {"eval_accepted_length": sum(lengths) / len(lengths)}
            self.log(mean)
            metrics |= mean
            # The sets' own evaluations have told callbacks of theirs; early stopping waits for this.
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_loop(self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """
        As in [`~transformers.Trainer`], with the metrics of decoding held-out prompts. Losses are means over all
        supervised tokens, where transformers' are over batches, long and short alike.
        """
        self._evaluated.clear()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        found = self._evaluation_terms() | self.decode_held_out(dataloader.dataset)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def _evaluation_terms(self) -> dict[str, float]:
        sums = {name: float(self.accelerator.reduce(total, "sum")) for name, total in self._evaluated.items()}
        weight = sums.pop("weight", 0.0)
        return {name: total / weight for name, total in sums.items() if weight}

    def decode_held_out(self, dataset: Any) -> dict[str, float]:
        """
        Decodes the prompts of the first `args.eval_prompts` examples with the drafter as it is, shared among the
        processes. See [`~hf_dspark.training.evaluation.decoding_metrics`] for what it returns.
        """
        args = self.args
        # A few more, for examples without a prompt.
        prompts = held_out_prompts(islice(iter(dataset), 2 * args.eval_prompts), args.eval_prompts)
        if not prompts:
            return {}
        # A sharded target takes every forward in step with the other processes.
        mine = prompts if args.shard_target else prompts[args.process_index :: args.world_size]
        runs = decode_prompts(
            self.target_model, self.drafter, mine, args.eval_max_new_tokens, args.eval_temperature, args.seed
        )
        if args.world_size > 1 and not args.shard_target:
            runs = gather_object(runs)
        return decoding_metrics(runs)

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        weight = self._total_weight(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=weight)
        terms = {name: value for name, value in outputs.terms.items() if value.dim() == 0}
        for name, value in (("weight", torch.ones_like(weight)), ("loss", loss), *terms.items()):
            self._evaluated[name] = self._evaluated[name] + value.detach() * weight
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self._training_terms()
        super().log(logs, start_time)

    def _training_terms(self) -> dict[str, float]:
        """Each value is a share of its update's, to which all micro-batches and processes add."""
        shares = self.accelerator.num_processes / max(self._updates_since_log, 1)
        self._updates_since_log = 0
        terms, self._terms = self._terms, defaultdict(list)
        return {
            name: float(self.accelerator.reduce(torch.stack(values).sum() * shares, "mean"))
            for name, values in terms.items()
            if values[0].dim() == 0
        }

    def create_model_card(
        self,
        model_name: str | None = None,
        language: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        **facts: Any,
    ) -> None:
        """
        Writes the drafter's card and `custom_generate/generate.py` to the output folder; `push_to_hub` calls it. Of
        adapters there is no card before they are merged.
        """
        if self.is_world_process_zero() and not self.drafter.has_adapters:
            from ..hub.publishing import complete_folder

            facts = {"languages": language, "datasets": dataset} | facts
            complete_folder(self.args.output_dir, repo_id=self.hub_model_id, **facts)


def _is_in(checkpoint: str | Path, folder: str | Path) -> bool:
    return Path(checkpoint).resolve().parent == Path(folder).resolve()


def _sets(dataset: Any) -> dict[str, Any]:
    """The sets of held-out examples, by what to call them."""
    if isinstance(dataset, dict):
        return {f"`eval_dataset[{name!r}]`": part for name, part in dataset.items()}
    return {} if dataset is None else {"`eval_dataset`": dataset}


def shard_layers(target: PreTrainedModel, args: DraftConfig) -> None:
    """
    Divides the layers over the processes; embedding, head and norm, which a drafter reads directly, stay whole.

    Raises:
        ValueError: If there is one process only.
    """
    if args.world_size < 2:
        raise ValueError("`shard_target` divides the target over several processes: start with `accelerate launch`.")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(args.device.type, (args.world_size,))
    for layer in target.get_decoder().layers:
        fully_shard(layer, mesh=mesh)


def freeze_borrowed(drafter: Drafter) -> None:
    """An embedding or LM head of the drafter's own stands in for the target's, which is frozen."""
    for module in (drafter.embed_tokens, drafter.lm_head):
        if module is not None:
            module.requires_grad_(False)
