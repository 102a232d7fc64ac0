"""A whole training run from a file of settings: what `hf-dspark train` does, for Python too."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..auto import DRAFTERS, AutoDrafter
from ..models.drafter import Drafter
from ..origins import EMBEDDED
from .adapters import add_adapters
from .checkpoints import last_complete_checkpoint
from .config import DraftConfig
from .data import TOKENS, prepare_dataset
from .memory import MemoryEstimate, estimate_memory
from .resuming import refuse_overwriting
from .sources import load_examples
from .trainer import DraftTrainer


CONFIGS = Path(__file__).parent / "configs"
# Of so many examples at most one is held out, however many were asked for.
HELD_OUT_OF = 5


@dataclass
class TargetArguments:
    """The model that is drafted for."""

    _argument_group_name = "target"

    target: str = field(default=EMBEDDED, metadata={"help": "Folder or Hub id; `embedded` is SmolLM2-135M-Instruct."})
    target_dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata={"help": "Type of its weights; `auto` takes the one they were saved in."}
    )


@dataclass
class DrafterArguments:
    """The drafter: a loaded one to go on with, or a fresh one."""

    _argument_group_name = "drafter"

    drafter: str | None = field(
        default=None,
        metadata={"help": "Go on from this drafter: folder, Hub id (any format we read) or `embedded`."},
    )
    drafter_type: Literal["dspark", "dflash", "eagle3"] = field(
        default="dspark", metadata={"help": "Kind of a fresh drafter. The fields below are of a fresh one too."}
    )
    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers; the paper's, less if it is small."})
    block_size: int = field(default=7, metadata={"help": "Tokens drafted a round."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Target layers it reads."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Draft only over the so many tokens that are commonest in the data."}
    )
    mask_token: str | None = field(default=None, metadata={"help": "A token that text never holds (not EAGLE-3)."})
    markov_head_type: Literal["vanilla", "gated", "rnn"] = field(
        default="vanilla", metadata={"help": "Serial head (DSpark)."}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the serial head (DSpark); 0 leaves it out."})
    enable_confidence_head: bool = field(default=True, metadata={"help": "Confidence head (DSpark)."})
    init_from_target: bool = field(default=True, metadata={"help": "Begin as the target's own last layers."})


@dataclass
class DataArguments:
    """What it learns from: answers that the target wrote, best of all."""

    _argument_group_name = "data"

    train_data: str | None = field(
        default=None, metadata={"help": "A jsonl, json, parquet or csv file, a folder, or a Hub dataset."}
    )
    train_split: str = field(default="train", metadata={"help": "Its split."})
    eval_data: str | None = field(default=None, metadata={"help": "The same for evaluation; else `held_out`."})
    eval_split: str = field(default="test", metadata={"help": "Its split."})
    held_out: int = field(
        default=64,
        metadata={"help": "Without `eval_data`: training examples kept for evaluation, a fifth of them at most."},
    )
    enable_thinking: Literal["as_given", "on", "off"] = field(
        default="as_given", metadata={"help": "What chats say to the template; `as_given` leaves each as it is."}
    )


@dataclass
class LoraArguments:
    """Adapters on a loaded drafter, instead of training all of it."""

    _argument_group_name = "LoRA"

    use_lora: bool = field(default=False, metadata={"help": "Train LoRA adapters on `drafter`."})
    lora_r: int = field(default=16, metadata={"help": "Their rank."})
    lora_alpha: int = field(default=32, metadata={"help": "Their scale."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Their dropout."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules that get one; all linears of the draft layers by default."}
    )


@dataclass
class RunArguments:
    """How the run goes."""

    _argument_group_name = "run"

    dry_run: bool = field(default=False, metadata={"help": "Print model, data and memory, and stop."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last complete checkpoint, if there is one."})
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a longer accepted length."}
    )


ARGUMENTS = (TargetArguments, DrafterArguments, DataArguments, LoraArguments, RunArguments, DraftConfig)


def shipped_configs() -> dict[str, str]:
    """Name and first line of every ready configuration."""
    files = sorted(CONFIGS.glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for file in files}


def config_file(name: str) -> Path:
    """
    The file of a ready configuration's name, or `name` as a path.

    Raises:
        FileNotFoundError: Naming the ready ones.
    """
    for file in (Path(name), CONFIGS / f"{name}.yaml"):
        if file.is_file():
            return file
    raise FileNotFoundError(f"There is no configuration {name}. Ready ones: {', '.join(shipped_configs())}.")


def make_parser(**kwargs: Any) -> Any:
    """TRL's parser of everything that a run can be told."""
    try:
        from trl import TrlParser
    except ImportError as error:
        raise ImportError('Training runs from a file need trl: pip install "hf-dspark[train]"') from error
    return TrlParser(ARGUMENTS, allow_abbrev=False, **kwargs)


