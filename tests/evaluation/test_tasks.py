"""Tasks: files of one's own, bad ones named by file and line, and the columns of the paper's nine on the Hub."""

import json

import datasets
import pytest
from conftest import make_target

from hf_dspark.evaluation.benchmark import EvaluationConfig, evaluate_drafter, fit_to_context
from hf_dspark.evaluation.tasks import HUB_TASKS, REASONING, load_tasks, text_task


GOOD = b'{"id": %d, "turns": ["What is %d + 3?"]}\n'
BAD_LINES = {
    b"[1, 2\n": r"Not JSON: .* at column 6",
    b'{"id": 7, "question": "What?"}\n': r"Expected `prompt`, `messages` or `turns`, got the columns id, question",
    b'{"turns": []}\n': r"`turns` must hold texts that are not empty",
    b'{"turns": ["Hello", ""]}\n': r"`turns` must hold texts that are not empty",
    b'{"turns": [3]}\n': r"`turns` must hold texts that are not empty",
    b'"turns"\n': r"Expected `prompt`, `messages` or `turns`, got str",
    b'{"messages": [{"role": "system", "content": "Be brief."}]}\n': r"`messages` holds messages of the role system",
    b'{"turns": ["half \\ud800"]}\n': r"half a character",
    b"[" * 100_000 + b"\n": r"nested too deeply",
    '{"turns": ["Grüße"]}\n'.encode("latin-1"): r"Not UTF-8: byte 0xfc at 14",
}


@pytest.fixture
def task_file(tmp_path):
    def write(name: str, *lines: bytes):
        (tmp_path / name).write_bytes(b"".join(lines))
        return tmp_path / name

    return write


def good(count):
    return [GOOD % (i, i) for i in range(count)]


def test_files_and_folders(task_file, tmp_path):
    task_file("maths.jsonl", *good(3))
    task_file("chat.jsonl", b'{"turns": ["Hello.", "And again."]}\n\n', '\ufeff{"turns": ["Grüße"]}'.encode())
    chat, maths = load_tasks([tmp_path])
    assert [prompt.turns for prompt in chat.prompts] == [("Hello.", "And again."), ("Grüße",)]
    assert [prompt.id for prompt in chat.prompts] == ["line 1", "line 3"]
    assert [prompt.id for prompt in maths.prompts] == ["0", "1", "2"]
    assert maths.prompts[2].where == f"{tmp_path / 'maths.jsonl'}:3"


def test_prompts_messages_and_turns_are_all_taken(task_file):
    chat = b'{"messages": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "x"}]}\n'
    (task,) = load_tasks([task_file("mixed.jsonl", *good(1), b'{"prompt": "Two"}\n', chat)])
    assert [prompt.turns for prompt in task.prompts] == [("What is 0 + 3?",), ("Two",), ("One",)]


