"""`hf-dspark card` and `hf-dspark publish`."""

import shutil
import sys

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_dspark.cli import build_app, main


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def folder(tiny_pair, tmp_path):
    return shutil.copytree(tiny_pair[1], tmp_path / "mine")


def test_card(run, folder):
    options = (
        "--license",
        "mit",
        "--language",
        "en",
        "--language",
        "de",
        "--dataset",
        "openai/gsm8k",
        "--tag",
        "fast",
    )
    result = run("card", folder, *options, "--repo-id", "you/mine")
    assert result.exit_code == 0, result.output
    assert "Not known, and said so in it: target, training, evaluation." in result.stdout
    data = ModelCard.load(folder / "README.md").data
    assert (data.license, data.language, data.datasets) == ("mit", ["en", "de"], ["openai/gsm8k"])
    assert "fast" in data.tags
    before = (folder / "README.md").read_text()
    assert run("card", folder, "--license", "apache-2.0").exit_code == 0
    assert (folder / "README.md").read_text() == before.replace("license: mit", "license: apache-2.0").replace(
        "Licence: mit", "Licence: apache-2.0"
    ).replace(digests_of(before), digests_of((folder / "README.md").read_text()))


def digests_of(text):
    return text.split('"digest": ')[1].split("}")[0]


def test_publish_shows_what_it_would_send(run, folder):
    (folder / "scheduler.pt").write_bytes(b"x")
    result = run("publish", folder, "you/mine", "--dry-run", "--private", "--license", "mit", "--no-thinking")
    assert result.exit_code == 0, result.output
    assert "Nothing is sent. To you/mine (main; private) would go:" in result.stdout
    assert "custom_generate/generate.py" in result.stdout
    assert "left out: scheduler.pt." in result.stdout
    assert "license: mit" in result.stdout
    assert not (folder / "README.md").exists()


def test_adapters_are_merged_first(run, folder, tmp_path):
    from peft import LoraConfig
    from peft.functional import inject_adapter_in_model

    from hf_dspark import AutoDrafter, publish_drafter

    drafter = AutoDrafter.from_pretrained(folder)
    config = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(folder))
    inject_adapter_in_model(config, drafter)
    drafter.save_pretrained(tmp_path / "adapters")
    for arguments in (("card",), ("publish", "--dry-run", "you/mine")):
        with pytest.raises(ValueError, match=f"holds adapters of {folder}; merge them first: ") as refused:
            run(*arguments[:1], tmp_path / "adapters", *reversed(arguments[1:]))
    command = str(refused.value).split("hf-dspark ")[1].replace("MERGED", str(tmp_path / "merged"))
    assert run(*command.split()).exit_code == 0
    assert run("card", tmp_path / "merged").exit_code == 0
    text = (tmp_path / "merged" / "README.md").read_text()
    assert "Trained as adapters, which were then merged: LORA of rank 2, alpha 8. Base drafter: `mine`." in text
    assert "Training of the base drafter: not recorded." in text
    with pytest.raises(ValueError, match="Adapters are not published alone"):
        publish_drafter(drafter, "you/mine", dry_run=True)


def test_faults_are_one_line(folder, monkeypatch, capsys):
    (folder / "README.md").write_text("# Mine")
    for arguments, complaint in (
        (("card", str(folder)), "was not made by hf-dspark"),
        (("card", str(folder / "nowhere")), "There is no folder"),
        (("publish", str(folder), "a/b/c", "--dry-run"), "is no name of a repository"),
        (("publish", str(folder), "you/x", "--dry-run", "--force", "--results", str(folder)), "No results.json in"),
        (("card", str(folder), "--license", "\x1b[31mred"), "is no licence identifier"),
    ):
        monkeypatch.setattr(sys, "argv", ["hf-dspark", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = str(stopped.value)
        assert complaint in said
        assert "\n" not in said and "\x1b" not in said


@pytest.mark.parametrize("name", ["\x1b[31mred\x07", "[bold]markup[/bold]", "x" * 5000, "\u202eevil", "🎉 {{ x }}"])
def test_hostile_names_do_no_harm_in_the_terminal(run, folder, name):
    import json

    config = json.loads((folder / "config.json").read_text()) | {"target_name_or_path": name}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name[:100].replace("/", "")).mkdir()
    result = run("publish", folder, "you/mine", "--dry-run")
    assert result.exit_code == 0, result.output
    assert not any(char in result.stdout for char in "\x1b\x07\u202e")
    if "markup" in name:
        assert "[bold]markup" in result.stdout  # printed, not obeyed


def test_card_of_an_evaluated_drafter(run, tiny_pair, folder, tmp_path):
    """What `hf-dspark evaluate` writes is what the card reads."""
    (tmp_path / "sums.jsonl").write_text('{"turns": ["What is 2 + 3?"]}\n{"turns": ["What is 3 + 4?"]}\n')
    run_folder = tmp_path / "run"
    options = ("--tasks", tmp_path / "sums.jsonl", "--max-new-tokens", 12, "--output", run_folder)
    result = run("evaluate", "--target", tiny_pair[0], "--drafter", folder, *options)
    assert result.exit_code == 0, result.output
    result = run("card", folder, "--results", run_folder)
    assert result.exit_code == 0, result.output
    card = ModelCard.load(folder / "README.md")
    assert {result.dataset_name for result in card.data.eval_results} == {"sums"}
    assert {result.metric_type for result in card.data.eval_results} >= {"accepted_length", "speedup"}
    assert "| sums | 2 |" in card.text
    assert "2 of 2" in card.text
    assert "plots/accepted_length.png" in card.text
    assert str(tmp_path) not in card.text + (folder / "results.json").read_text()
    plan = run("publish", folder, "you/mine", "--dry-run")
    assert "plots/accepted_length.png" in plan.stdout
