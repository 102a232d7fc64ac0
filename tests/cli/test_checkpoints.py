"""`hf-dspark convert` and `hf-dspark inspect`."""

import json
import shlex

import pytest
import torch
from conftest import make_target
from drafter_cases import CASES, make_drafter
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.checkpoints.capabilities import CAPABILITIES
from hf_dspark.cli import build_app


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a tiny Qwen3 target and of drafters of each kind for it."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target("qwen3")
    target.save_pretrained(root / "target")
    settings = {"mask_token_id": 63, "block_size": 5, "target_name_or_path": "some/target"}
    DSparkDrafter.from_target(target, markov_rank=8, **settings).save_pretrained(root / "dspark")
    DFlashDrafter.from_target(target, **settings).save_pretrained(root / "dflash")
    Eagle3Drafter.from_target(target, target_layer_ids=[0, 1, 2]).save_pretrained(root / "eagle3")
    return root


def test_convert_there_and_back(run, pair, tmp_path):
    result = run("convert", pair / "dspark", tmp_path / "vllm", "--to", "speculators")
    assert result.exit_code == 0, result.output
    assert "hf-dspark to speculators, " in result.stdout
    assert result.stdout.rstrip().endswith("MB, read back and compared.")
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["speculators_model_type"] == "dspark"
    assert (
        "speculators to hf-dspark" in run("convert", tmp_path / "vllm", tmp_path / "ours", "--to", "hf-dspark").stdout
    )
    ours = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert ours.state_dict().keys() == AutoDrafter.from_pretrained(pair / "dspark").state_dict().keys()


def test_convert_takes_copies_from_the_target(run, pair, tmp_path):
    with pytest.raises(ValueError, match=r"stores copies of the target's token embedding and LM head.*--target"):
        run("convert", pair / "dspark", tmp_path / "x", "--to", "deepspec")
    result = run("convert", pair / "dspark", tmp_path / "x", "--to", "deepspec", "--target", pair / "target")
    assert result.exit_code == 0, result.output
    # And back to a format that leaves them out.
    with pytest.raises(ValueError, match="always take the target's token embedding and LM head"):
        run("convert", tmp_path / "x", tmp_path / "y", "--to", "sglang")
    result = run("convert", tmp_path / "x", tmp_path / "y", "--to", "sglang", "--target", pair / "target")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_convert_refuses_by_name(run, pair, tmp_path):
    with pytest.raises(ValueError, match=r"The format 'zlab' can't carry this drafter: it holds DFlash drafters only"):
        run("convert", pair / "eagle3", tmp_path / "x", "--to", "zlab")
    assert run("convert", pair / "eagle3", tmp_path / "x", "--to", "gguf").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_convert_overwrites_only_with_force(run, pair, tmp_path):
    run("convert", pair / "eagle3", tmp_path / "x", "--to", "hf-dspark")
    with pytest.raises(FileExistsError, match="is not empty"):
        run("convert", pair / "dflash", tmp_path / "x", "--to", "speculators")
    assert run("convert", pair / "dflash", tmp_path / "x", "--to", "speculators", "--force").exit_code == 0
    assert AutoDrafter.from_pretrained(tmp_path / "x").config.source_format == "speculators"


