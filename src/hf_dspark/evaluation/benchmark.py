"""The run itself: every contender on every prompt, interleaved, resumable, one seed."""

import hashlib
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..generation.profiling import profile_throughput
from ..machine import versions
from ..models.drafter import Drafter
from .contenders import PLAIN, Contender, make_contenders
from .cost_model import build_cost_model, whole_block_contenders
from .costs import Costs
from .decoding import decode, encode, plain_scores
from .equality import compare_outputs, first_mismatch
from .facts import describe_target, describe_task, hardware
from .figures import write_plots
from .log import PromptLog, refuse_foreign
from .plots import style
from .report import write_report
from .results import read_results, write_results
from .summary import summarise
from .tasks import Prompt, Task, check_names, load_tasks, text_task


# Values with which cutoffs of a target's `generation_config` cut nothing off.
NO_CUTOFFS = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
# An interrupted run leaves a `results.json` that is at most this old.
REFRESH_SECONDS = 30
# How long the curves behind predictions are measured for each number of rows: noise in them is error in all of these.
PROFILE_SECONDS = 20.0
Progress = Callable[[int, int], None]


@dataclass
class EvaluationConfig:
    """
    What an evaluation does.

    Args:
        schedules (`list[str]`, *optional*, defaults to `["own", "fixed"]`): How drafters draft and verify: `"own"` (as
            `generate` would without arguments), `"fixed"` (the whole block), `"fixed:3"`, `"confidence:0.5"`, or
            `"throughput"`, any of the last three with `"+lookup:5"` behind it. Each drafter is run under each; where
            `"own"` comes out as `"fixed"`, once.
        baselines (`list[str]`, *optional*): `"prompt_lookup"`, `"fast_layers"`. Plain decoding is always run.
        rows (`list[int]`, *optional*, defaults to `[1]`): Prompts decoded at once; each number is run. A task's last
            prompts that don't make up that number are left out there.
        samples (`int`, *optional*): Prompts per task, a seeded sample; all by default.
        max_new_tokens (`int`, *optional*, defaults to 256): New tokens per turn, at most.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy; above it, tokens are sampled from the whole
            distribution (no top-k, no top-p, and no other cutoff of the target's `generation_config`).
        enable_thinking (`bool`, *optional*): Handed to chat templates that know it.
        seed (`int`, *optional*, defaults to 0): Of samples of prompts, sampled tokens and confidence intervals.
        skip_bad (`bool`, *optional*, defaults to `False`): Whether unusable lines, and prompts longer than the
            context, are left out and counted rather than refused.
        cost_model (`bool`, *optional*, defaults to `True`): Whether to measure what steps cost on this machine and to
            predict every setting's speed-up. Needs a drafter that was run with its whole block (`"fixed"`).
    """

    schedules: list[str] = field(default_factory=lambda: ["own", "fixed"])
    baselines: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=lambda: [1])
    samples: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    enable_thinking: bool | None = None
    seed: int = 0
    skip_bad: bool = False
    cost_model: bool = True

    def __post_init__(self) -> None:
        for name in ("schedules", "baselines"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, [getattr(self, name)])
        if not self.schedules:
            raise ValueError('`schedules` is empty: name one, such as "fixed".')
        numbers = {"rows": self.rows, "max_new_tokens": [self.max_new_tokens], "seed": [self.seed]}
        for name, values in numbers.items():
            if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
                what = "a list of whole numbers" if name == "rows" else "a whole number"
                raise ValueError(f"`{name}` must be {what}, got {getattr(self, name)!r}.")
        if not math.isfinite(self.temperature):
            raise ValueError(f"`temperature` must be finite, got {self.temperature}.")
        for name, value, least in (
            ("rows", min(self.rows, default=0), 1),
            ("seed", self.seed, 0),
            ("samples", 1 if self.samples is None else self.samples, 1),
            ("max_new_tokens", self.max_new_tokens, 2),
            ("temperature", self.temperature, 0),
        ):
            if value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")

    def generation_settings(self, target: PreTrainedModel) -> dict[str, Any]:
        """
        Arguments of `generate` that all contenders share.

        Raises:
            ValueError: If the target's `generation_config` cuts off tokens in a way that no argument undoes.
        """
        if not self.temperature:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        theirs = target.generation_config
        if getattr(theirs, "top_h", None) is not None:
            raise ValueError("The target's `generation_config` sets `top_h`, which cuts off tokens. Set it to `None`.")
        cutoffs = {name: none for name, none in NO_CUTOFFS.items() if getattr(theirs, name, None) not in (None, none)}
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return {"max_new_tokens": self.max_new_tokens, **sampling, **cutoffs}


