"""`hf-dspark train`: ready configurations, dry runs, a short real run on the tiny pair, and refusals."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from hf_dspark import AutoDrafter
from hf_dspark.cli import build_app
from hf_dspark.training.run import CONFIGS, parse_run, shipped_configs


SETTINGS = ("--held_out", 2, "--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(build_app(), ["train", *map(str, args)], catch_exceptions=False)


@pytest.fixture
def answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {i} + 3?"}],
            "completion": [{"role": "assistant", "content": f"It is {i + 3}, as {i} and three more are."}],
        }
        for i in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_ready_configuration_is_valid_and_says_what_was_run(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert "\n# Run here: " in text
    needs = ["--drafter", "some-drafter"] if name in ("lora-domain", "thinking") else []
    run = parse_run(["--config", name, "--train_data", "answers.jsonl", *needs])
    run.check()
    for field, value in yaml.safe_load(text).items():
        part = next(p for p in (run.target, run.drafter, run.data, run.lora, run.run, run.args) if hasattr(p, field))
        found = getattr(part, field)
        assert found == value or str(getattr(found, "value", found)) in (str(value), f"['{value}']", "[]", "False"), (
            field
        )
    batch = run.args.per_device_train_batch_size * run.args.gradient_accumulation_steps
    assert name not in ("qwen3-4b", "qwen3-8b", "gemma4-12b") or batch * 8 == 512


def test_help_teaches_and_names_every_field(run):
    text = run("--help").stdout
    assert text == run().stdout
    for word in ("hf-dspark regenerate", "--dry_run", "--resume", "Accepted length", *shipped_configs()):
        assert word in text
    for field in (
        "--num_anchors",
        "--eval_prompts",
        "--train_heads",
        "--lora_r",
        "--markov_rank",
        "--enable_thinking",
    ):
        assert field in text
    assert "--weight_decay" in run("--help-all").stdout and "--weight_decay" not in text
    assert run("--list").stdout.count("\n") == len(shipped_configs())
    assert run("--show", "embedded").stdout == (CONFIGS / "embedded.yaml").read_text()
    assert "train" in CliRunner().invoke(build_app(), ["--help"]).stdout


def test_the_embedded_configuration_trains_and_resumes(run, answers, tiny_embedded_pair, tmp_path):
    options = ("--config", "embedded", "--train_data", answers, "--output_dir", tmp_path / "out", *SETTINGS)
    options += ("--draft_vocab_size", 48, "--feature_store", tmp_path / "features", "--save_steps", 2)
    options += ("--eval_steps", 2, "--eval_max_new_tokens", 8)
    result = run(*options, "--max_steps", 2)
    assert result.exit_code == 0, result.output
    for expected in ("DSparkDrafter, fresh, 2 layers, 4 drafts a round, 48 of 261 tokens", "8 examples", "2 held out"):
        assert expected in result.stdout
    assert f"The drafter is in {tmp_path / 'out' / 'final'}." in result.stdout
    drafter = AutoDrafter.from_pretrained(tmp_path / "out" / "final")
    assert (drafter.config.draft_vocab_size, drafter.config.markov_rank) == (48, 48)
    resumed = run(*options, "--max_steps", 4, "--resume")
    assert resumed.exit_code == 0, resumed.output
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [e["step"] for e in state["log_history"] if "eval_accepted_length" in e] == [2, 4]


def test_lora_goes_on_from_a_drafter(run, answers, tiny_embedded_pair, tmp_path):
    _, base = tiny_embedded_pair
    options = ("--config", "lora-domain", "--drafter", base, "--train_data", answers, "--lora_r", 2, *SETTINGS)
    options += ("--output_dir", tmp_path / "out", "--max_steps", 2, "--eval_steps", 1, "--save_steps", 1)
    dry = run(*options, "--dry_run")
    assert dry.exit_code == 0, dry.output
    assert "LoRA of rank 2 and whole heads" in dry.stdout
    size = sum(p.numel() for p in AutoDrafter.from_pretrained(base).parameters())
    assert f"{size / 1e6:.2f} M parameters" in dry.stdout
    assert not (tmp_path / "out").exists()
    result = run(*options, "--eval_max_new_tokens", 8)
    assert result.exit_code == 0, result.output
    drafter = AutoDrafter.from_pretrained(tmp_path / "out" / "final")
    assert drafter.has_adapters
    assert drafter.merge_adapters().config.block_size == AutoDrafter.from_pretrained(base).config.block_size


def test_both_thinking_modes_are_evaluated_apart(run, answers, tiny_embedded_pair, tmp_path):
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    for i, row in enumerate(rows):
        row["chat_template_kwargs"] = {"enable_thinking": i % 2 == 0}
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, base = tiny_embedded_pair
    options = ("--config", "thinking", "--target", "embedded", "--target_dtype", "float32", "--drafter", base)
    options += ("--train_data", answers, "--eval_data", answers, "--eval_split", "train", *SETTINGS)
    options += ("--output_dir", tmp_path / "out", "--max_steps", 1, "--eval_steps", 1, "--save_steps", 1)
    options += ("--gradient_accumulation_steps", 2, "--eval_max_new_tokens", 4, "--num_anchors", 4)
    result = run(*options, "--enable_thinking", "as_given")
    assert result.exit_code == 0, result.output
    assert "5 (thinking) and 5 (direct) held out" in result.stdout
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    found = {name for entry in state["log_history"] for name in entry}
    assert {"eval_thinking_accepted_length", "eval_direct_accepted_length", "eval_accepted_length"} <= found
    assert state["best_metric"] > 0
    one_mode = run(*options, "--dry_run", "--enable_thinking", "off")
    assert "; 10 held out" in one_mode.stdout


def test_a_dry_run_prints_the_plan_and_writes_nothing(run, answers, tiny_embedded_pair, tmp_path):
    for kind, name in (("dflash", "DFlashDrafter"), ("eagle3", "Eagle3Drafter")):
        result = run(
            *("--train_data", answers, "--drafter_type", kind, "--block_size", 3, "--dry_run"),
            *("--output_dir", tmp_path / "out", "--num_train_epochs", 3, *SETTINGS),
        )
        assert result.exit_code == 0, result.output
        assert f"{name}, fresh" in result.stdout and "3 drafts a round" in result.stdout
        # 10 examples in batches of 8, three times.
        assert "6 updates of 8 sequences" in result.stdout
        assert "GiB a device" in result.stdout and "Dry run: nothing was trained." in result.stdout
    assert not (tmp_path / "out").exists()


def test_what_is_held_out_leaves_most_of_the_data(run, answers, tiny_embedded_pair, tmp_path):
    options = ("--train_data", answers, "--block_size", 3, "--dry_run", "--output_dir", tmp_path, *SETTINGS)
    options += ("--eval_strategy", "steps", "--eval_steps", 1)
    assert "8 examples" in (plan := run(*options, "--held_out", 64).stdout) and "2 held out" in plan
    assert "9 examples" in (plan := run(*options, "--held_out", 1).stdout) and "1 held out" in plan
    answers.write_text("".join(line + "\n" for line in answers.read_text().splitlines()[:4]))
    with pytest.raises(ValueError, match=r"Too few examples .4..*--held_out 64.*--eval_data"):
        run(*options, "--held_out", 64)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((), "Name the answers to learn from with --train_data"),
        (("--train_data", "x", "--use_lora", "true"), "LoRA adapts a trained drafter"),
        (("--train_data", "x", "--train_heads", "true"), "--train_heads is for LoRA"),
        (("--train_data", "x", "--drafter", "d", "--block_size", "6"), "--block_size is for a fresh drafter"),
        (("--train_data", "x", "--lora_r", "4"), "--lora_r is for adapters: set --use_lora"),
        (("--train_data", "x", "--early_stopping_patience", "2"), "found by evaluating"),
        (("--train_data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--config", "embeded"), "There is no configuration embeded. Ready ones: embedded"),
    ],
)
def test_what_can_not_work_is_refused_in_one_line(arguments, message, tiny_embedded_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    options = ["train", *arguments, "--output_dir", str(tmp_path), "--use_cpu", "true"]
    result = CliRunner().invoke(build_app(), options)
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception)


def test_a_run_in_another_s_folder_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").write_text("{}")
    run = parse_run(["--train_data", "x", "--output_dir", str(tmp_path), "--use_cpu", "true"])
    with pytest.raises(ValueError, match=r"checkpoint-5 is of an earlier run.*--resume"):
        run.check()


def test_settings_without_effect_on_the_data_are_refused(run, answers, tiny_embedded_pair, tmp_path):
    options = ("--train_data", answers, "--output_dir", tmp_path, *SETTINGS)
    with pytest.raises(ValueError, match="is a file and has no splits: drop --train_split test"):
        run(*options, "--train_split", "test")
    with pytest.raises(ValueError, match="--eval_split is of --eval_data"):
        run(*options, "--eval_split", "validation")


def test_a_thinking_mode_is_not_told_to_tokens_of_another(run, answers, tiny_embedded_pair, tmp_path):
    options = ("--train_data", answers, "--output_dir", tmp_path, *SETTINGS, "--dry_run", "--enable_thinking", "on")
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
    thought = row | {"chat_template_kwargs": {"enable_thinking": True}}  # as `regenerate` writes them
    for rows, accepted in (([row], False), ([thought], True), ([{"text": "Hello there."}], False)):
        answers.write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
        if accepted:
            assert run(*options).exit_code == 0
        else:
            with pytest.raises(ValueError, match=r"--enable_thinking as_given.*regenerate --enable-thinking"):
                run(*options)


def test_a_new_run_keeps_the_drafter_of_an_earlier_one(tmp_path):
    (tmp_path / "final").mkdir()
    run = parse_run(["--train_data", "x", "--output_dir", str(tmp_path), "--use_cpu", "true", "--save_strategy", "no"])
    with pytest.raises(ValueError, match="final is the drafter of an earlier run"):
        run.check()


def test_a_mask_token_that_is_none_is_refused(run, answers, tiny_embedded_pair, tmp_path):
    with pytest.raises(ValueError, match="--mask_token <nothing> is no token of the target's tokenizer"):
        run("--train_data", answers, "--output_dir", tmp_path, "--use_cpu", "true", "--mask_token", "<nothing>")


def test_unknown_and_impossible_flags_are_usage_errors(run):
    for arguments, message in (
        (("--num_ankers", "3"), "num_ankers"),
        (("--train_dat", "x"), "do you mean --train_data?"),
        (("--drafter_type", "medusa"), "invalid choice: 'medusa'"),
        (("--lora_r", "many"), "invalid int value: 'many'"),
    ):
        result = run("--train_data", "x", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr and "hf-dspark train --help" in result.stderr


def test_a_mistyped_field_is_named(run, answers):
    result = run("--train_data", answers, "--lern_rate", 1)
    assert result.exit_code == 2
    assert "no field --lern_rate; do you mean --learning_rate?" in result.stderr and "HfArg" not in result.stderr
