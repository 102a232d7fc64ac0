"""Exports put in place whole or not at all, and what is compared before."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from drafter_cases import make_drafter

from hf_dspark import AutoDrafter
from hf_dspark.checkpoints import WRITERS
from hf_dspark.models import export as export_module


def test_a_checkpoint_is_replaced_only_by_force(tmp_path):
    drafter, folder = make_drafter("dflash"), tmp_path / "x"
    drafter.export(folder, format="speculators")
    before = (folder / "config.json").read_text()
    with pytest.raises(FileExistsError, match=r"is not empty.*force=True \(--force\)"):
        drafter.export(folder)
    assert (folder / "config.json").read_text() == before
    drafter.export(folder, force=True)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "dflash"
    assert list(tmp_path.iterdir()) == [folder]


def test_an_empty_folder_is_filled_and_other_things_stay(tmp_path):
    drafter = make_drafter("dflash")
    (tmp_path / "empty").mkdir()
    drafter.export(tmp_path / "empty")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no drafter, so it is not replaced"):
        drafter.export(tmp_path / "home", force=True)
    with pytest.raises(FileExistsError, match="is a file"):
        drafter.export(tmp_path / "home" / "notes.txt", force=True)
    assert (tmp_path / "home" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_points_to_is_replaced(there, tmp_path):
    drafter, folder, link = make_drafter("dflash"), tmp_path / "real" / "x", tmp_path / "link"
    folder.parent.mkdir()
    link.symlink_to(folder)
    if there:
        drafter.export(folder)
    drafter.export(link, format="speculators", force=True)
    assert link.readlink() == folder
    assert "speculators_version" in json.loads((folder / "config.json").read_text())
    assert (sorted(tmp_path.iterdir()), list(folder.parent.iterdir())) == ([link, folder.parent], [folder])


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("replaced", [False, True])
def test_failure_in_the_middle_leaves_nothing(error, replaced, tmp_path, monkeypatch):
    drafter, folder = make_drafter("dflash"), tmp_path / "x"
    if replaced:
        drafter.export(folder)
    before = sorted(path.name for path in folder.iterdir()) if replaced else None

    def fail(weights, file, metadata):
        Path(file).write_bytes(b"half")
        raise error

    monkeypatch.setattr(export_module, "save_file", fail)
    with pytest.raises(type(error)):
        drafter.export(folder, format="speculators", force=True)
    assert list(tmp_path.iterdir()) == ([folder] if replaced else [])
    if replaced:
        assert sorted(path.name for path in folder.iterdir()) == before
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda config: config.update(block_size=4), "another drafter: block_size, num_drafts changed"),
        (
            lambda config: config["transformer_layer_config"]["rope_parameters"].update(rope_theta=1.0),
            "rope_parameters",
        ),
        (lambda config: config.update(sample_from_anchor=False), "sample_from_anchor changed"),
    ],
)
def test_a_writer_that_errs_is_noticed(damage, message, tmp_path, monkeypatch):
    writer, write = WRITERS["speculators"], WRITERS["speculators"].write_config

    def write_wrongly(config, keys):
        fields = write(config, keys)
        fields["speculators_config"]["proposal_methods"] = []
        damage(fields)
        return fields

    monkeypatch.setattr(writer, "write_config", write_wrongly)
    with pytest.raises(ValueError, match=message):
        make_drafter("dspark").export(tmp_path / "x", format="speculators")
    assert list(tmp_path.iterdir()) == []


def test_changed_tensors_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        WRITERS["speculators"],
        "write_weights",
        lambda weights, config: weights | {"fc.weight": weights["fc.weight"] * 2},
    )
    with pytest.raises(ValueError, match=r"another drafter: fc\.weight changed"):
        make_drafter("dspark").export(tmp_path / "x", format="speculators")


@pytest.mark.parametrize("name", ["deepspec", "speculators", "sglang"])
def test_decoding_settings_travel(name, tmp_path):
    drafter, target = make_drafter("dspark"), make_target("qwen3")
    drafter.generation_config.assistant_confidence_threshold = 0.3
    drafter.generation_config.verification_schedule = "confidence"
    drafter.attach(target).export(tmp_path / "x", format=name)
    settings = AutoDrafter.from_pretrained(tmp_path / "x").generation_config
    assert settings.assistant_confidence_threshold == 0.3
    assert settings.verification_schedule == "confidence"


@pytest.mark.parametrize("name", ["deepspec", "speculators", "sglang"])
def test_the_record_of_the_training_travels(name, tmp_path):
    """So that a card can be written from an export."""
    drafter = make_drafter("dspark").attach(make_target("qwen3"))
    drafter.training_record = {"updates": 4, "data": {"examples": 2}}
    drafter.export(tmp_path / "x", format=name)
    assert AutoDrafter.from_pretrained(tmp_path / "x").training_record == drafter.training_record
    drafter.training_record = None
    drafter.export(tmp_path / "y", format=name)
    assert sorted(path.name for path in (tmp_path / "y").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["speculators", "sglang"])
def test_few_drafts_of_eagle_3_travel_with_their_temperatures(name, tmp_path):
    target, drafter = make_target("llama"), make_drafter("eagle3_few_drafts")
    drafter.generation_config.confidence_temperatures = [1.5, 2.0, 0.5]
    drafter.attach(target).export(tmp_path / "x", format=name)
    again = AutoDrafter.from_pretrained(tmp_path / "x")
    assert again.num_drafts == again.generation_config.num_assistant_tokens == 3
    assert again.generation_config.confidence_temperatures == [1.5, 2.0, 0.5]
    inputs = {"input_ids": torch.arange(1, 9)[None], "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(**inputs, assistant_model=again), target.generate(**inputs))


@pytest.mark.parametrize("name", ["hf-dspark", "speculators"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_named(name, value, tmp_path):
    drafter = make_drafter("dspark")
    drafter.layers[1].mlp.up_proj.weight.data[3, 4] = value
    with pytest.raises(ValueError, match=r"can't be exported: layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        drafter.export(tmp_path / "x", format=name)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_several_types_are_refused(tmp_path):
    drafter = make_drafter("dspark").to(torch.bfloat16)
    drafter.norm.float()
    with pytest.raises(ValueError, match=r"of the types torch\.bfloat16, torch\.float32.*`drafter\.to`"):
        drafter.export(tmp_path / "x")
    drafter.float().export(tmp_path / "x")
    assert AutoDrafter.from_pretrained(tmp_path / "x").dtype == torch.float32


def test_bfloat16_and_the_training_mode_stay(tmp_path):
    drafter = make_drafter("dspark").to(torch.bfloat16).train()
    drafter.export(tmp_path / "x", format="speculators")
    assert drafter.training
    assert not drafter.is_attached
    again = AutoDrafter.from_pretrained(tmp_path / "x")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("name", ["README.md", "optimizer.pt", "plots/mine.svg", "checkpoint-100/config.json"])
def test_what_is_no_part_of_a_checkpoint_is_not_replaced(name, tmp_path):
    drafter = make_drafter("dspark")
    drafter.training_record = {"updates": 4}
    drafter.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    for part in ("custom_generate/generate.py", "plots/training_loss.png"):
        (tmp_path / "out" / part).parent.mkdir()
        (tmp_path / "out" / part).write_text("made by us")
    drafter.export(tmp_path / "out", force=True)
    file = tmp_path / "out" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=f"more than a checkpoint \\(.*{name}\\), and that would be lost"):
        drafter.export(tmp_path / "out", force=True)
    assert file.read_text() == "mine"


def test_force_replaces_neither_a_language_model_nor_the_target_nor_the_source(tmp_path):
    target, drafter = make_target("qwen3"), make_drafter("dspark")
    target.save_pretrained(tmp_path / "target")
    with pytest.raises(FileExistsError, match="target holds no drafter, so it is not replaced"):
        drafter.export(tmp_path / "target", force=True)
    drafter.config.target_name_or_path = str(tmp_path / "target")
    with pytest.raises(FileExistsError, match="target is its target, so it is not replaced"):
        drafter.export(tmp_path / "target", force=True)
    drafter.export(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="mine is the drafter to export, so it is not replaced"):
        AutoDrafter.from_pretrained(tmp_path / "mine").export(tmp_path / "mine", format="speculators", force=True)
    assert type(target).from_pretrained(tmp_path / "target").num_parameters() == target.num_parameters()
    assert AutoDrafter.from_pretrained(tmp_path / "mine").stored_format == "hf-dspark"


def test_a_place_below_a_file_is_none(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt is a file, so that .*x can't be a folder"):
        make_drafter("dflash").export(tmp_path / "notes.txt" / "deep" / "x")


def test_new_parents_go_again_with_what_fails(tmp_path, monkeypatch):
    def fail(drafter, folder):
        (tmp_path / "new" / "note.txt").write_text("somebody else's")
        raise ValueError("another drafter")

    monkeypatch.setattr(export_module, "require_same", fail)
    with pytest.raises(ValueError, match="another drafter"):
        make_drafter("dflash").export(tmp_path / "new" / "newer" / "x")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "new", tmp_path / "new" / "note.txt"]


@pytest.mark.parametrize("mask", [0, 63])
def test_any_mask_token_will_do_where_the_vocabulary_is_the_targets(mask, tmp_path):
    drafter = make_drafter("dflash_masks_only")
    drafter.config.mask_token_id, drafter.config.text_config.vocab_size = mask, 0
    drafter.export(tmp_path / "x")
    assert AutoDrafter.from_pretrained(tmp_path / "x").config.mask_token_id == mask
