"""The commands: what they print, what they refuse, and that a drafter never changes the text."""

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_dspark.cli import build_app
from hf_dspark.cli.display import MarkedText, schedule_text
from hf_dspark.cli.generate import _shares
from hf_dspark.generation import lookup
from hf_dspark.generation.statistics import Speculation


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args], catch_exceptions=False)


def test_marks_are_legible_without_colour():
    marked = MarkedText(brackets=True)
    pieces = [*marked.push("a", False), *marked.push("b", True), *marked.push("c", True), *marked.close()]
    assert "".join(text for text, _ in pieces) == "a‹bc›"
    assert MarkedText(brackets=False).push("b", True) == [("b", MarkedText.STYLE)]


def test_help_teaches(run):
    text = " ".join(run("--help").stdout.split())
    assert "drafter guesses the next few tokens" in text
    assert "Start with `hf-dspark demo`" in text
    assert "--num-assistant-tokens" in run("generate", "--help").stdout


def test_generate_prints_the_plain_text(run, tiny_embedded_pair):
    plain = run("generate", "hello", "--plain", "--max-new-tokens", 24)
    drafted = run("generate", "hello", "--max-new-tokens", 24, "--num-assistant-tokens", 3)
    assert plain.exit_code == drafted.exit_code == 0
    assert plain.stdout == drafted.stdout != ""
    assert "tokens per target forward" in drafted.stderr
    assert "tokens per target forward" not in plain.stderr
    assert "fixed, 3 drafts a round" in drafted.stderr


def test_generate_with_named_pair_and_threshold(run, tiny_pair):
    target, drafter = tiny_pair
    options = ("--max-new-tokens", 8, "--confidence-threshold", 0.9, "--dtype", "float32", "--raw")
    result = run("generate", "hello", "--target", target, "--drafter", drafter, *options)
    assert result.exit_code == 0, result.output
    assert "accepted length" in result.stderr
    assert "confidence, 6 drafts a round" in result.stderr


def test_generate_copies_what_stood_before(run, tiny_embedded_pair, monkeypatch):
    monkeypatch.setattr(lookup, "MATCHED", 1)
    options = ("generate", "hello hello hello", "--max-new-tokens", 24)
    plain, copying, never = (
        run(*options, *more) for more in (("--plain",), ("--prompt-lookup", 4), ("--prompt-lookup", 0))
    )
    assert plain.stdout == copying.stdout == never.stdout
    assert "tokens checked" in copying.stderr
    assert "tokens checked" not in never.stderr


def test_seed_repeats_a_sampled_answer(run, tiny_embedded_pair):
    first, again = (
        run("generate", "hello", "--max-new-tokens", 16, "--temperature", 1.0, "--seed", 7).stdout for _ in range(2)
    )
    assert first == again


def test_target_without_drafter_is_refused(run):
    result = run("generate", "hello", "--target", "somewhere")
    assert result.exit_code == 2
    assert "name the target's drafter with --drafter" in result.stderr


def test_a_drafter_names_its_target(run, tiny_pair, tiny_embedded_pair, tmp_path):
    """Its own folder, or the embedded one; what says nothing is asked for."""
    target, drafter = tiny_pair
    options = ("--max-new-tokens", 8, "--raw")
    expected = run("generate", "hello", *options).stdout
    assert run("generate", "hello", *options, "--drafter", "embedded").stdout == expected
    assert run("generate", "hello", *options, "--target", "embedded").stdout == expected
    copy = tmp_path / "mine"
    shutil.copytree(drafter, copy)
    result = run("generate", "hello", *options, "--drafter", copy)
    assert result.exit_code == 2 and "does not say which target it is for" in result.stderr
    config = json.loads((copy / "config.json").read_text())
    for named in (str(target), "HuggingFaceTB/SmolLM2-135M-Instruct"):
        (copy / "config.json").write_text(json.dumps(config | {"target_name_or_path": named}))
        assert run("generate", "hello", *options, "--drafter", copy).stdout == expected
    (copy / "config.json").write_text(json.dumps(config | {"target_name_or_path": "some/where"}))
    assert "is for some/where" in run("generate", "hello", "--drafter", copy).stderr


