"""
Where prompts come from: the paper's nine tasks on the Hub, files of one's own, or texts.

Datasets, configurations, splits and columns of the nine are those of the datasets' cards (November 2026). They are
tested on small files with the same columns.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..files import json_line
from ..prompts import user_turns
from .summary import ALL, MACRO


@dataclass(frozen=True)
class Prompt:
    """
    What a user says.

    Args:
        task (`str`): The task it belongs to.
        id (`str`): Tells it from the task's others.
        turns (`tuple[str, ...]`): The user's messages; each after the first answers the model's reply.
        where (`str`): File and line, or dataset and row.
    """

    task: str
    id: str
    turns: tuple[str, ...]
    where: str


@dataclass
class Task:
    """
    Prompts of one kind.

    Args:
        name (`str`): Its name in results.
        source (`str`): Where it was read from.
        prompts (`list[Prompt]`): What was read.
        skipped (`list[dict[str, str]]`): `where` and `why` of what was unusable and left out.
    """

    name: str
    source: str
    prompts: list[Prompt] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class HubTask:
    """
    How a dataset's rows become prompts.

    Args:
        path (`str`): First argument of `datasets.load_dataset`.
        split (`str`): The split.
        turns (`Callable`): The user's messages of a row.
        columns (`tuple[str, ...]`): What `turns` reads.
        name (`str`, *optional*): The dataset's configuration.
        data_files (`str`, *optional*): The file, for repositories that `load_dataset` can't read by themselves.
    """

    path: str
    split: str
    turns: Callable[[dict[str, Any]], list[str]]
    columns: tuple[str, ...]
    name: str | None = None
    data_files: str | None = None


REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _code(row: dict[str, Any]) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def _livecodebench(row: dict[str, Any]) -> list[str]:
    if row["starter_code"]:
        how = f"Use this starter code:\n```python\n{row['starter_code']}\n```"
    else:
        how = "Read the input from stdin and write the answer to stdout."
    return [f"Write a Python program that solves this problem.\n\n{row['question_content']}\n\n{how}"]


HUB_TASKS = {
    "gsm8k": HubTask("openai/gsm8k", "test", lambda row: [row["question"] + REASONING], ("question",), name="main"),
    "math500": HubTask("HuggingFaceH4/MATH-500", "test", lambda row: [row["problem"] + REASONING], ("problem",)),
    "aime25": HubTask("math-ai/aime25", "test", lambda row: [row["problem"] + REASONING], ("problem",)),
    "mbpp": HubTask("google-research-datasets/mbpp", "test", lambda row: [row["prompt"]], ("prompt",), "sanitized"),
    "humaneval": HubTask("openai/openai_humaneval", "test", _code, ("prompt",)),
    # The repository's loading script is no longer run by `datasets`; this file holds the newest problems.
    "livecodebench": HubTask(
        "json",
        "train",
        _livecodebench,
        ("question_content", "starter_code"),
        data_files="hf://datasets/livecodebench/code_generation_lite/test6.jsonl",
    ),
    "mt-bench": HubTask("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"]), ("prompt",)),
    "alpaca": HubTask(
        "tatsu-lab/alpaca",
        "train",
        lambda row: ["\n\n".join(filter(None, (row["instruction"], row["input"])))],
        ("instruction", "input"),
    ),
    "arena-hard-v2": HubTask(
        "json",
        "train",
        lambda row: [row["prompt"]],
        ("prompt",),
        data_files="hf://datasets/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl",
    ),
}


def load_tasks(
    tasks: Iterable[str | Path], samples: int | None = None, seed: int = 0, skip_bad: bool = False
) -> list[Task]:
    """
    Reads tasks.

    Args:
        tasks (`Iterable[str]`): Each the name of one of the paper's tasks (`gsm8k`, `math500`, `aime25`, `mbpp`,
            `humaneval`, `livecodebench`, `mt-bench`, `alpaca`, `arena-hard-v2`), fetched from the Hub; a file
            `NAME.jsonl` whose lines hold `prompt` (text, or messages), `messages` (whose user turns are asked) or
            `turns` (a list of user messages), and maybe an `id`; or a folder of such files.
        samples (`int`, *optional*): Prompts per task, a seeded sample; all by default.
        seed (`int`, *optional*, defaults to 0): Of the sample.
        skip_bad (`bool`, *optional*, defaults to `False`): Whether unusable lines and files are left out and counted.

    Returns:
        `list[Task]`: in the order given, the files of a folder by name.

    Raises:
        OSError: If there is no such file, folder or task.
        ValueError: Naming file and line of what is unusable.

    Example:

    ```python
    >>> from hf_dspark.evaluation.tasks import load_tasks

    >>> tasks = load_tasks(["my/questions.jsonl", "gsm8k"], samples=20)  # doctest: +SKIP
    ```
    """
    loaded = [_load(task, skip_bad) for task in _expand(tasks)]
    check_names(loaded)
    for task in loaded:
        if samples is not None:
            random.Random(f"{seed} {task.name}").shuffle(task.prompts)
            del task.prompts[samples:]
    if not any(task.prompts for task in loaded):
        raise ValueError(f"There is no prompt in {', '.join(task.source for task in loaded) or 'no task'}.")
    return loaded


def check_names(tasks: Iterable[Task]) -> None:
    """
    Refuses tasks that results could not tell apart.

    Raises:
        ValueError: Naming them.
    """
    names = [task.name for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two tasks are called {', '.join(twice)}. Rename a file, or leave one out.")
    if taken := {ALL, MACRO} & set(names):
        raise ValueError(f"No task can be called {taken.pop()}: in results it stands for several tasks. Rename it.")


def text_task(texts: Iterable[str]) -> Task:
    """Prompts of one turn each, as the task `prompts`."""
    prompts = [Prompt("prompts", str(i), (text,), f"prompt {i}") for i, text in enumerate(texts, start=1)]
    for prompt in prompts:
        if not prompt.turns[0].strip():
            raise ValueError(f"{prompt.where} is empty.")
        if not _is_unicode(prompt.turns[0]):
            raise ValueError(f"{prompt.where} holds half a character (a lone surrogate).")
    return Task("prompts", "texts", prompts)


def hub_prompts(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[Prompt]:
    """Prompts of a dataset's rows, for one of the paper's tasks."""
    for i, row in enumerate(rows):
        yield Prompt(name, str(i), tuple(HUB_TASKS[name].turns(row)), f"{name}, row {i}")


def _expand(tasks: Iterable[str | Path]) -> Iterator[str | Path]:
    for task in tasks:
        folder = Path(task)
        if str(task) in HUB_TASKS or not folder.is_dir():
            yield task
            continue
        files = sorted(folder.glob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"The folder {folder} holds no .jsonl file.")
        yield from files


def _load(task: str | Path, skip_bad: bool) -> Task:
    if str(task) in HUB_TASKS:
        return _from_hub(str(task))
    file = Path(task)
    if not file.is_file():
        raise FileNotFoundError(
            f"No task {str(task)!r}: it is no file, no folder, and none of {', '.join(HUB_TASKS)}."
        )
    return _from_file(file, skip_bad)


def _from_hub(name: str) -> Task:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(
            'Tasks from the Hub need `datasets`. Install it: pip install "hf-dspark[evaluate]"'
        ) from None
    hub = HUB_TASKS[name]
    source = hub.data_files or hub.path
    try:
        rows = load_dataset(hub.path, hub.name, split=hub.split, data_files=hub.data_files)
    except Exception as error:  # the Hub's ways to fail are many; each ends here
        raise OSError(
            f"The task {name} could not be fetched from the Hub ({source}): {str(error).splitlines()[0]} "
            f"Name a local {name}.jsonl instead, whose lines hold `prompt`, `messages` or `turns`."
        ) from error
    rows = rows.select_columns(list(hub.columns))
    return Task(name, source, list(hub_prompts(name, rows)))


def _from_file(file: Path, skip_bad: bool) -> Task:
    task, ids = Task(file.stem, str(file)), set()
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            prompt = _parse(file.stem, line, number, where)
        except ValueError as error:
            if not skip_bad:
                raise ValueError(
                    f"{where}: {error} (`skip_bad`, on the command line `--skip-bad`, leaves such lines out.)"
                ) from None
            task.skipped.append({"where": where, "why": str(error)})
            continue
        prompt = replace(prompt, id=_unique(prompt.id, number, ids))
        ids.add(prompt.id)
        task.prompts.append(prompt)
    if not task.prompts and not task.skipped:
        if not skip_bad:
            raise ValueError(f"{file}: the file is empty. Each line holds `prompt`, `messages` or `turns`.")
        task.skipped.append({"where": str(file), "why": "The file is empty."})
    return task


def _parse(task: str, line: bytes, number: int, where: str) -> Prompt:
    row = json_line(line)
    turns = user_turns(row)
    if not all(map(_is_unicode, turns)):
        raise ValueError("Its texts hold half a character (a lone surrogate).")
    return Prompt(task, str(row.get("id", f"line {number}")), tuple(turns), where)


def _unique(wanted: str, number: int, taken: set[str]) -> str:
    """An id that no earlier line has: the wanted one, or else one made of the line's number."""
    others = (f"line {number}" + "+" * n for n in itertools.count())
    return next(each for each in itertools.chain([wanted], others) if each not in taken)


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON and command lines may hold halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