def test_sample_is_seeded(task_file):
    file = task_file("maths.jsonl", *good(50))
    first, again, other = (
        [prompt.id for prompt in load_tasks([file], samples=8, seed=seed)[0].prompts] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 8


def test_ids_that_come_twice_are_told_apart(task_file):
    (task,) = load_tasks([task_file("maths.jsonl", GOOD % (1, 1), GOOD % (1, 2))])
    assert [prompt.id for prompt in task.prompts] == ["1", "line 2"]
    # A name that a later line would be given, and one that an earlier line was given.
    named, bare = b'{"id": "line 2", "turns": ["a"]}\n', b'{"turns": ["b"]}\n'
    for lines in ((named, bare, bare), (bare, bare, named)):
        (task,) = load_tasks([task_file("ids.jsonl", *lines)])
        assert len({prompt.id for prompt in task.prompts}) == 3


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_bad_line_is_named(task_file, line):
    file = task_file("maths.jsonl", *good(6), line, *good(1))
    with pytest.raises(ValueError, match=BAD_LINES[line]) as error:
        load_tasks([file])
    assert str(error.value).startswith(f"{file}:7: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_bad_line_is_skipped_and_counted_when_asked_to(task_file, line):
    file = task_file("maths.jsonl", *good(6), line, *good(1))
    (task,) = load_tasks([file], skip_bad=True)
    assert len(task.prompts) == 7
    (skipped,) = task.skipped
    assert skipped["where"] == f"{file}:7"


def test_empty_file(task_file):
    empty, other = task_file("empty.jsonl", b"\n"), task_file("maths.jsonl", *good(1))
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file is empty"):
        load_tasks([empty, other])
    assert load_tasks([empty, other], skip_bad=True)[0].skipped == [{"where": str(empty), "why": "The file is empty."}]
    with pytest.raises(ValueError, match="There is no prompt in"):
        load_tasks([empty], skip_bad=True)


def test_what_is_not_there(tmp_path, task_file):
    with pytest.raises(FileNotFoundError, match=r"No task 'gsm9k'.*gsm8k, math500"):
        load_tasks(["gsm9k"])
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl file"):
        load_tasks([tmp_path])
    file = task_file("maths.jsonl", *good(1))
    with pytest.raises(ValueError, match="Two tasks are called maths"):
        load_tasks([file, file])
    for name in ("all", "macro"):
        with pytest.raises(ValueError, match=f"No task can be called {name}"):
            load_tasks([task_file(f"{name}.jsonl", *good(1))])
    with pytest.raises(ValueError, match="Two tasks are called prompts"):
        evaluate_drafter("none", "none", [task_file("prompts.jsonl", *good(1))], tmp_path / "run", prompts=["Hello."])
    with pytest.raises(ValueError, match="prompt 1 holds half a character"):
        text_task(["\udcff"])
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        text_task(["Hello.", " "])


@pytest.fixture
def context_of_100(tiny_tokenizer):
    return make_target(vocab_size=len(tiny_tokenizer), max_position_embeddings=100), tiny_tokenizer


def test_prompt_longer_than_the_context(task_file, context_of_100):
    long = json.dumps({"turns": ["x" * 70]}).encode() + b"\n"
    file = task_file("maths.jsonl", *good(2), long)
    config = EvaluationConfig(max_new_tokens=16)
    tasks = load_tasks([file])
    with pytest.raises(ValueError, match=r"maths\.jsonl:3: With its answers the prompt may take 1\d\d tokens, .* 100"):
        fit_to_context(tasks, *context_of_100, config)
    fit_to_context(tasks, *context_of_100, EvaluationConfig(max_new_tokens=16, skip_bad=True))
    assert len(tasks[0].prompts) == 2
    assert tasks[0].skipped[0]["where"] == f"{file}:3"


def test_second_turn_counts_for_the_context(task_file, context_of_100):
    two = json.dumps({"turns": ["x" * 16, "y" * 16]}).encode() + b"\n"
    tasks = load_tasks([task_file("chat.jsonl", two)])
    fit_to_context(tasks, *context_of_100, EvaluationConfig(max_new_tokens=8))
    with pytest.raises(ValueError, match=r"chat\.jsonl:1"):
        fit_to_context(tasks, *context_of_100, EvaluationConfig(max_new_tokens=20))


def test_bad_file_stops_before_anything_is_loaded(task_file, tmp_path):
    file = task_file("maths.jsonl", b"{")
    with pytest.raises(ValueError, match=r"maths\.jsonl:1: Not JSON"):
        evaluate_drafter("no-such-target", "no-such-drafter", [file], tmp_path / "run")
    assert not (tmp_path / "run").exists()


# A row of each dataset, with the columns that its card names; the prompts that must come of them.
ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, ["How many?" + REASONING]),
    "math500": (
        {"problem": "$1+1$?", "solution": "2", "answer": "2", "subject": "Algebra", "level": 1, "unique_id": "a"},
        ["$1+1$?" + REASONING],
    ),
    "aime25": ({"problem": "Find it.", "answer": "70", "id": "0"}, ["Find it." + REASONING]),
    "mbpp": (
        {
            "source_file": "a",
            "task_id": 2,
            "prompt": "Write a function to add.",
            "code": "def f(): ...",
            "test_imports": [],
            "test_list": ["assert f()"],
        },
        ["Write a function to add."],
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "canonical_solution": "    return x\n",
            "test": "assert f(1)",
            "entry_point": "f",
        },
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f(x):\n\n```"
        ],
    ),
    "livecodebench": (
        {
            "question_title": "Sum",
            "question_content": "Sum the numbers.",
            "platform": "atcoder",
            "question_id": "a",
            "starter_code": "",
            "difficulty": "easy",
        },
        [
            "Write a Python program that solves this problem.\n\nSum the numbers.\n\n"
            "Read the input from stdin and write the answer to stdout."
        ],
    ),
    "mt-bench": (
        {"category": "writing", "prompt": ["Write.", "Now shorter."], "reference": [], "prompt_id": 81},
        ["Write.", "Now shorter."],
    ),
    "alpaca": (
        {"instruction": "Sort these.", "input": "3, 1", "output": "1, 3", "text": "..."},
        ["Sort these.\n\n3, 1"],
    ),
    "arena-hard-v2": (
        {"uid": "a", "category": "hard_prompt", "subcategory": "coding", "prompt": "Explain."},
        ["Explain."],
    ),
}


def test_the_nine_tasks_of_the_paper():
    assert set(ROWS) == set(HUB_TASKS)


@pytest.mark.parametrize("name", HUB_TASKS)
def test_columns_of_the_hub(name, tmp_path, monkeypatch):
    """Read by `datasets`, from a file with the dataset's columns in the place of the Hub's."""
    row, turns = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    asked = []
    load = datasets.load_dataset

    def load_dataset(path, configuration, split, data_files):
        asked.append((path, data_files))
        return load("json", split="train", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (task,) = load_tasks([name])
    assert [list(prompt.turns) for prompt in task.prompts] == [turns]
    assert task.source in asked[0]


def test_alpaca_without_input_and_livecodebench_with_starter_code():
    assert HUB_TASKS["alpaca"].turns({"instruction": "Say hello.", "input": ""}) == ["Say hello."]
    (turn,) = HUB_TASKS["livecodebench"].turns({"question_content": "Add.", "starter_code": "class Solution:"})
    assert "Use this starter code:\n```python\nclass Solution:\n```" in turn


def test_hub_out_of_reach(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"gsm8k could not be fetched.*Couldn't reach the Hub Name a local gsm8k\.jsonl"):
        load_tasks(["gsm8k"])