def evaluate_drafter(
    target: str | PreTrainedModel,
    drafter: str | Drafter | Sequence[str | Drafter],
    tasks: Sequence[str | Path] = (),
    output_dir: str | Path = "evaluation",
    config: EvaluationConfig | None = None,
    *,
    prompts: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant: str | PreTrainedModel | None = None,
    dtype: str | torch.dtype = "auto",
    drafter_dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """
    Measures drafters on tasks: acceptance, speed against plain decoding in the same process, whether outputs are those
    of plain decoding, and what other settings would be worth on this machine. Leaves a folder with `results.json`,
    `report.md`, plots and the counters of every prompt. Called again with the same arguments it goes on where it was
    interrupted.

    Args:
        target (`str` or `PreTrainedModel`): The target, or its folder or Hub id.
        drafter (`str`, [`Drafter`] or a list of them): The drafters.
        tasks (`Sequence[str]`, *optional*): See [`~hf_dspark.evaluation.tasks.load_tasks`].
        output_dir (`str`, *optional*, defaults to `"evaluation"`): The folder.
        config ([`EvaluationConfig`], *optional*): Everything else about the run.
        prompts (`Sequence[str]`, *optional*): Texts of one's own, as the task `prompts`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; loaded from its folder by default.
        assistant (`str` or `PreTrainedModel`, *optional*): A small model to compare with, as transformers' assisted
            generation uses it.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`): Of a target that is loaded here.
        drafter_dtype (`torch.dtype`, *optional*): Of drafters that are loaded here; the target's by default.
        progress (`Callable[[int, int], None]`, *optional*): Called with finished and all units of work.

    Returns:
        `dict`: the content of `results.json`, see `docs/evaluate.md`.

    Raises:
        ImportError: Without matplotlib, naming the extra to install.
        OSError: If a task, model or file is not there.
        ValueError: If a task is unusable (naming file and line), a setting can't be honoured, or `output_dir` holds
            another evaluation.

    Example:

    ```python
    >>> from hf_dspark import evaluate_drafter
    >>> from hf_dspark.evaluation.benchmark import EvaluationConfig

    >>> config = EvaluationConfig(schedules=["fixed", "fixed:2"], samples=20)
    >>> results = evaluate_drafter("my-target", "my-drafter", ["gsm8k"], "runs/mine", config)  # doctest: +SKIP
    ```
    """
    config = config or EvaluationConfig()
    tasks, prompts, drafters = (
        [each] if isinstance(each, str | Path | Drafter) else list(each) for each in (tasks, prompts, drafter)
    )
    refuse_foreign(output_dir)
    if not drafters:
        raise ValueError("There is nothing to evaluate: name a drafter.")
    with style():  # matplotlib is needed at the end; if it is missing, better now
        pass
    loaded = load_tasks(tasks, config.samples, config.seed, config.skip_bad) if tasks else []
    loaded += [text_task(prompts)] if prompts else []
    if not loaded:
        raise ValueError("There is nothing to evaluate on: name tasks or prompts.")
    check_names(loaded)
    target, tokenizer = _load_target(target, tokenizer, dtype)
    _check_thinking(tokenizer, config)
    fit_to_context(loaded, target, tokenizer, config)
    assistant_tokenizer = AutoTokenizer.from_pretrained(assistant) if isinstance(assistant, str) else None
    contenders = make_contenders(
        target,
        drafters,
        config.schedules,
        config.baselines,
        assistant,
        assistant_tokenizer,
        tokenizer,
        drafter_dtype,
    )
    check_rows(loaded, contenders, config.rows)
    run = _Run(target, tokenizer, contenders, loaded, config, Path(output_dir))
    try:
        run.go(progress)
        return run.finish()
    finally:
        run.log.close()


def fit_to_context(
    tasks: list[Task], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EvaluationConfig
) -> None:
    """
    Leaves out, or refuses, prompts that may not fit into the target's context together with all answers.

    Raises:
        ValueError: Naming the first prompt's file and line, unless `config.skip_bad`.
    """
    limit = _context(target)
    if limit is None:
        return
    for task in tasks:
        kept = []
        for prompt in task.prompts:
            messages = [{"role": "user", "content": turn} for turn in prompt.turns]
            # The template sees the turns without the answers between them, which are added at their longest.
            length = sum(len(encode(tokenizer, [message], config.enable_thinking)) for message in messages)
            length += len(messages) * config.max_new_tokens
            if length <= limit:
                kept.append(prompt)
                continue
            why = f"With its answers the prompt may take {length} tokens, and the target's context holds {limit}."
            if not config.skip_bad:
                raise ValueError(
                    f"{prompt.where}: {why} (`skip_bad`, on the command line `--skip-bad`, leaves such prompts out.)"
                )
            task.skipped.append({"where": prompt.where, "why": why})
        task.prompts = kept
    if not any(task.prompts for task in tasks):
        raise ValueError("All prompts are longer than the target's context. Lower `max_new_tokens`.")


def _context(target: PreTrainedModel) -> int | None:
    """Tokens that the target's context holds."""
    return getattr(target.config.get_text_config(), "max_position_embeddings", None)


def check_rows(tasks: list[Task], contenders: list[Contender], rows: Sequence[int]) -> None:
    """
    Refuses numbers of rows that some task or contender could not be run with.

    Raises:
        ValueError: Naming it.
    """
    for task in tasks:
        if task.prompts and len(task.prompts) < max(rows):
            raise ValueError(
                f"The task {task.name} has {len(task.prompts)} prompts, too few for {max(rows)} `rows`. Name fewer "
                f"rows, or add prompts."
            )
    alone = [contender.name for contender in contenders if contender.one_row_only]
    if alone and 1 not in rows:
        raise ValueError(f"{', '.join(alone)} can decode one row only. Add 1 to `rows`, or leave out what you named.")


@dataclass(frozen=True)
class _Unit:
    """Prompts of one task that are decoded at once."""

    rows: int
    index: int
    prompts: tuple[Prompt, ...]

    @property
    def key(self) -> list[Any]:
        return [self.rows, self.prompts[0].task, [prompt.id for prompt in self.prompts]]

    @property
    def digests(self) -> list[str]:
        """Of what the user says, so that runs are compared on the same prompts only."""
        return [hashlib.sha256(repr(prompt.turns).encode()).hexdigest()[:16] for prompt in self.prompts]


class _Run:
    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        contenders: list[Contender],
        tasks: list[Task],
        config: EvaluationConfig,
        folder: Path,
    ) -> None:
        self.target, self.tokenizer, self.contenders = target, tokenizer, contenders
        self.tasks, self.config, self.folder = tasks, config, folder
        self.facts = {
            "target": describe_target(target),
            "settings": {"tasks": [task.name for task in tasks], **asdict(config)},
            "versions": versions(),
            "hardware": hardware(target),
            "tasks": [describe_task(task) for task in tasks],
            "contenders": {contender.name: contender.description for contender in contenders},
        }
        self.generation_settings = config.generation_settings(target)
        self.units = list(_units(tasks, config.rows))
        prompts = zlib.crc32(repr([(unit.key, unit.prompts) for unit in self.units]).encode())
        self.log = PromptLog(folder, {**self.facts, "prompts": prompts})
        pad = tokenizer.pad_token_id
        self.pad_token_id = pad if pad is not None else (tokenizer.eos_token_id or 0)

    def go(self, progress: Progress | None) -> None:
        """Decodes what is not in the log yet."""
        done = {repr(record["unit"]) for record in self.log.records}
        left = [unit for unit in self.units if repr(unit.key) not in done]
        if left:
            self._decode(left[0])  # a first call also pays for what later ones find ready
        refreshed = time.monotonic()
        try:
            for unit in left:
                self.log.append({"unit": unit.key, "digests": unit.digests, "turns": self._decode(unit)})
                if progress is not None:
                    progress(len(self.log.records), len(self.units))
                if time.monotonic() - refreshed > REFRESH_SECONDS:
                    self.write(complete=False)
                    refreshed = time.monotonic()
        except BaseException:
            self.write(complete=False)
            raise

    def finish(self) -> dict[str, Any]:
        """Costs, predictions, report and plots."""
        self.write(complete=True, cost_model=self._cost_model() if self.config.cost_model else None)
        results = read_results(self.folder)
        write_report(self.folder, results, write_plots(self.folder, results, self.log.records))
        return results

    def write(self, complete: bool, cost_model: dict[str, Any] | None = None) -> None:
        results = {
            "complete": complete,
            "created": self.log.created,
            **self.facts,
            **summarise(self.log.records, self.facts["contenders"], self.config.seed),
            "cost_model": cost_model,
        }
        write_results(self.folder, results)

    def _cost_model(self) -> dict[str, Any] | None:
        whole = whole_block_contenders(self.contenders)
        if not whole:
            return None
        rows, costs = sorted({1, *self.config.rows}), {}
        for contender in whole:
            # Not stored: `generate` would change its defaults after an evaluation.
            profile = profile_throughput(
                self.target,
                contender.drafter,
                rows,
                self._mean_context(),
                PROFILE_SECONDS,
                progress=False,
                store=False,
            )
            costs[contender.name] = Costs(profile, contender.drafter.num_drafts)
        results = summarise(self.log.records, self.facts["contenders"], self.config.seed)["results"]
        return build_cost_model(self.log.records, self.contenders, results, self.target, costs)

    def _mean_context(self) -> int:
        """Tokens behind which an average step was taken."""
        turns = [turn for record in self.log.records for turn in record["turns"]]
        prompts = [tokens for turn in turns for tokens in turn["prompt_tokens"]]
        answers = [row["new_tokens"] for turn in turns for row in turn["contenders"][PLAIN]["rows"]]
        return int(sum(prompts) / len(prompts) + sum(answers) / len(answers) / 2)

    def _decode(self, unit: _Unit) -> list[dict[str, Any]]:
        """
        All turns of a unit. Each turn after the first follows plain decoding's answers, for every contender. A
        conversation ends early where its answers, read again, take more tokens than were reckoned with and leave no
        room for another.
        """
        rows = list(range(len(unit.prompts)))
        messages: list[list[dict[str, str]]] = [[] for _ in rows]
        records = []
        for turn in itertools.count():
            rows = [i for i in rows if turn < len(unit.prompts[i].turns)]
            if not rows:
                return records
            for i in rows:
                messages[i].append({"role": "user", "content": unit.prompts[i].turns[turn]})
            encoded = {i: encode(self.tokenizer, messages[i], self.config.enable_thinking) for i in rows}
            rows = [i for i in rows if self._fits(encoded[i])]
            if not rows:
                return records
            ids = [encoded[i] for i in rows]
            decoded = self._decode_turn(unit, turn, ids)
            for i, new in zip(rows, decoded[PLAIN].new_ids):
                reply = self.tokenizer.decode(new, skip_special_tokens=True)
                messages[i].append({"role": "assistant", "content": reply})
            records.append(
                {
                    "ids": [unit.prompts[i].id for i in rows],
                    "prompt_tokens": [len(row) for row in ids],
                    "contenders": {name: result.record() for name, result in sorted(decoded.items())},
                }
            )
            if not self.config.temperature:
                self._compare(records[-1]["contenders"], decoded, ids)
        return records

    def _fits(self, ids: list[int]) -> bool:
        limit = _context(self.target)
        return limit is None or len(ids) + self.config.max_new_tokens <= limit

    def _decode_turn(self, unit: _Unit, turn: int, ids: list[list[int]]) -> dict[str, Any]:
        able = [each for each in self.contenders if not (each.one_row_only and unit.rows > 1)]
        # Whoever comes first differs from unit to unit, so that a drifting machine touches all alike.
        first = unit.index % len(able)
        decoded = {}
        for contender in able[first:] + able[:first]:
            torch.manual_seed(zlib.crc32(repr((self.config.seed, unit.key, turn, contender.name)).encode()))
            decoded[contender.name] = decode(
                self.target, contender, ids, self.pad_token_id, **self.generation_settings
            )
        return decoded

    def _compare(self, records: dict[str, Any], decoded: dict[str, Any], ids: list[list[int]]) -> None:
        plain = decoded[PLAIN].new_ids
        others = {name: result.new_ids for name, result in decoded.items() if name != PLAIN}
        scores = self._scores_at_mismatches(plain, others, ids)
        for name, rows in others.items():
            for i, row in enumerate(records[name]["rows"]):
                of_row = {position: kept for (place, position), kept in scores.items() if place == i}
                row["equality"] = compare_outputs(plain[i], rows[i], of_row)

    def _scores_at_mismatches(
        self, plain: list[list[int]], others: dict[str, list[list[int]]], ids: list[list[int]]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """What plain decoding chose from where others chose otherwise; in float32 nobody may."""
        if self.target.dtype == torch.float32:
            return {}
        firsts = ((i, first_mismatch(plain[i], rows[i])) for rows in others.values() for i in range(len(plain)))
        wanted = {(i, k) for i, k in firsts if k is not None and k < len(plain[i])}
        return plain_scores(self.target, ids, self.pad_token_id, wanted, **self.generation_settings)


def _units(tasks: list[Task], rows: Sequence[int]) -> Iterator[_Unit]:
    """Units of all tasks and numbers of rows, interleaved; each has as many prompts as it is said to have rows."""
    index = itertools.count()
    groups = {
        (size, task.name): [task.prompts[i : i + size] for i in range(0, len(task.prompts) - size + 1, size)]
        for size in sorted(set(rows))
        for task in tasks
    }
    for i in range(max(map(len, groups.values()))):
        for (size, _), group in groups.items():
            if i < len(group):
                yield _Unit(size, next(index), tuple(group[i]))


def _load_target(
    target: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: str | torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not isinstance(target, PreTrainedModel):
        target = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        target = target.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(target.config.name_or_path)
    return target, tokenizer


def _check_thinking(tokenizer: PreTrainedTokenizerBase, config: EvaluationConfig) -> None:
    if config.enable_thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError("The target's chat template knows no `enable_thinking`. Leave it out.")
