"""What loading takes from the files, what from the caller, and what it says of both."""

import itertools
import json

import pytest
import torch
from checkpoint_files import edit_config, weights_of
from conftest import make_target
from safetensors.torch import save_file
from transformers import AutoModel

from hf_dspark import AutoDrafter, DFlashConfig, DFlashDrafter, DSparkDrafter
from hf_dspark.checkpoints import weights_dtype


HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def rewrite_as_speculators(drafter, folder, **fields) -> None:
    drafter.save_pretrained(folder)
    config = drafter.config
    theirs = {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": 63,
        "sample_from_anchor": True,
        "speculators_model_type": "dspark",
        "transformer_layer_config": config.text_config.to_dict(),
    }
    (folder / "config.json").write_text(json.dumps(theirs | fields))


@pytest.mark.parametrize(
    ("rank", "kind", "confidence"),
    [
        *itertools.product([8], ["vanilla", "gated", "rnn"], [(True, True), (True, False), (False, False)]),
        (0, "vanilla", (True, False)),
        (0, "vanilla", (False, False)),
    ],
)
def test_heads_that_the_config_leaves_out_are_read_off_the_weights(rank, kind, confidence, target, tmp_path):
    fields = dict(zip(HEADS, (rank, kind, *confidence)))
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, block_size=4, num_hidden_layers=1, **fields)
    rewrite_as_speculators(drafter, tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert {name: getattr(loaded.config, name) for name in HEADS} == fields
    assert set(loaded.config.assumed) >= set(HEADS[:3])
    assert ("confidence_head_with_markov" in loaded.config.assumed) is confidence[0]
    rewrite_as_speculators(drafter, tmp_path, **fields)
    assert AutoDrafter.from_pretrained(tmp_path).config.assumed == {}


@pytest.mark.parametrize("name", ["ours", "zlab", "speculators"])
def test_fields_that_the_caller_gives_replace_the_checkpoints(name, request):
    folder = request.getfixturevalue(name)
    if name == "speculators":
        edit_config(folder, drop=("speculators_config",))
    whole = AutoDrafter.from_pretrained(folder)
    for load in (AutoDrafter, type(whole)):
        drafter = load.from_pretrained(folder, block_size=3)
        assert drafter.config.block_size == 3
        assert drafter.generation_config.num_assistant_tokens == drafter.num_drafts == whole.num_drafts - 1
    with pytest.raises(ValueError, match=r"`target_layer_ids` \[-9\]"):
        AutoDrafter.from_pretrained(folder, target_layer_ids=[-9])
    with pytest.raises(TypeError, match=f"{type(whole).__name__}.*block_sise"):
        AutoDrafter.from_pretrained(folder, block_sise=3)


def test_fields_and_configs_given_to_automodel(ours):
    assert AutoModel.from_pretrained(ours, block_size=3).num_drafts == 3
    config = DSparkDrafter.from_pretrained(ours).config
    config.block_size = 2
    assert DSparkDrafter.from_pretrained(ours, config=config).num_drafts == 2
    assert DSparkDrafter.from_pretrained(ours, config=config, block_size=3).num_drafts == 3
    with pytest.raises(ValueError, match="DFlashConfig"):
        DSparkDrafter.from_pretrained(ours, config=DFlashConfig(target_layer_ids=[0], mask_token_id=1))


def test_a_config_for_another_projects_checkpoint_is_refused(zlab):
    config = DFlashDrafter.from_pretrained(zlab).config
    with pytest.raises(ValueError, match="another project's format"):
        DFlashDrafter.from_pretrained(zlab, config=config)


@pytest.mark.parametrize("model_type", ["dflash", "dspark", None])
def test_a_model_type_of_ours_in_another_projects_config(model_type, zlab):
    """The layers' family is then the project's, and that is recorded."""
    whole = AutoDrafter.from_pretrained(zlab)
    edit_config(zlab, model_type=model_type)
    drafter = AutoDrafter.from_pretrained(zlab)
    assert (drafter.config.source_format, drafter.config.text_config.model_type) == ("zlab", "qwen3")
    assert set(drafter.config.assumed) == {"text_config.model_type"}
    assert drafter.config.text_config.to_dict() == whole.config.text_config.to_dict()
    assert all(torch.equal(tensor, whole.state_dict()[key]) for key, tensor in drafter.state_dict().items())


def test_a_model_type_of_ours_in_an_eagle_config(eagle):
    edit_config(eagle, model_type="eagle3")
    # This one has the layers of its target, a Qwen3.
    with pytest.raises(ValueError, match="q_norm"):
        AutoDrafter.from_pretrained(eagle)


def test_a_variant_of_the_weights(ours):
    drafter = AutoDrafter.from_pretrained(ours)
    drafter.save_pretrained(ours, variant="half")
    (ours / "model.safetensors").unlink()
    assert torch.equal(AutoDrafter.from_pretrained(ours, variant="half").fc.weight, drafter.fc.weight)
    with pytest.raises(OSError, match=r"no model\.safetensors"):
        AutoDrafter.from_pretrained(ours)


@pytest.mark.parametrize("name", ["ours", "zlab", "speculators"])
def test_the_type_is_the_configs_as_in_transformers_and_said_where_the_file_differs(name, request, caplog):
    folder = request.getfixturevalue(name)
    stored = weights_of(folder)["fc.weight"].dtype
    edit_config(folder, dtype="bfloat16")
    assert AutoDrafter.from_pretrained(folder).dtype == torch.bfloat16
    assert f"says torch.bfloat16, the weights are stored as {stored}" in caplog.text
    caplog.clear()
    assert AutoDrafter.from_pretrained(folder, dtype=torch.float32).dtype == torch.float32
    edit_config(folder, drop=("dtype",))
    assert AutoDrafter.from_pretrained(folder, dtype="auto").dtype == stored
    assert "are stored as" not in caplog.text


def test_what_lies_in_a_subfolder(tmp_path):
    drafter = DSparkDrafter.from_target(make_target(), mask_token_id=63, markov_rank=8, num_hidden_layers=1)
    drafter.training_record = {"steps": 3}
    drafter.generation_config.num_assistant_tokens = 2
    drafter.save_pretrained(tmp_path / "inner")
    loaded = AutoDrafter.from_pretrained(tmp_path, subfolder="inner")
    assert loaded.training_record == {"steps": 3}
    assert loaded.generation_config.num_assistant_tokens == 2


def test_the_folder_of_a_training_is_no_checkpoint_but_names_one(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-9" / "config.json").write_text("{}")
    (tmp_path / "checkpoint-10" / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"has no config.json: .* result is .*checkpoint-10\.$"):
        AutoDrafter.from_pretrained(tmp_path)
    (tmp_path / "final" / "adapter_config.json").write_text("{}")
    with pytest.raises(OSError, match=r"has no config.json: .* result is .*final\.$"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["ours", "zlab", "speculators"])
def test_fields_that_nothing_knows_are_named(name, request, caplog):
    folder = request.getfixturevalue(name)
    AutoDrafter.from_pretrained(folder)
    assert "nothing here knows" not in caplog.text
    nested = {"ours": "text_config", "speculators": "transformer_layer_config"}.get(name)
    edit_config(folder, nested=nested, brand_new=1)
    AutoDrafter.from_pretrained(folder)
    assert "nothing here knows" in caplog.text
    assert "brand_new" in caplog.text


def test_a_misspelt_field_of_our_own_is_named(ours, caplog):
    edit_config(ours, window_from_anchr=True)
    AutoDrafter.from_pretrained(ours)
    assert "window_from_anchr" in caplog.text


def test_a_path_that_leads_to_no_folder(ours):
    with pytest.raises(OSError, match="no folder"):
        AutoDrafter.from_pretrained(ours / "elsewhere")
    with pytest.raises(OSError, match="is a file"):
        DSparkDrafter.from_pretrained(str(ours / "config.json"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, None])
def test_weights_of_no_type_that_computes(dtype, zlab):
    """The narrowest type that holds them is asked for before they are looked at."""
    weights = {} if dtype is None else {key: tensor.to(dtype) for key, tensor in weights_of(zlab).items()}
    save_file(weights, zlab / "model.safetensors")
    with pytest.raises(ValueError, match=str(zlab)):
        AutoDrafter.from_pretrained(zlab, dtype=weights_dtype(zlab))


def test_the_narrowest_type_of_float8_weights(zlab):
    weights = weights_of(zlab)
    save_file({key: tensor.to(torch.float8_e4m3fn) for key, tensor in weights.items()}, zlab / "model.safetensors")
    assert weights_dtype(zlab) == torch.float32