def test_a_folder_that_is_not_there_is_said_first(run, tmp_path):
    for command in (
        ("inspect", "nosuch"),
        ("generate", "x", "--drafter", "nosuch"),
        ("show-data", "x", "--tokenizer", "nosuch"),
    ):
        with pytest.raises(FileNotFoundError, match="There is no folder nosuch here, and no model of this name is in"):
            run(*command)
    with pytest.raises(FileNotFoundError, match=r"There is no folder \./a/b/c, and no repository"):
        run("inspect", "./a/b/c")


def test_prompts_that_are_none(run, tiny_embedded_pair):
    assert "the prompt is empty" in run("generate", "", "--raw").stderr
    assert "the prompt is not valid UTF-8 text" in run("generate", "a\udcffb").stderr


def test_plain_takes_no_word_on_drafting(run, tiny_embedded_pair):
    assert "--plain decodes without a drafter" in run("generate", "x", "--plain", "--num-assistant-tokens", 3).stderr


def test_a_single_token_needs_no_round(run, tiny_embedded_pair):
    told = run("generate", "hello", "--max-new-tokens", 1).stderr
    assert "target forwards" in told and "nan" not in told and "accepted length" not in told


def test_a_target_without_tokenizer(run, tiny_pair, tmp_path):
    target, drafter = tiny_pair
    for name in ("config.json", "model.safetensors"):
        shutil.copy(target / name, tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer\. Save the one"):
        run("generate", "x", "--target", tmp_path, "--drafter", drafter)


@pytest.mark.parametrize("command", ["regenerate", "evaluate", "calibrate", "train", "convert"])
def test_help_fits_80_columns(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run(command, "--help").stdout
    assert "…" not in text
    assert "--enable-thinking / --no-enable-thinking" in text or command != "regenerate"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_demo(run, tiny_embedded_pair, dtype):
    result = run("demo", "--prompts", 2, "--max-new-tokens", 12, "--repeats", 2, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("target forwards") == 4
    assert "tokens per target forward (medians)" in result.stdout
    assert "Schedule: fixed, 7 drafts a round." in " ".join(result.stdout.split())
    if dtype == "auto" and not torch.cuda.is_available():
        assert "float32, on the CPU" in result.stdout
        assert "same text in 2 of 2" in result.stdout


def test_statistics_name_the_schedule_and_what_time_went_to():
    stats = Speculation([[]], target_seconds=6, draft_seconds=1, preparation_seconds=2, total_seconds=10)
    stats.schedule = "throughput"
    stats.record_round([0], 2, [2], [2], [1], [2])
    stats.record_round([0], 0, [0], [0], [0], [1])
    assert schedule_text(stats) == "throughput (this machine was profiled), up to 2 drafts a round, 1.0 on average"
    assert _shares(stats) == "60% target, 10% drafter, 20% preparing the layers (once), 10% everything else"
    assert _shares(dataclasses.replace(stats, preparation_seconds=0.0)).endswith("10% drafter, 30% everything else")


def script(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_extra_says_what_to_install(name):
    result = script(f"import sys; sys.modules[{name!r}] = None\nfrom hf_dspark.cli import main; main()")
    assert result.returncode == 1
    assert result.stderr.strip() == f'hf-dspark: {name} is missing. Install it: pip install "hf-dspark[cli]"'


def test_user_errors_come_without_a_traceback(monkeypatch):
    monkeypatch.setenv("HF_DSPARK_EMBEDDED_TARGET", "/nowhere")
    result = script("import sys; sys.argv = ['hf-dspark', 'demo']\nfrom hf_dspark.cli import main; main()")
    assert result.returncode == 1
    assert result.stderr.startswith("hf-dspark: HF_DSPARK_EMBEDDED_TARGET names /nowhere")
    assert "Traceback" not in result.stderr
