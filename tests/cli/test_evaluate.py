"""`hf-dspark evaluate` and `hf-dspark compare`."""

import json

import pytest
from typer.testing import CliRunner

from hf_dspark.cli import build_app


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def maths(tmp_path):
    file = tmp_path / "maths.jsonl"
    file.write_text("".join(json.dumps({"id": i, "turns": [f"{i} + 3?"]}) + "\n" for i in range(2)))
    return file


OPTIONS = ("--max-new-tokens", 6, "--no-cost-model", "--dtype", "float32")


def test_evaluate_then_compare(run, tiny_embedded_pair, maths, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    settings = ("--schedules", "fixed", "fixed:2", "--baselines", "prompt_lookup", *OPTIONS)
    result = run("evaluate", "--tasks", maths, "--output", first, *settings)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    name = tiny_embedded_pair[1].name
    assert [name, "fixed,", "1", "row"] in lines
    assert [name, "fixed:2,", "1", "row"] in lines
    (fixed, _, lookup) = [line for line in lines if line[:1] == ["maths"]]
    assert fixed[-1] == lookup[-1] == "2/2"
    assert "Too few prompts (maths)" in result.stdout
    assert f"{first}: results.json, report.md" in result.stdout
    for file in ("results.json", "report.md", "prompts.jsonl", "plots/time.png"):
        assert (first / file).is_file()

    settings = ("--schedules", "fixed", "fixed:2", *OPTIONS)
    assert run("evaluate", "--tasks", maths, "--output", second, *settings, "--seed", 1).exit_code == 0
    result = run("compare", first, second)
    assert result.exit_code == 0, result.output
    assert "settings.seed" in result.stdout
    assert "verdict" in result.stdout
    assert "noise" in result.stdout
    assert "Speeds of two processes differ by machine noise" in result.stdout
    assert "differs" not in result.stdout  # two prompts are too few
    assert "Only in A, and left out: prompt_lookup." in result.stdout
    assert "Only in B" not in result.stdout


def test_seeds_are_not_negative(run):
    for arguments in (("evaluate", "--prompts", "Hello."), ("compare", "a", "b")):
        result = run(*arguments, "--seed", -1)
        assert result.exit_code == 2
        assert "--seed" in result.output


def test_values_may_be_repeated_or_follow_each_other(run, tiny_pair, maths, tmp_path):
    target, drafter = tiny_pair
    pair = ("--target", target, "--drafter", drafter)
    output = ("--output", tmp_path / "run")
    more = ("--prompts", "Hello.", "And you?", "--schedules", "fixed:1", "--schedules", "fixed:2")
    result = run("evaluate", *pair, "--tasks", maths, *more, *output, *OPTIONS)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [task["prompts"] for task in results["tasks"]] == [2, 2]
    assert [each["kind"] for each in results["contenders"].values()] == ["plain", "drafter", "drafter"]


def test_skipped_prompts_are_counted(run, tiny_embedded_pair, maths, tmp_path):
    with maths.open("a") as stream:
        stream.write("not json\n")
    arguments = ("evaluate", "--tasks", maths, "--output", tmp_path / "run", *OPTIONS)
    with pytest.raises(ValueError, match=r"maths\.jsonl:3: Not JSON.*--skip-bad"):
        run(*arguments)
    result = run(*arguments, "--skip-bad")
    assert result.exit_code == 0, result.output
    assert "1 unusable prompt left out, which report.md names." in result.stdout


def test_what_is_missing_is_said(run):
    for arguments, message in (
        ((), "name tasks with --tasks"),
        (("--tasks", "gsm8k", "--target", "x"), "name the target's drafter with --drafter"),
    ):
        result = run("evaluate", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())
