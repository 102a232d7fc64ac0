"""The log of a run: whose folder it is, who may write to it, and what is read from it."""

import json
import subprocess
import sys

import pytest

from hf_dspark import evaluate_drafter
from hf_dspark.evaluation.log import LOG_FILE, PromptLog, read_log


IDENTITY = {"target": {"weights": "a"}}
RECORD = {"unit": [1, "maths", ["0"]], "digests": ["d"], "turns": [{"contenders": {}}]}


def another(task):
    return RECORD | {"unit": [1, task, ["0"]]}


@pytest.fixture
def log(tmp_path):
    log = PromptLog(tmp_path, IDENTITY)
    yield log
    log.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (LOG_FILE, '{"turns": ["My only prompt."]}'),
        (LOG_FILE, '{"turns": ["My only prompt."]}\n'),
        (LOG_FILE, ""),
        (LOG_FILE, "[1]\n"),
        (LOG_FILE, "[" * 100_000 + "\n"),
        ("results.json", '{"mine": 1}'),
        ("report.md", "My thesis."),
    ],
)
def test_files_of_others_are_left_alone(tmp_path, name, text):
    """Before anything is loaded."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} is .*Name another folder, or move"):
        evaluate_drafter("no-such-target", "no-such-drafter", output_dir=tmp_path, prompts=["Hello."])
    assert (tmp_path / name).read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_second_run_is_refused(log, tmp_path):
    with pytest.raises(ValueError, match="Another evaluation is writing to"):
        PromptLog(tmp_path, IDENTITY)
    log.close()
    PromptLog(tmp_path, IDENTITY).close()


def test_a_dead_run_is_in_nobodys_way(tmp_path):
    code = (
        "import os, sys; from hf_dspark.evaluation.log import PromptLog; "
        f"log = PromptLog(sys.argv[1], {IDENTITY!r}); log.append({RECORD!r}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    log = PromptLog(tmp_path, IDENTITY)
    assert log.records == [RECORD]
    log.close()


def test_each_unit_counts_once(log, tmp_path):
    for record in (RECORD, another("chat"), RECORD):
        log.append(record)
    assert read_log(tmp_path) == [RECORD, another("chat")]


@pytest.mark.parametrize("line", ["{", "3", '{"unit": 3}', json.dumps(RECORD | {"turns": []}), "[" * 100_000])
def test_damage_is_one_error(log, tmp_path, line):
    log.append(RECORD)
    with log.file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl is damaged\. Delete its folder"):
        read_log(tmp_path)


def test_half_a_line_is_no_damage(log, tmp_path):
    log.append(RECORD)
    with log.file.open("a") as stream:
        stream.write('{"unit": [1,')
    assert read_log(tmp_path) == [RECORD]
