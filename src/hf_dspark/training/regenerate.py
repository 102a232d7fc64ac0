"""Training data in the target's own words: it answers prompts, and a drafter learns from the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..files import write_whole
from ..machine import versions
from ..models.fingerprint import weights_fingerprint
from ..prompts import prompt_of
from .data import rows_to_dataset, without_none
from .endpoint import Endpoint, RefusedError
from .journal import Journal, differences, digest, seed_of
from .local_target import LocalTarget
from .self_prompts import SAMPLING, write_prompts


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.get_logger(__name__)

# The dataset and its record, and hidden files of unfinished work, which `load_dataset` passes over.
ANSWERS, RECORD = "train.jsonl", "regenerate.json"
_JOURNAL, _PROMPTS = ".answers.jsonl", ".prompts.jsonl"
_OURS = {"prompt", "messages", "turns", "completion", "prompt_ids", "completion_ids", "input_ids", "loss_mask"}
_OURS |= {"finished"}
# An endpoint that refuses so many prompts and answers none refuses the settings, not the prompts.
_REFUSALS = 8


def regenerate(
    target: PreTrainedModel | str | Path | Endpoint,
    prompts: Dataset | Iterable[dict[str, Any] | str] | None = None,
    output: str | Path = "answers",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    self_prompts: int = 0,
    openers: Sequence[str] = ("",),
    chat_template_kwargs: dict[str, Any] | None = None,
    max_new_tokens: int = 1024,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    drop_unfinished: bool = False,
    progress: bool = True,
) -> Dataset:
    """
    Lets the target answer prompts, as training data for its drafter.

    Prompts of similar length are answered together, the longest first. Work is kept as it is done: the same call
    after a kill goes on where it stopped and gives the dataset that an uninterrupted run gives (from an endpoint, as
    far as that is repeatable).

    Args:
        target (`PreTrainedModel`, `str`, `Path` or [`Endpoint`]): The target; its folder or Hub id; or a server.
        prompts (`datasets.Dataset`, or iterable of `dict` or `str`, *optional*): What to answer. A `dict` has
            `prompt` (text, or the messages of a chat), `messages` (a last assistant turn is left out and written
            anew) or `turns` (the user's messages, of which the first is answered), and may have `tools` (JSON schemas)
            and `chat_template_kwargs`. Other columns are kept.
        output (`str` or `Path`, *optional*, defaults to `"answers"`): Folder of the result: `train.jsonl`, and the
            settings in `regenerate.json`. `load_dataset` takes it, and it can be uploaded to the Hub as it is.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): A local target's; from the same place if not given.
        self_prompts (`int`, *optional*, defaults to 0): Prompts that the target writes itself, answered too.
        openers (`Sequence[str]`, *optional*): How prompts that it writes may begin.
        chat_template_kwargs (`dict`, *optional*): Arguments of the chat template, such as `enable_thinking`.
        max_new_tokens (`int`, *optional*, defaults to 1024): Longest answer. One that is cut off there has `finished`
            false; what follows its text is not supervised.
        temperature, top_p, top_k (*optional*): Sampling; the target's own settings where none is given. 0 is greedy.
            A temperature alone samples from the whole distribution.
        batch_size (`int`, *optional*, defaults to 32): Prompts answered at once by a local target.
        seed (`int`, *optional*, defaults to 0): Seed of each batch, or of each request.
        drop_unfinished (`bool`, *optional*, defaults to `False`): Leave out answers that were cut off.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `datasets.Dataset`: A row for each prompt, in their order: `prompt` and `completion` (chats, or text where the
            tokenizer has no chat template), `finished`, from a local target also the exact tokens `prompt_ids` and
            `completion_ids`, and the prompt's other columns. [`DraftTrainer`] takes it.

    Raises:
        ValueError: If there are no prompts, or `output` holds answers of other settings or prompts.
        ConnectionError: If an endpoint gives no usable answer.

    Example:

    ```python
    >>> from hf_dspark import regenerate
    >>> from hf_dspark.hub import embedded_target

    >>> answers = regenerate(embedded_target(), ["What is 2 + 3?"], "answers", max_new_tokens=32)  # doctest: +SKIP
    >>> answers[0]["completion"]  # doctest: +SKIP
    [{'role': 'assistant', 'content': '2 + 3 = 5'}]
    ```
    """
    if max_new_tokens < 1 or batch_size < 1 or self_prompts < 0:
        raise ValueError("`max_new_tokens` and `batch_size` must be at least 1 and `self_prompts` at least 0.")
    if isinstance(target, Endpoint) and self_prompts:
        raise ValueError(
            "An endpoint can't continue a user turn, so it writes no prompts: pass the target itself for "
            "`self_prompts`, and give what it wrote as `prompts`."
        )
    output = Path(output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    asked = [_as_prompt(row, chat_template_kwargs or {}) for row in ([] if prompts is None else prompts)]
    if not asked and not self_prompts:
        raise ValueError("There are no prompts to answer: give some, or let the target write them (`self_prompts`).")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    answering = (
        _EndpointAnswers(target, sampling, seed)
        if isinstance(target, Endpoint)
        else _LocalAnswers(_load(target, tokenizer), sampling, seed, batch_size)
    )
    settings = {
        **answering.identity(),
        "chat_template_kwargs": chat_template_kwargs or {},
        "seed": seed,
        "prompts": {"given": len(asked), "digest": _digest(asked)},
        "drop_unfinished": drop_unfinished,
    }
    if self_prompts:
        settings["self_prompts"] = {"number": self_prompts, "openers": list(openers), "sampling": SAMPLING}
    _check_settings(output / RECORD, settings)
    if not (output / ANSWERS).exists():
        if self_prompts:
            written = write_prompts(
                answering.target, self_prompts, output / _PROMPTS, openers, batch_size, seed, progress
            )
            more = [{"prompt": text, "source": "self-written"} for text in written]
            asked += [_as_prompt(row, chat_template_kwargs or {}) for row in more]
        found = _answer_all(answering, asked, Journal(output / _JOURNAL), progress)
        _finish(output, asked, found, drop_unfinished)
    return _read(output)


def _digest(asked: list[dict[str, Any]]) -> str:
    try:
        return digest(asked)
    except TypeError as error:
        raise ValueError(f"A column of the prompts can't be written as JSON ({error}): leave it out.") from None


def _as_prompt(row: dict[str, Any] | str, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """A prompt as messages or text, with the columns that are kept."""
    row = {"prompt": row} if isinstance(row, str) else without_none(dict(row))
    prompt = {"prompt": prompt_of(row)} | {k: v for k, v in row.items() if k not in _OURS}
    if template_kwargs:
        prompt["chat_template_kwargs"] = template_kwargs | prompt.get("chat_template_kwargs", {})
    return prompt


def _load(target: Any, tokenizer: PreTrainedTokenizerBase | None) -> LocalTarget:
    if isinstance(target, str | Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = tokenizer or AutoTokenizer.from_pretrained(target)
        place = {"device_map": "auto"} if torch.cuda.is_available() else {}
        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto", **place)
    if tokenizer is None:
        raise ValueError("A target that is loaded already needs its tokenizer: pass `tokenizer=`.")
    return LocalTarget(target, tokenizer)


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings down, or compares them with those that the folder's answers were begun with."""
    if not path.exists() or not _holds_work(path.parent):
        if (path.parent / ANSWERS).exists():
            raise ValueError(
                f"{path.parent / ANSWERS} is not of `regenerate`: there is no {RECORD} beside it. Give another output "
                "folder."
            )
        write_whole(path, json.dumps(settings | {"versions": versions()}, indent=1) + "\n")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    settings = json.loads(json.dumps(settings))
    # A smaller batch is the way on where memory was too small.
    told = differences(before, settings, leave_out=("versions", "result", "batch_size"))
    if told:
        raise ValueError(
            f"{path.parent} holds answers of another run ({'; '.join(told)}). Give the same settings and prompts to "
            "go on with it, or another output folder."
        )


