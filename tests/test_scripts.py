"""The scripts that users copy run as they stand; here on the tiny pair in place of the embedded one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, ROOT / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_answers_then_a_drafter(tiny_embedded_pair, tmp_path):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"What is {i} + 3?"}) + "\n" for i in range(4)))
    run("examples/write_answers.py", "--questions", questions, "--output", answers, "--max-new-tokens", 24)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["prompt_ids"] and row["completion_ids"] for row in rows)

    training = ("--output", tmp_path / "drafter", "--held-out", 0, "--draft-vocab-size", 64)
    run("examples/train_embedded_drafter.py", answers, *training, "--max-steps", 2)
    final = tmp_path / "drafter" / "final"
    config = json.loads((final / "config.json").read_text())
    assert (config["model_type"], config["draft_vocab_size"], config["dtype"]) == ("dspark", 64, "bfloat16")
    assert config["max_trained_length"] == max(len(row["prompt_ids"] + row["completion_ids"]) for row in rows)


def test_decoding_benchmark(tiny_embedded_pair, tmp_path):
    for task in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench"):
        (tmp_path / f"{task}.jsonl").write_text(json.dumps({"turns": ["Hello there."]}) + "\n")
    report = tmp_path / "results.json"
    options = ("--samples", 1, "--max-new-tokens", 12, "--dtype", "float32", "--output", report)
    printed = run("benchmarks/decoding.py", "--tasks", tmp_path, *options)
    assert "everything else" in printed
    summary = json.loads(report.read_text())["summary"]
    assert summary["all"]["prompts"] == 5
    assert summary["all"]["equal"] == 5
    assert summary["all"]["tokens_per_forward"] >= 1