def parse_run(arguments: Iterable[str], parser: Any = None) -> "Run":
    """
    A run from flags and `--config`, a file or the name of a ready configuration.

    Raises:
        ValueError: If the file names something that no run can be told.
    """
    arguments = list(arguments)
    if "--config" in arguments and arguments.index("--config") + 1 < len(arguments):
        place = arguments.index("--config") + 1
        arguments[place] = str(config_file(arguments[place]))
    return Run(*(parser or make_parser()).parse_args_and_config(arguments))


def _given(group: Any, leave_out: tuple[str, ...]) -> list[str]:
    """The fields of a group that are not at their default."""
    names = [field.name for field in fields(group) if field.name not in leave_out]
    return [name for name in names if getattr(group, name) != getattr(type(group)(), name)]


@dataclass
class Run:
    """A run as it was asked for. [`Run.prepare`] loads what it needs."""

    target: TargetArguments
    drafter: DrafterArguments
    data: DataArguments
    lora: LoraArguments
    run: RunArguments
    args: DraftConfig

    def check(self) -> None:
        """
        Refuses what does not go together, before anything is loaded.

        Raises:
            ValueError: Naming it.
        """
        if not self.data.train_data:
            raise ValueError("Name the answers to learn from with --train_data (`hf-dspark regenerate` writes some).")
        if self.lora.use_lora and not self.drafter.drafter:
            raise ValueError("LoRA adapts a trained drafter: name it with --drafter.")
        fresh = _given(self.drafter, leave_out=("drafter",))
        if self.drafter.drafter and fresh:
            raise ValueError(f"--{fresh[0]} is for a fresh drafter, and --drafter names one that is there: drop one.")
        adapters = _given(self.lora, leave_out=("use_lora",))
        if adapters and not self.lora.use_lora:
            raise ValueError(f"--{adapters[0]} is for adapters: set --use_lora too, or drop it.")
        if self.args.train_heads and not self.lora.use_lora:
            raise ValueError("--train_heads is for LoRA: without --use_lora all of the drafter is trained anyway.")
        self._check_splits()
        if not self.run.dry_run and not self.checkpoint():
            self._refuse_overwriting()
        decides = self.args.load_best_model_at_end or self.run.early_stopping_patience
        if decides and self.args.eval_strategy == "no":
            raise ValueError("The best checkpoint is found by evaluating: set --eval_strategy steps and --eval_steps.")

    def _check_splits(self) -> None:
        data, default = self.data, DataArguments()
        if data.eval_split != default.eval_split and not data.eval_data:
            raise ValueError("--eval_split is of --eval_data: name that too, or drop it.")
        for name in ("train", "eval"):
            source, split = getattr(data, f"{name}_data"), getattr(data, f"{name}_split")
            if source and Path(source).is_file() and split not in (getattr(default, f"{name}_split"), "train"):
                raise ValueError(f"{source} is a file and has no splits: drop --{name}_split {split}.")

    def checkpoint(self) -> str | bool | None:
        """What the run goes on from, as the trainer takes it."""
        if self.run.resume and last_complete_checkpoint(self.args.output_dir):
            return True
        return self.args.resume_from_checkpoint

    def _refuse_overwriting(self) -> None:
        if self.args.save_strategy != "no":
            refuse_overwriting(self.args.output_dir)
        if self.final.exists():
            raise ValueError(f"{self.final} is the drafter of an earlier run. Give another --output_dir.")

    @property
    def final(self) -> Path:
        """Where the result goes."""
        return Path(self.args.output_dir) / "final"

    def prepare(self) -> "PreparedRun":
        """
        Loads target, drafter and data. For a dry run the target is only a shape, without weights.

        Raises:
            ValueError: As in `check`, and if drafter, target and data don't fit.
        """
        from ..hub.pairs import load_tokenizer, target_folder

        self.check()
        name = target_folder(self.target.target)
        tokenizer = load_tokenizer(name)
        train, evaluation = self._datasets(tokenizer)
        target = _load_target(name, self.target.target_dtype, self.run.dry_run)
        drafter = self._load_drafter() if self.drafter.drafter else self._fresh_drafter(target, tokenizer, train)
        peft_config = None
        if self.lora.use_lora:
            from peft import LoraConfig

            peft_config = LoraConfig(
                r=self.lora.lora_r,
                lora_alpha=self.lora.lora_alpha,
                lora_dropout=self.lora.lora_dropout,
                target_modules=self.lora.lora_target_modules,
            )
        return PreparedRun(self, target, tokenizer, drafter, train, evaluation, peft_config)

    def _datasets(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
        data, length = self.data, self.args.max_length
        train = self._with_thinking(load_examples(data.train_data, data.train_split))
        evaluation = None
        if data.eval_data:
            evaluation = self._with_thinking(load_examples(data.eval_data, data.eval_split))
        elif data.held_out and self.args.eval_strategy != "no":
            count = min(data.held_out, len(train) // HELD_OUT_OF)
            if count < 1:
                prepare_dataset(train, tokenizer, length)  # what is wrong with them comes first
                raise ValueError(
                    f"Too few examples ({len(train)}) to hold a part of them out for evaluation (--held_out "
                    f"{data.held_out}, a fifth at most). Give others with --eval_data, or more examples."
                )
            order = train.shuffle(seed=self.args.seed)
            evaluation, train = order.select(range(count)), order.select(range(count, len(train)))
        evaluation = _by_mode(evaluation)
        return prepare_dataset(train, tokenizer, length), prepare_dataset(evaluation, tokenizer, length)

    def _with_thinking(self, dataset: Any) -> Any:
        if self.data.enable_thinking == "as_given":
            return dataset
        thinking = self.data.enable_thinking == "on"

        def told(example: dict[str, Any]) -> dict[str, Any]:
            kwargs = example.get("chat_template_kwargs") or {}
            if not _is_chat(example) and kwargs.get("enable_thinking") != thinking:
                raise ValueError(
                    f"--enable_thinking {self.data.enable_thinking} is told to the chat template, and an example is "
                    "text or exact tokens, not known to be of that mode. Leave them as they are with "
                    "--enable_thinking as_given, or have them written in it: `hf-dspark regenerate "
                    f"--{'' if thinking else 'no-'}enable-thinking`."
                )
            return {"chat_template_kwargs": kwargs | {"enable_thinking": thinking}}

        return dataset.map(told)

    def _load_drafter(self) -> Drafter:
        from ..hub.pairs import drafter_folder

        return AutoDrafter.from_pretrained(drafter_folder(self.drafter.drafter), dtype=torch.float32)

    def _fresh_drafter(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, train: Any) -> Drafter:
        asked = self.drafter
        fields: dict[str, Any] = {"init_from_target": asked.init_from_target and not self.run.dry_run}
        for name in ("num_hidden_layers", "target_layer_ids"):
            if getattr(asked, name) is not None:
                fields[name] = getattr(asked, name)
        if asked.draft_vocab_size:
            size = target.config.get_text_config().vocab_size
            fields |= {"draft_vocab_size": asked.draft_vocab_size, "token_counts": count_tokens(train, size)}
        if asked.drafter_type == "eagle3":
            fields["num_drafts"] = asked.block_size
        else:
            fields["block_size"] = asked.block_size
            if asked.mask_token is not None:
                if asked.mask_token not in tokenizer.get_vocab():
                    raise ValueError(f"--mask_token {asked.mask_token} is no token of the target's tokenizer.")
                fields["mask_token_id"] = tokenizer.convert_tokens_to_ids(asked.mask_token)
        if asked.drafter_type == "dspark":
            for name in ("markov_head_type", "markov_rank", "enable_confidence_head"):
                fields[name] = getattr(asked, name)
        if self.target.target != EMBEDDED:
            fields["target_name_or_path"] = self.target.target
        torch.manual_seed(self.args.seed)
        return DRAFTERS[asked.drafter_type].from_target(target, tokenizer=tokenizer, **fields)


@dataclass
class PreparedRun:
    """A run whose models and data are there."""

    settings: Run
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    train_dataset: Any
    eval_dataset: Any
    peft_config: Any = None

    def memory(self) -> MemoryEstimate:
        """What each device will have to hold; adapters count once they are on the drafter."""
        longest = max(map(len, self.train_dataset["input_ids"]))
        args = self.settings.args
        return estimate_memory(self.target, self.drafter, args, longest, args.world_size)

    def put_adapters(self) -> None:
        """For a dry run: puts the adapters on, so that parameters and memory are counted with them."""
        if self.peft_config is not None:
            add_adapters(self.drafter, self.peft_config, self.settings.args.train_heads)

    def train(self) -> Path:
        """Trains, saves the result in `output_dir/final`, and returns that folder."""
        settings, args = self.settings, self.settings.args
        callbacks = []
        if settings.run.early_stopping_patience:
            callbacks.append(EarlyStoppingCallback(settings.run.early_stopping_patience))
            if args.metric_for_best_model is None:
                args.metric_for_best_model, args.greater_is_better = "accepted_length", True
        trainer = DraftTrainer(
            model=self.drafter,
            target_model=self.target,
            args=args,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            processing_class=self.tokenizer,
            peft_config=self.peft_config,
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint=settings.checkpoint())
        trainer.save_model(str(settings.final))
        return settings.final


def _is_chat(example: dict[str, Any]) -> bool:
    """Whether the chat template makes the tokens of an example."""
    if any(all(example.get(name) is not None for name in names) for names in TOKENS):
        return False
    return example.get("messages") is not None or isinstance(example.get("prompt"), list)


def _by_mode(dataset: Any) -> Any:
    """Examples with and without thinking as two sets, where there are both: acceptance differs between them."""
    if dataset is None or "chat_template_kwargs" not in dataset.column_names:
        return dataset
    modes = [bool((kwargs or {}).get("enable_thinking")) for kwargs in dataset["chat_template_kwargs"]]
    if len(set(modes)) < 2:
        return dataset
    rows = {
        name: [i for i, mode in enumerate(modes) if mode == on] for name, on in (("thinking", True), ("direct", False))
    }
    return {name: dataset.select(indices) for name, indices in rows.items()}


def count_tokens(dataset: Any, vocab_size: int) -> torch.Tensor:
    """How often each token `(vocab_size,)` is supervised."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in dataset:
        ids, mask = torch.tensor(example["input_ids"]), torch.tensor(example["loss_mask"], dtype=torch.bool)
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


def _load_target(name: str, dtype: str, shape_only: bool) -> PreTrainedModel:
    if not shape_only:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    config = AutoConfig.from_pretrained(name)
    kept = getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=kept if dtype == "auto" else getattr(torch, dtype))