def _holds_work(folder: Path) -> bool:
    """Whether an earlier run left anything; one that was refused at once binds nobody to its settings."""
    if (folder / ANSWERS).exists() or (folder / _PROMPTS).exists():
        return True
    return any("refused" not in answer for entry in Journal(folder / _JOURNAL).entries() for _, answer in entry)


def _answer_all(answering: Any, asked: list[dict], journal: Journal, progress: bool) -> dict[int, dict]:
    """Answers by prompt; a prompt without one has `refused` instead."""
    found = {index: answer for entry in journal.entries() for index, answer in entry}
    # What was refused may have been the server's fault, and that mended since.
    found = {index: answer for index, answer in found.items() if "refused" not in answer}
    answering.prepare(asked)
    with tqdm(total=len(asked), initial=len(found), desc="Answering", unit="prompt", disable=not progress) as bar:
        for entry in answering.answers(asked, [i for i in range(len(asked)) if i not in found]):
            journal.add(entry)
            found.update(entry)
            bar.update(len(entry))
    return found


def _finish(output: Path, asked: list[dict], found: dict[int, dict], drop_unfinished: bool) -> None:
    rows, refused, cut = [], 0, 0
    for index, prompt in enumerate(asked):
        answer = found[index]
        if "refused" in answer:
            refused += 1
            continue
        cut += not answer["finished"]
        if answer["finished"] or not drop_unfinished:
            rows.append(prompt | answer)
    if not rows:
        reason = next((a["refused"] for a in found.values() if "refused" in a), "all were cut off and dropped")
        raise ValueError(f"None of the {len(asked)} prompts has an answer: {reason}.")
    tokens = sum(len(row.get("completion_ids", ())) for row in rows)
    result = {"answers": len(rows), "cut_off": cut, "refused": refused} | ({"answer_tokens": tokens} if tokens else {})
    if refused:
        logger.warning("%d of %d prompts were left out; %s counts them.", refused, len(asked), output / RECORD)
    record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    write_whole(output / RECORD, json.dumps(record | {"result": result}, indent=1) + "\n")
    write_whole(output / ANSWERS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for name in (_JOURNAL, _PROMPTS):
        (output / name).unlink(missing_ok=True)


def _read(output: Path) -> Dataset:
    lines = (output / ANSWERS).read_text(encoding="utf-8").split("\n")
    return rows_to_dataset([json.loads(line) for line in lines if line])


class _LocalAnswers:
    """Answers of a target on this machine, batch by batch."""

    def __init__(self, target: LocalTarget, sampling: dict[str, Any], seed: int, batch_size: int) -> None:
        self.target, self.sampling, self.seed, self.batch_size = target, sampling, seed, batch_size
        self.config = target.generation_config(**sampling)

    def identity(self) -> dict[str, Any]:
        model, config = self.target.model, self.config
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "eos_token_id")
        return {
            "target": str(model.config.name_or_path or model.config.model_type),
            "weights": weights_fingerprint(model.base_model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "template": digest(self.target.tokenizer.chat_template),
            "sampling": {name: getattr(config, name) for name in names} | {"do_sample": bool(config.do_sample)},
            "batch_size": self.batch_size,
        }

    def prepare(self, asked: list[dict]) -> None:
        self.ids = [self._encode(prompt) for prompt in asked]

    def _encode(self, prompt: dict) -> list[int]:
        tokenizer, text = self.target.tokenizer, prompt["prompt"]
        if isinstance(text, str) and not tokenizer.chat_template:
            return tokenizer(text)["input_ids"]
        if not tokenizer.chat_template:
            raise ValueError("The tokenizer has no chat template: give prompts as text.")
        if isinstance(text, str):
            prompt["prompt"] = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            prompt["prompt"],
            tools=prompt.get("tools"),
            add_generation_prompt=True,
            return_dict=True,
            **prompt.get("chat_template_kwargs", {}),
        )["input_ids"]

    def answers(self, asked: list[dict], pending: list[int]) -> Iterator[list[tuple[int, dict]]]:
        limit, room = self.target.context_length, self.sampling["max_new_tokens"]
        fits = [i for i in pending if limit is None or len(self.ids[i]) + room <= limit]
        if len(fits) < len(pending):
            reason = f"longer than the target's {limit} tokens of context less {room} new ones"
            yield [(i, {"refused": reason}) for i in sorted(set(pending) - set(fits))]
        # The longest first: memory that is too small shows at once.
        fits.sort(key=lambda i: (-len(self.ids[i]), i))
        for start in range(0, len(fits), self.batch_size):
            batch = fits[start : start + self.batch_size]
            prompts = [self.ids[i] for i in batch]
            answers = self.target.continue_all(prompts, self.config, seed_of(self.seed, "answers", batch[0]))
            yield [(i, self._answer(asked[i], self.ids[i], ids)) for i, ids in zip(batch, answers)]

    def _answer(self, prompt: dict, prompt_ids: list[int], ids: list[int]) -> dict[str, Any]:
        finished = bool(ids) and ids[-1] in self.target.end_ids
        text = self.target.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
        is_text = isinstance(prompt["prompt"], str)
        completion = text if is_text else [{"role": "assistant", "content": text}]
        return {"completion": completion, "finished": finished, "prompt_ids": prompt_ids, "completion_ids": ids}


