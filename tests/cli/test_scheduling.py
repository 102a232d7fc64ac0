"""`hf-dspark profile` and `hf-dspark calibrate`."""

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_dspark import AutoDrafter, ThroughputProfile
from hf_dspark.cli import build_app
from hf_dspark.cli.calibrate import calibration_table
from hf_dspark.cli.profile import print_profile
from hf_dspark.evaluation.calibration import Calibration


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_DSPARK_PROFILES", str(tmp_path / "profiles"))
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args])


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"What is {i} + 3?"]}) + "\n" for i in range(4)))
    return file


def test_profile(run, tiny_embedded_pair, tmp_path):
    threads = torch.get_num_threads()
    result = run("profile", "--rows", "1,2", "--context", 4, "--seconds", 0, "--plot", tmp_path / "profile.png")
    assert result.exit_code == 0, result.output
    assert "Milliseconds on" in result.stdout and f"float32, {threads} threads" in result.stdout
    # From now on it is used, which it could not be before.
    generate = ("generate", "Hello", "--max-new-tokens", 6, "--schedule", "throughput", "--dtype", "float32")
    assert run(*generate).exit_code == 0
    # Without being asked for, too, which the statistics then say.
    assert "throughput (this machine was profiled)" in run(*generate[:4], *generate[6:]).stderr
    (file,) = (tmp_path / "profiles").glob("*.json")
    assert sorted(ThroughputProfile.load(file).step_seconds) == [1, 2]
    assert str(file) in result.stdout
    assert (tmp_path / "profile.png").stat().st_size > 10_000


def test_throughput_without_a_profile(run, tiny_embedded_pair):
    result = run("generate", "Hello", "--max-new-tokens", 6, "--schedule", "throughput")
    assert "Measure it once with `hf-dspark profile --target" in str(result.exception)


def test_calibrate(run, prompts, tiny_embedded_pair, tmp_path):
    save = tmp_path / "calibrated"
    save.mkdir()  # an empty folder is as good as none
    options = ("--data", prompts, "--save", save, "--max-new-tokens", 24)
    result = run("calibrate", *options, "--plot", tmp_path / "reliability.png")
    assert result.exit_code == 0, result.output
    assert "ECE" in result.stdout and "greedy" in result.stdout and "mean" in result.stdout
    settings = AutoDrafter.from_pretrained(save).generation_config
    assert len(settings.confidence_temperatures) == 7
    assert settings.calibration_temperature == 0.0
    assert (tmp_path / "reliability.png").stat().st_size > 10_000
    # Its own folder is updated, another one is not overwritten.
    result = run("calibrate", *options, "--target", tiny_embedded_pair[0], "--drafter", save, "--temperature", 1)
    assert result.exit_code == 0, result.output
    assert AutoDrafter.from_pretrained(save).generation_config.calibration_temperature == 1.0
    result = run("calibrate", *options)
    assert isinstance(result.exception, FileExistsError)
    assert "is not empty" in str(result.exception)


def test_tables_fit_80_columns(capsys):
    seconds = {rows: {rows * n: 0.9999 for n in range(1, 9)} for rows in (1, 32)}
    drafts = {rows: dict.fromkeys(range(1, 8), 0.0123) for rows in (1, 32)}
    place = {"processor": "Intel(R) Xeon(R)", "target": {"dtype": "float32"}, "threads": 4}
    accepted = torch.ones(8, 7, dtype=torch.bool)
    accepted[:4, 3:] = False
    console = Console(width=80)
    with console.capture() as captured:
        print_profile(console, ThroughputProfile(seconds, drafts, place))
        console.print(calibration_table(Calibration([8.0] * 7, 0.0, 100, torch.full((8, 7), 0.9), accepted)))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("999.9") == 16 and text.count(" 12.3 ") + text.count(" 12.3\n") == 14
    assert "…" not in text and "nan" not in text


def test_what_is_refused(run, prompts, tiny_embedded_pair, tmp_path):
    for command in (
        ("profile", "--rows", "1,x"),
        ("profile", "--rows", "0"),
        ("profile", "--target", tiny_embedded_pair[0]),
        ("calibrate", "--data", prompts, "--save", tmp_path / "new", "--drafter", tiny_embedded_pair[1]),
    ):
        assert run(*command).exit_code == 2
    for command in (
        ("profile", "--plot", tmp_path / "curve.xyz"),
        ("calibrate", "--data", prompts, "--save", tmp_path / "new", "--plot", tmp_path / "curve.xyz"),
    ):
        assert "End it in .png, .svg, .pdf" in str(run(*command).exception)
    result = run("calibrate", "--data", prompts, "--save", prompts)
    assert "is a file. Name a folder" in str(result.exception)
    prompts.write_text('{"turns": ["x"]}\n{"turns": \n')
    result = run("calibrate", "--data", prompts, "--save", tmp_path / "new")
    assert "prompts.jsonl:2: Not JSON" in str(result.exception)
    assert not (tmp_path / "new").exists()