def test_convert_never_replaces_the_target(run, pair):
    target = pair / "target"
    before = {file: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(FileExistsError, match="target is its target, so it is not replaced"):
        run("convert", pair / "dspark", target, "--to", "deepspec", "--target", target, "--force")
    assert {file: file.read_bytes() for file in target.iterdir()} == before


@pytest.mark.parametrize("stored_as", ["hf-dspark", "speculators"])
def test_convert_carries_the_weights_as_the_files_hold_them(run, stored_as, tmp_path):
    """Whatever type the config names: here bfloat16, over float32 weights and a norm in bfloat16."""
    make_drafter("dspark").export(tmp_path / "mine", format=stored_as)
    file, config = (tmp_path / "mine" / name for name in ("model.safetensors", "config.json"))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    weights = load_file(file)
    weights["norm.weight"] = weights["norm.weight"].bfloat16()
    save_file(weights, file, {"format": "pt"})
    for name in ("hf-dspark", "speculators", "sglang"):
        result = run("convert", tmp_path / "mine", tmp_path / name, "--to", name)
        assert result.exit_code == 0, result.output
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == weights.keys()
        assert all(torch.equal(written[key], tensor.float()) for key, tensor in weights.items())
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "float32"
        assert AutoDrafter.from_pretrained(tmp_path / name).dtype == torch.float32
    assert "MB in float32" in run("inspect", tmp_path / "mine").stdout


@pytest.mark.parametrize("inside", ["", "vllm", "deep/er"])
def test_convert_leaves_its_source_alone(run, pair, inside, tmp_path):
    AutoDrafter.from_pretrained(pair / "dspark").save_pretrained(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    before = sorted(tmp_path.rglob("*"))
    for source in ("mine", "link"):
        with pytest.raises(ValueError, match="is, or is inside, the checkpoint to convert"):
            run("convert", tmp_path / source, tmp_path / "mine" / inside, "--to", "speculators", "--force")
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_help_tells_what_formats_carry(run):
    text = " ".join(run("convert", "--help").stdout.split())
    assert "zlab: DFlash: qwen3; masks only; full vocabulary" in text
    assert "speculators: DSpark: qwen3; any vocabulary." in text


def test_inspect(run, pair):
    result = run("inspect", pair / "dspark")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for fact in (
        "DSpark with qwen3 layers; format hf-dspark",
        "target some/target",
        "hidden size 32",
        "4 heads, 2 for keys and values",
        "5 a round, at once: blocks of 5, every slot proposes, mask 63",
        "vanilla serial head of rank 8, confidence head",
        "vocabulary 64",
        "outputs of the target layers 1 of 4",
        "MB in float32",
        "borrowed token embedding and LM head, from the target",
        "deepspec yes, with --target",
        "speculators yes",
        "zlab no: it holds DFlash drafters only",
        "vLLM 0.33.0 (read from its sources, not run here), the checkpoint as it is no: it doesn't know DSpark",
        "vLLM 0.33.0 (read from its sources, not run here), from --to speculators vllm serve some/target",
        "SGLang 0.5.23 (read from its sources, not run here), from --to sglang python -m sglang.launch_server",
    ):
        assert fact in text, fact
    # Command lines are not broken, so that they can be copied.
    lines = [line.strip() for line in result.stdout.splitlines()]
    speculation = '{"method": "dspark", "model": "dspark-speculators", "num_speculative_tokens": 5}'
    assert f"vllm serve some/target --speculative-config '{speculation}'" in lines
    assert any(line.startswith("python -m sglang.launch_server --model-path some/target") for line in lines)


def test_inspect_tells_what_was_assumed_and_what_is_refused(run, pair, tmp_path):
    run("convert", pair / "eagle3", tmp_path / "x", "--to", "speculators", "--target", pair / "target")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    text = " ".join(run("inspect", tmp_path / "x", "--target", "my/target").stdout.split())
    assert "assumed target_layer_ids = EAGLE-3's own three layers" in text
    assert "LM head in the file, dropped where equal to the target's" in text
    assert "sglang no: its EAGLE-3 drafters have llama layers, this one has qwen3 layers" in text
    assert f'vllm serve my/target --speculative-config \'{{"method": "eagle3", "model": "{tmp_path / "x"}"' in text
    text = " ".join(run("inspect", pair / "dflash").stdout.split())
    assert "no: its DFlash proposes from the mask slots only" in text


def test_command_lines_survive_names_with_spaces(run, pair, tmp_path):
    folder = tmp_path / 'my drafter\'s "best"'
    AutoDrafter.from_pretrained(pair / "dspark").export(folder, format="speculators")
    lines = run("inspect", folder, "--target", "my target").stdout.splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith(("  hf-dspark", "  vllm", "  python"))]
    ours, vllm, sglang = commands
    assert ours == ["hf-dspark", "generate", "PROMPT", "--target", "my target", "--drafter", str(folder)]
    assert vllm[:4] == ["vllm", "serve", "my target", "--speculative-config"]
    assert json.loads(vllm[4])["model"] == str(folder)
    assert sglang[-1] == f"{folder.name}-sglang"


def test_convert_merges_adapters(run, tmp_path):
    folder = spread(tmp_path / "adapters", "adapters")
    result = run("convert", folder, tmp_path / "merged", "--to", "hf-dspark")
    assert result.exit_code == 0, result.output
    assert f"PEFT adapters merged into {folder / 'base'} to hf-dspark" in result.stdout
    expected = AutoDrafter.from_pretrained(folder).merge_adapters().state_dict()
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())
    before = load_file(folder / "base" / "model.safetensors")
    assert any(not torch.equal(before[key], tensor) for key, tensor in written.items())
    record = json.loads((tmp_path / "merged" / "training_record.json").read_text())
    assert (record["adapters"]["base"], record["adapters"]["target_modules"]) == ("base", ["q_proj"])
    # A base is not replaced by what was made of it: its adapters would be merged twice.
    with pytest.raises(ValueError, match="is, or is inside, the checkpoint to convert"):
        run("convert", folder, folder / "base", "--to", "hf-dspark", "--force")


