"""What goes wrong with adapters is told by name, and leaves the drafter as it was."""

import json

import pytest
import torch
from drafter_cases import make_drafter
from peft import LoraConfig
from peft.functional import inject_adapter_in_model
from safetensors.torch import load_file, save_file

from hf_dspark import AutoDrafter, DSparkDrafter


@pytest.fixture
def folders(tmp_path):
    """A base drafter, and two sets of adapters for it."""
    make_drafter("dspark").save_pretrained(tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        drafter = AutoDrafter.from_pretrained(tmp_path / "base")
        base = str(tmp_path / "base")
        whole = ["fc"] if name == "two" else None
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=whole, base_model_name_or_path=base)
        inject_adapter_in_model(config, drafter)
        torch.manual_seed(seed)
        for parameter in (p for p in drafter.parameters() if p.requires_grad):
            parameter.data.normal_()
        drafter.save_pretrained(tmp_path / name)
    return tmp_path


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def lose_a_weight(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop(sorted(weights)[-1])
    save_file(weights, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_weight, "weights are missing or unknown"),
        (lambda folder: change_config(folder, r=4), "don't fit this drafter"),
        (lambda folder: change_config(folder, target_modules=["nothing"]), "don't fit this drafter"),
    ],
)
@pytest.mark.parametrize("has_others", [False, True])
def test_adapters_that_do_not_fit_leave_the_drafter_as_it_was(folders, damage, message, has_others):
    damage(folders / "two")
    drafter = AutoDrafter.from_pretrained(folders / ("one" if has_others else "base"))

    def state():
        return {name: (p.requires_grad, p.clone()) for name, p in drafter.named_parameters()}

    before = state()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            drafter.load_adapter(folders / "two", adapter_name="other")
    after = state()
    assert drafter.has_adapters == has_others
    assert list(after) == list(before)
    assert all(flag == after[n][0] and torch.equal(p, after[n][1]) for n, (flag, p) in before.items())
    drafter.load_adapter(folders / "one", adapter_name="other")


def test_several_active_adapters_are_not_saved_as_one(folders):
    drafter = AutoDrafter.from_pretrained(folders / "one")
    drafter.load_adapter(folders / "two", adapter_name="other")
    drafter.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="one set of adapters, and default, other are active"):
        drafter.save_pretrained(folders / "both")
    assert not (folders / "both").exists()


def test_disabled_adapters_are_not_merged(folders):
    drafter = AutoDrafter.from_pretrained(folders / "one")
    drafter.disable_adapters()
    with pytest.raises(ValueError, match=r"are disabled\. Call `drafter\.enable_adapters"):
        drafter.merge_adapters()
    drafter.enable_adapters()
    assert not drafter.merge_adapters().has_adapters


@pytest.mark.parametrize("load", [AutoDrafter.from_pretrained, DSparkDrafter.from_pretrained])
@pytest.mark.parametrize(
    ("base", "error", "message"),
    [
        (5, ValueError, "5 is no name"),
        (["base"], ValueError, "is no name"),
        ("/nowhere/at/all", OSError, "'/nowhere/at/all' is not there"),
        ("../nowhere", OSError, "'../nowhere' is not there"),
        (".", ValueError, "holds adapters itself"),
        ("../one", ValueError, "holds adapters itself"),
    ],
)
def test_a_base_that_is_none_is_named(folders, load, base, error, message):
    change_config(folders / "two", base_model_name_or_path=base)
    with pytest.raises(error, match=r"adapter_config\.json: `base_model_name_or_path` .*" + message):
        load(folders / "two")


def test_a_base_is_looked_for_from_its_adapters(folders, monkeypatch, tmp_path_factory):
    expected = AutoDrafter.from_pretrained(folders / "one").state_dict()
    change_config(folders / "one", base_model_name_or_path="../base")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    found = AutoDrafter.from_pretrained(folders / "one").state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