class _EndpointAnswers:
    """Answers of a server, each as it comes."""

    def __init__(self, endpoint: Endpoint, sampling: dict[str, Any], seed: int) -> None:
        self.endpoint, self.sampling, self.seed = endpoint, sampling, seed

    def identity(self) -> dict[str, Any]:
        return {"target": self.endpoint.model, "sampling": self.sampling, "extra_body": self.endpoint.extra_body}

    def prepare(self, asked: list[dict]) -> None:
        for prompt in asked:
            if isinstance(prompt["prompt"], str):
                prompt["prompt"] = [{"role": "user", "content": prompt["prompt"]}]

    def answers(self, asked: list[dict], pending: list[int]) -> Iterator[list[tuple[int, dict]]]:
        refused, answered = 0, len(pending) < len(asked)
        pool, stop = ThreadPoolExecutor(self.endpoint.concurrency), Event()
        running = {pool.submit(self._answer, asked[i], i, stop): i for i in pending}
        try:
            for future in as_completed(running):
                try:
                    answer, answered = future.result(), True
                except RefusedError as error:
                    answer, refused = {"refused": str(error)}, refused + 1
                    if refused >= min(_REFUSALS, len(asked)) and not answered:
                        raise ValueError(f"The server refuses every prompt: {error}") from None
                yield [(running[future], answer)]
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _answer(self, prompt: dict, index: int, stop: Event) -> dict[str, Any]:
        extra = {"top_k": self.sampling["top_k"], "chat_template_kwargs": prompt.get("chat_template_kwargs")}
        settings = {
            "max_tokens": self.sampling["max_new_tokens"],
            "temperature": self.sampling["temperature"],
            "top_p": self.sampling["top_p"],
            "seed": seed_of(self.seed, "answers", index),
            "extra_body": {name: value for name, value in extra.items() if value},
        }
        return self.endpoint.answer(prompt["prompt"], prompt.get("tools"), settings, stop)