def test_merging_rounds_nothing(run, tmp_path):
    """Adapters in float32 on a base in bfloat16."""
    folder = spread(tmp_path / "adapters", "adapters")
    AutoDrafter.from_pretrained(folder / "base").bfloat16().save_pretrained(folder / "base")
    run("convert", folder, tmp_path / "merged", "--to", "hf-dspark")
    assert AutoDrafter.from_pretrained(tmp_path / "merged").dtype == torch.float32


def test_inspect_tells_of_adapters(run, tmp_path):
    folder = spread(tmp_path / "adapters", "adapters")
    text = " ".join(run("inspect", folder).stdout.split())
    size = sum(p.numel() for p in AutoDrafter.from_pretrained(folder / "base").parameters())
    held = sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert f"adapters LORA of rank 2, {held} parameters base" in text
    assert f"size {size:,} parameters" in text
    assert "as it is no: it doesn't know DSpark drafters in the format PEFT adapters" in text


def test_inspect_calls_exports_like_the_folder_it_stands_in(run, pair, monkeypatch):
    monkeypatch.chdir(pair / "eagle3")
    assert '"model": "eagle3-speculators"' in run("inspect", ".").stdout


def spread(root, case):
    """A folder of a drafter: one of the cases that tests of formats have, or something that happens to checkpoints."""
    if case in CASES:
        make_drafter(case).save_pretrained(root)
    elif case == "copies":
        make_drafter("dspark").attach(make_target("qwen3")).export(root, format="deepspec")
    elif case == "vocabulary_of_the_target":
        drafter = make_drafter("dflash_masks_only")
        drafter.config.text_config.vocab_size = 0
        drafter.save_pretrained(root)
    elif case == "own_parts_and_unknown_depth":
        drafter = make_drafter("eagle3_own_parts_qwen3")
        drafter.config.target_layer_ids, drafter.config.num_target_layers = "eagle3", None
        drafter.save_pretrained(root)
    elif case == "adapters":
        from peft import LoraConfig
        from peft.functional import inject_adapter_in_model

        drafter = make_drafter("dspark")
        drafter.save_pretrained(root / "base")
        config = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(root / "base"))
        inject_adapter_in_model(config, drafter)
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
        drafter.save_pretrained(root)
    return root


@pytest.mark.parametrize(
    "case",
    [
        *("dspark", "dspark_llama", "dspark_no_heads", "dspark_draft_vocabulary", "dspark_own_parts"),
        *("dflash_masks_only", "eagle3_qwen3", "eagle3_draft_vocabulary", "eagle3_own_head", "eagle3_unknown_depth"),
        *("copies", "vocabulary_of_the_target", "own_parts_and_unknown_depth", "adapters"),
    ],
)
def test_inspect_says_what_convert_does(run, pair, case, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    folder = spread(tmp_path / case, case)
    lines = run("inspect", folder).stdout.splitlines()
    table = [line.split(maxsplit=1) for line in lines if line.split(" ")[0] in CAPABILITIES]
    assert [name for name, _ in table] == list(CAPABILITIES)
    for name, verdict in table:
        verdict = verdict.strip()
        alone = outcome(run, folder, tmp_path / f"{name}-alone", name)
        attached = outcome(run, folder, tmp_path / f"{name}-attached", name, "--target", pair / "target")
        if verdict == "yes":
            assert (alone, attached) == ("", ""), name
        elif verdict.startswith("yes, with --target"):
            assert "--target" in alone
            if "if its own parts are copies" not in verdict or case == "copies":
                assert attached == "", name
        else:
            reasons = verdict.removeprefix("no: ")
            assert reasons in alone
            assert reasons in attached


def outcome(run, source, destination, name, *options):
    """Nothing where the conversion succeeds, else its message."""
    try:
        result = run("convert", source, destination, "--to", name, *options)
    except ValueError as error:
        assert not destination.exists()
        return str(error)
    assert result.exit_code == 0, result.output
    return ""
