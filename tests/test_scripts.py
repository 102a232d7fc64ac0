"""The scripts that users copy run as they stand; here on the tiny pair in place of the embedded one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dspark import AutoDrafter
from hf_dspark.evaluation.results import entry, read_results


ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, ROOT / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_answers_then_a_drafter(tiny_embedded_pair, tmp_path):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers"
    questions.write_text("".join(json.dumps({"prompt": f"What is {i} + 3?"}) + "\n" for i in range(4)))
    run("examples/write_answers.py", "--questions", questions, "--output", answers, "--max-new-tokens", 24)
    files = [answers / kind / "train.jsonl" for kind in ("greedy", "sampled")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["prompt_ids"] and row["completion_ids"] for row in rows)

    training = ("--output", tmp_path / "drafter", "--held-out", 0, "--draft-vocab-size", 64)
    run("examples/train_embedded_drafter.py", *files, *training, "--max-steps", 2)
    final = tmp_path / "drafter" / "final"
    config = json.loads((final / "config.json").read_text())
    assert (config["model_type"], config["draft_vocab_size"], config["dtype"]) == ("dspark", 64, "bfloat16")
    assert config["max_trained_length"] == max(len(row["prompt_ids"] + row["completion_ids"]) for row in rows)


def test_prompts_from_a_code_base(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(9):
        body = "".join(f"    x = x + {number}\n" for _ in range(6))
        code = f'def add{number}(x):\n    """Adds."""\n{body}    return x\n\n\ndef short(x):\n    return x\n'
        (source / f"part{number}.py").write_text(code)
    (source / "broken.py").write_text("def (")
    run("examples/write_code_prompts.py", "--source", source, "--output", tmp_path / "prompts")
    train, held_out = (
        [json.loads(line)["prompt"] for line in (tmp_path / "prompts" / file).read_text().splitlines()]
        for file in ("train.jsonl", "tasks/explain.jsonl")
    )
    assert len(train) + len(held_out) == 9 and held_out and not set(train) & set(held_out)
    assert all(text.startswith("Explain what this Python function does.\n```python\ndef add") for text in train)
    assert not any("Adds." in text or "short" in text for text in train + held_out)


def test_prompts_that_the_target_wrote_are_learned_too(tiny_tokenizer, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    recipe = importlib.import_module("train_embedded_drafter")

    def learned(text: str, source: str) -> str:
        chat = [{"role": "user", "content": text}]
        prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tiny_tokenizer("Blue.", add_special_tokens=False)["input_ids"]
        row = {"prompt_ids": prompt, "completion_ids": answer, "source": source}
        example = recipe.to_dataset([row], tiny_tokenizer)[0]
        return tiny_tokenizer.decode([i for i, m in zip(example["input_ids"], example["loss_mask"]) if m])

    assert learned("Why is it so?", "questions") == "Blue."
    assert learned("Why is it so?", "self-written") == "Why is it so?Blue."
    assert learned("Why is it so?" + recipe.BOXED, "self-written") == "Why is it so?Blue."


def test_decoding_benchmark(tiny_embedded_pair, tmp_path):
    tasks, report = tmp_path / "tasks", tmp_path / "report"
    tasks.mkdir()
    for task in ("gsm8k", "mt-bench"):
        (tasks / f"{task}.jsonl").write_text(json.dumps({"turns": ["Hello there."]}) + "\n")
    options = ("--samples", 1, "--max-new-tokens", 12, "--dtype", "float32", "--output", report)
    printed = run("benchmarks/decoding.py", "--tasks", tasks, *options, "--num-assistant-tokens", 2)
    assert "a step over n tokens, in steps over one: 1: 1.00" in printed
    results = read_results(report)
    for schedule in ("fixed", "fixed:2"):
        summary = entry(results, f"{tiny_embedded_pair[1].name} {schedule}")
        assert summary["equality"]["equal"] == summary["prompts"] == 2
        assert summary["tokens_per_forward"]["value"] >= 1


def test_scheduling_benchmark(tiny_embedded_pair, tiny_tokenizer, tmp_path, monkeypatch):
    """Every part runs; what has been measured is not measured again."""
    from transformers import AutoModelForCausalLM

    from hf_dspark import DFlashDrafter

    monkeypatch.setenv("HF_DSPARK_PROFILES", str(tmp_path / "profiles"))
    for task in ("gsm8k", "humaneval", "mt-bench"):
        lines = (json.dumps({"turns": [f"Hello {i}."]}) + "\n" for i in range(4))
        (tmp_path / f"{task}.jsonl").write_text("".join(lines))
    target = AutoModelForCausalLM.from_pretrained(tiny_embedded_pair[0])
    fields = {"sample_from_anchor": False, "num_hidden_layers": 1, "block_size": 5}
    DFlashDrafter.from_target(target, tokenizer=tiny_tokenizer, **fields).save_pretrained(tmp_path / "dflash")
    output = tmp_path / "output"
    options = ("--data", tmp_path, "--output", output, "--dtype", "float32", "--max-new-tokens", 12, "--samples", 1)
    load = ("load", *options, "--rows", 1, 3, "--blocks", 1)
    assert "throughput's ratios" in run("benchmarks/scheduling.py", *load)
    before = (output / "results.json").read_text()
    run("benchmarks/scheduling.py", *load)
    results = json.loads((output / "results.json").read_text())
    assert results["load"]["runs"] == json.loads(before)["load"]["runs"]
    assert [each["rows"] for each in results["load"]["summary"]] == [1, 3]
    assert "rejected" in run("benchmarks/scheduling.py", "thresholds", *options)
    assert "drafting's share" in run("benchmarks/scheduling.py", "overhead", *options, "--contexts", 16, 24)
    printed = run("benchmarks/scheduling.py", "dflash", *options, "--dflash", tmp_path / "dflash")
    assert "times as fast" in printed
    runs = json.loads((output / "results.json").read_text())["dflash"]["runs"]
    # The same weights draft the same in both loops.
    assert all(r["runs"]["ours"]["accepted_length"] == r["runs"]["transformers"]["accepted_length"] for r in runs)
    for plot in ("load.png", "thresholds.png", "contexts.png"):
        assert (output / plot).stat().st_size > 10_000


def test_matched_comparison_goes_on_where_it_was(tiny_embedded_pair, tmp_path):
    pytest.importorskip("matplotlib")
    answers = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": [65 + i, 66, 67], "completion_ids": list(range(70 + i, 90 + i))} for i in range(6)]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    for task in ("gsm8k", "mt-bench"):
        (tmp_path / "tasks" / f"{task}.jsonl").write_text(json.dumps({"turns": ["Hello there."]}) + "\n")
    command = ["benchmarks/comparison.py", answers, "--tasks", tmp_path / "tasks", "--output", tmp_path / "out"]
    command += ["--updates", 2, "--batch", 2, "--anchors", 4, "--layers", 1, "--rank", 4, "--draft-vocab-size", 48]
    command += ["--held-out", 2, "--save-steps", 1, "--max-new-tokens", 8]
    printed = run(*command)
    assert "DSpark over EAGLE-3" in printed
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    for temperature in ("temperature 0", "temperature 1"):
        for name in ("dspark", "dflash", "eagle3"):
            assert report["results"][temperature][name]["mean"] >= 1
            assert report["training"][name]["answer_tokens_seen"] == 80
    assert (tmp_path / "out" / "conditional_acceptance.png").stat().st_size > 1000
    lines = (tmp_path / "out" / "evaluation.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2 * 2
    # A killed evaluation repeats only what it had not finished, and all of a line that it had begun.
    (tmp_path / "out" / "evaluation.jsonl").write_text("\n".join([*lines[:5], lines[5][:20]]))
    assert "dspark: trained already" in run(*command)
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["results"] == report["results"]
    # A longer comparison begins where this one ended.
    more = ["--start", tmp_path / "out", "--output", tmp_path / "longer", "--temperatures", 0]
    run(*command, *more, "--drafters", "dspark", "dspark-parallel")
    training = json.loads((tmp_path / "longer" / "comparison.json").read_text())["training"]
    assert training["dspark"]["answer_tokens_seen"] == 160
    drafter = AutoDrafter.from_pretrained(tmp_path / "longer" / "dspark-parallel" / "final")
    assert drafter.markov_head is None and training["dspark-parallel"]["drafter"] == "dspark-parallel"
