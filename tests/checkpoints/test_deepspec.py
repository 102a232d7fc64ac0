"""DeepSpec checkpoints: recognised by architecture and keys, read without guessing, kept whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


DATA = Path(__file__).resolve().parents[1] / "parity" / "data"
CLASSES = {
    "qwen3_dspark_vanilla": DSparkDrafter,
    "qwen3_dspark_rnn": DSparkDrafter,
    "qwen3_dflash": DFlashDrafter,
    "qwen3_eagle3": Eagle3Drafter,
}


@pytest.fixture
def copy(tmp_path):
    """A checkpoint to damage."""

    def copied(name: str = "qwen3_dspark_vanilla"):
        return Path(shutil.copytree(DATA / name / "drafter", tmp_path / name))

    return copied


def reconfigure(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        config.pop(name, None) if value is None else config.update({name: value})
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", CLASSES)
def test_loads_by_class_and_automatically(name):
    folder = DATA / name / "drafter"
    for load in (CLASSES[name], AutoDrafter):
        drafter = load.from_pretrained(folder)
        assert type(drafter) is CLASSES[name]
        assert drafter.config.name_or_path == str(folder)
    # All that the file has: an unattached drafter leaves out nothing.
    stored = load_file(folder / "model.safetensors")
    assert set(drafter.state_dict()) == set(stored)
    assert all(torch.equal(drafter.state_dict()[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", CLASSES)
def test_copies_are_dropped_at_attach(name, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(DATA / name / "target")
    drafter = AutoDrafter.from_pretrained(DATA / name / "drafter").attach(target)
    assert drafter.embed_tokens is drafter.lm_head is None
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("embed_tokens" in key or "lm_head" in key for key in stored)
    # Saved as ours, it is loaded as ours.
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == CLASSES[name].config_class.model_type
    again = AutoDrafter.from_pretrained(tmp_path)
    assert type(again) is CLASSES[name]
    assert again.config.target_layer_ids == drafter.config.target_layer_ids


def test_an_unattached_drafter_saves_what_its_file_had(tmp_path):
    AutoDrafter.from_pretrained(DATA / "qwen3_dflash" / "drafter").save_pretrained(tmp_path)
    theirs, ours = (
        load_file(DATA / "qwen3_dflash" / "drafter" / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
def test_a_head_of_its_own_is_kept(part, copy, tmp_path):
    folder = copy()
    rewrite(folder, lambda weights: weights[f"{part}.weight"].add_(0.01))
    target = AutoModelForCausalLM.from_pretrained(DATA / "qwen3_dspark_vanilla" / "target")
    drafter = AutoDrafter.from_pretrained(folder).attach(target)
    expected = load_file(folder / "model.safetensors")[f"{part}.weight"]
    assert torch.equal(getattr(drafter, part).weight, expected)
    drafter.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[f"{part}.weight"], expected)


def test_sharded_weights(copy):
    folder = copy()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, keys in shards.items():
        save_file({key: weights[key] for key in keys}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    state = AutoDrafter.from_pretrained(folder).state_dict()
    assert set(state) == set(weights)
    assert all(torch.equal(state[key], weights[key]) for key in weights)


def test_decoding_settings_beside_their_weights(copy):
    """Their checkpoints have none; a file put there is honoured."""
    folder = copy()
    (folder / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": 3}))
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("qwen3_dspark_vanilla", "target_layer_ids", "no `target_layer_ids`.*can't be guessed"),
        ("qwen3_eagle3", "target_layer_ids", "no `target_layer_ids`.*can't be guessed"),
        ("qwen3_dflash", "mask_token_id", "`mask_token_id` is missing"),
        ("qwen3_dflash", "block_size", "`block_size` is missing"),
    ],
)
def test_conventions_are_never_guessed(name, missing, message, copy):
    folder = copy(name)
    reconfigure(folder, **{missing: None})
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_last_layer_is_no_feature(copy):
    folder = copy()
    reconfigure(folder, target_layer_ids=[0, 2, 5])
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[5\] are outside -1..4"):
        AutoDrafter.from_pretrained(folder)


def test_unknown_architecture(copy):
    folder = copy()
    reconfigure(folder, architectures=["Qwen3TreeModel"])
    with pytest.raises(ValueError, match=r"no drafter checkpoint that hf-dspark knows: .*'qwen3'.*Qwen3TreeModel"):
        AutoDrafter.from_pretrained(folder)


def test_loaded_as_another_kind():
    with pytest.raises(ValueError, match=r"checkpoint of the type 'dspark', not 'dflash'.*AutoDrafter"):
        DFlashDrafter.from_pretrained(DATA / "qwen3_dspark_vanilla" / "drafter")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("hidden_norm.weight"), r"missing keys \['hidden_norm.weight'\]"),
        (lambda w: w.pop("lm_head.weight"), r"missing keys \['lm_head.weight'\]"),
        (lambda w: w.update({"tree.weight": torch.zeros(2)}), r"unknown keys \['tree.weight'\]"),
        (lambda w: w.update({"fc.weight": torch.zeros(3, 3)}), r"misshapen fc.weight \(3, 3\)"),
    ],
)
def test_keys_that_do_not_fit(change, message, copy):
    folder = copy()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_folder_without_weights(copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"has a config.json but no model.safetensors: the weights are missing"):
        AutoDrafter.from_pretrained(folder)


def test_folder_without_config(copy):
    folder = copy()
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"config.json"):
        AutoDrafter.from_pretrained(folder)
