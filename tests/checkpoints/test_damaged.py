"""Damaged checkpoints are refused: one clear error that names the checkpoint or file, and the key or field."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file, save_file

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


def edit_config(folder: Path, drop: tuple = (), nested: str | None = None, **fields) -> None:
    """Sets and drops fields of a config.json, or of a `nested` part of it."""
    config = json.loads((folder / "config.json").read_text())
    part = config[nested] if nested else config
    part.update(fields)
    for name in drop:
        del part[name]
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, drop: tuple = (), **tensors: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors") | {k.replace("__", "."): t for k, t in tensors.items()}
    save_file({k: t for k, t in weights.items() if k not in drop}, folder / "model.safetensors")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="session")
def target():
    return make_target("qwen3")


@pytest.fixture
def ours(target, tmp_path) -> Path:
    """A DSpark drafter in our own format."""
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, markov_rank=8, block_size=4)
    drafter.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def ours_reduced(target, tmp_path) -> Path:
    """An EAGLE-3 drafter with a reduced vocabulary in our own format."""
    counts = torch.arange(64) % 7
    drafter = Eagle3Drafter.from_target(
        target, draft_vocab_size=16, token_counts=counts, target_layer_ids=[1, 1, 0], init_from_target=False
    )
    drafter.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def zlab(target, tmp_path) -> Path:
    """A DFlash drafter as z-lab writes them."""
    drafter = DFlashDrafter.from_target(target, mask_token_id=63, block_size=4, sample_from_anchor=False)
    drafter.save_pretrained(tmp_path)
    nested = {"mask_token_id": 63, "target_layer_ids": drafter.config.target_layer_ids}
    theirs = {"architectures": ["DFlashDraftModel"], "num_target_layers": 4, "block_size": 4, "dflash_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(drafter.config.text_config.to_dict() | theirs))
    return tmp_path


@pytest.fixture
def speculators(target, tmp_path) -> Path:
    """A DSpark drafter with a reduced vocabulary as speculators writes them."""
    drafter = DSparkDrafter.from_target(
        target,
        mask_token_id=63,
        markov_rank=8,
        block_size=4,
        draft_vocab_size=16,
        token_counts=torch.arange(64) % 7,
    )
    drafter.save_pretrained(tmp_path)
    config = drafter.config
    theirs = {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": 4,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 16,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "mask_token_id": 63,
        "sample_from_anchor": True,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]},
        "speculators_model_type": "dspark",
        "speculators_version": "0.8.0",
        "transformer_layer_config": config.text_config.to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    return tmp_path


@pytest.fixture
def eagle(ours_reduced) -> Path:
    """An EAGLE-3 drafter as the method's authors write them."""
    config = json.loads((ours_reduced / "config.json").read_text())
    theirs = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 16}
    (ours_reduced / "config.json").write_text(json.dumps(config["text_config"] | theirs))
    weights = {k.replace("layers.0.", "midlayer."): t for k, t in weights_of(ours_reduced).items()}
    save_file(weights, ours_reduced / "model.safetensors")
    return ours_reduced


@pytest.fixture(params=["ours", "zlab", "speculators"])
def any_folder(request) -> Path:
    return request.getfixturevalue(request.param)


def assert_refused(folder: Path, *words: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        AutoDrafter.from_pretrained(folder)
    message = str(caught.value)
    for word in (str(folder), *words):
        assert word in message, f"{word!r} is not in: {message}"
    assert len(message.splitlines()) <= 4, message


@pytest.mark.parametrize("name", ["ours", "ours_reduced", "zlab", "speculators", "eagle"])
def test_undamaged_they_load(name, request, target):
    AutoDrafter.from_pretrained(request.getfixturevalue(name)).attach(target)


# ------------------------------------------------------------------ weights


def test_key_missing(any_folder):
    edit_weights(any_folder, drop=("layers.0.mlp.up_proj.weight",))
    assert_refused(any_folder, "missing", "layers.0.mlp.up_proj.weight")


def test_key_unknown(any_folder):
    edit_weights(any_folder, gate__weight=torch.zeros(3))
    assert_refused(any_folder, "unknown", "gate.weight")


def test_key_of_the_wrong_shape(any_folder):
    edit_weights(any_folder, fc__weight=torch.zeros(32, 33))
    assert_refused(any_folder, "fc.weight", "33")


def test_truncated_file(any_folder):
    file = any_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(any_folder, "model.safetensors", "cut off")


def test_file_that_is_no_safetensors(any_folder):
    (any_folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert_refused(any_folder, "model.safetensors", "damaged")


def split_into_shards(folder: Path) -> list[Path]:
    weights, weight_map, shards = weights_of(folder), {}, []
    for i, keys in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        shards.append(folder / f"model-0000{i + 1}-of-00002.safetensors")
        save_file({k: weights[k] for k in keys}, shards[-1])
        weight_map |= dict.fromkeys(keys, shards[-1].name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return shards


def test_shards_load(any_folder):
    whole = AutoDrafter.from_pretrained(any_folder).state_dict()
    split_into_shards(any_folder)
    parts = AutoDrafter.from_pretrained(any_folder).state_dict()
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


def test_shard_missing(any_folder):
    shard = split_into_shards(any_folder)[1]
    shard.unlink()
    assert_refused(any_folder, shard.name, ".weight", error=OSError)


def test_half_a_shard(any_folder):
    shard = split_into_shards(any_folder)[1]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert_refused(any_folder, shard.name, "cut off")


def test_shard_without_a_promised_tensor(any_folder):
    shard = split_into_shards(any_folder)[0]
    tensors = load_file(shard)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, shard)
    assert_refused(any_folder, shard.name, lost)


def test_index_without_a_map(any_folder):
    split_into_shards(any_folder)
    (any_folder / "model.safetensors.index.json").write_text('{"metadata": {')
    assert_refused(any_folder, "model.safetensors.index.json")


def test_no_weights_at_all(any_folder):
    (any_folder / "model.safetensors").unlink()
    assert_refused(any_folder, "weights are missing", error=OSError)


class _RunsCode:
    def __reduce__(self):
        return print, ("this must not run",)


def test_pickled_code_is_not_run(eagle, capsys):
    (eagle / "model.safetensors").unlink()
    with open(eagle / "pytorch_model.bin", "wb") as file:
        pickle.dump({"fc.weight": _RunsCode()}, file, protocol=2)
    assert_refused(eagle, "pytorch_model.bin", "run code")
    assert "this must not run" not in capsys.readouterr().out


def test_weights_that_hold_integers(any_folder):
    """Quantized weights would be taken for their integers."""
    edit_weights(any_folder, fc__weight=weights_of(any_folder)["fc.weight"].to(torch.int8))
    assert_refused(any_folder, "fc.weight", "integers")


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/elsewhere.safetensors", 5, None])
def test_index_that_names_no_file_beside_it(any_folder, name):
    split_into_shards(any_folder)
    index = any_folder / "model.safetensors.index.json"
    weight_map = dict.fromkeys(json.loads(index.read_text())["weight_map"], name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_refused(any_folder, "model.safetensors.index.json", "weight_map")


# ------------------------------------------------------------------ the draft vocabulary


@pytest.mark.parametrize("name", ["ours_reduced", "speculators", "eagle"])
@pytest.mark.parametrize("offset", [64, -64])
def test_d2t_out_of_range(name, offset, request):
    folder = request.getfixturevalue(name)
    d2t = weights_of(folder)["d2t"].clone()
    d2t[3] = offset
    edit_weights(folder, d2t=d2t)
    assert_refused(folder, "d2t", "outside 0..63")


@pytest.mark.parametrize("name", ["ours_reduced", "speculators", "eagle"])
def test_d2t_missing(name, request):
    folder = request.getfixturevalue(name)
    edit_weights(folder, drop=("d2t",))
    assert_refused(folder, "missing", "d2t")


@pytest.mark.parametrize("name", ["ours_reduced", "speculators", "eagle"])
def test_d2t_that_repeats_a_token(name, request):
    folder = request.getfixturevalue(name)
    d2t = weights_of(folder)["d2t"].clone()
    d2t[1] = d2t[0] - 1
    edit_weights(folder, d2t=d2t)
    assert_refused(folder, "d2t", "two draft tokens")


@pytest.mark.parametrize("name", ["ours_reduced", "speculators", "eagle"])
def test_d2t_and_t2d_contradict_each_other(name, request):
    folder = request.getfixturevalue(name)
    edit_weights(folder, t2d=~weights_of(folder)["t2d"])
    assert_refused(folder, "d2t", "t2d", "disagree")


@pytest.mark.parametrize("name", ["speculators", "eagle"])
def test_t2d_follows_from_d2t(name, request):
    folder = request.getfixturevalue(name)
    whole = weights_of(folder)["t2d"]
    edit_weights(folder, drop=("t2d",))
    assert torch.equal(AutoDrafter.from_pretrained(folder).t2d, whole)


def test_draft_vocabulary_of_another_size(speculators):
    edit_config(speculators, draft_vocab_size=17)
    assert_refused(speculators, "d2t", "17")


def test_draft_vocabulary_larger_than_the_whole(speculators):
    edit_config(speculators, draft_vocab_size=100)
    assert_refused(speculators, "draft_vocab_size", "100")


def test_map_without_a_reduced_vocabulary(speculators):
    edit_config(speculators, draft_vocab_size=64)
    assert_refused(speculators, "d2t", "draft_vocab_size")


# ------------------------------------------------------------------ config.json


def test_config_cut_off(any_folder):
    file = any_folder / "config.json"
    file.write_text(file.read_text()[:-20])
    assert_refused(any_folder, "config.json", "damaged")


LAYER_IDS = {
    "ours": ("target_layer_ids", {}),
    "zlab": ("target_layer_ids", {"nested": "dflash_config"}),
    "speculators": ("aux_hidden_state_layer_ids", {}),
}


@pytest.mark.parametrize("name", LAYER_IDS)
def test_layer_ids_missing(name, request):
    folder, (field, place) = request.getfixturevalue(name), LAYER_IDS[name]
    edit_config(folder, drop=(field,), **place)
    assert_refused(folder, "config.json", field)


@pytest.mark.parametrize("name", ["ours", "zlab"])
def test_layer_ids_out_of_range(name, request):
    folder, (field, place) = request.getfixturevalue(name), LAYER_IDS[name]
    edit_config(folder, **place, **{field: [0, 3]})
    assert_refused(folder, "config.json", field, "[3]")


def test_layer_ids_out_of_range_of_the_target(speculators, target):
    """This format doesn't say how deep the target is."""
    edit_config(speculators, aux_hidden_state_layer_ids=[4])
    drafter = AutoDrafter.from_pretrained(speculators)
    with pytest.raises(ValueError, match=re.escape("`target_layer_ids` [3]")):
        drafter.attach(target)


@pytest.mark.parametrize("name", LAYER_IDS)
def test_mask_token_missing(name, request):
    folder = request.getfixturevalue(name)
    place = LAYER_IDS[name][1]
    edit_config(folder, drop=("mask_token_id",), **place)
    assert_refused(folder, "config.json", "mask_token_id")


@pytest.mark.parametrize("name", LAYER_IDS)
def test_mask_token_out_of_range(name, request):
    folder = request.getfixturevalue(name)
    place = LAYER_IDS[name][1]
    edit_config(folder, mask_token_id=64, **place)
    assert_refused(folder, "config.json", "mask_token_id", "64")


def test_block_size_of_the_wrong_type(any_folder):
    edit_config(any_folder, block_size="four")
    assert_refused(any_folder, "config.json", "block_size")


def test_block_convention_missing(speculators):
    edit_config(speculators, drop=("sample_from_anchor",))
    assert_refused(speculators, "config.json", "sample_from_anchor")


def test_block_convention_against_the_format(zlab):
    edit_config(zlab, sample_from_anchor=True)
    assert_refused(zlab, "config.json", "sample_from_anchor")


def test_block_convention_against_the_number_of_drafts(speculators):
    edit_config(speculators, sample_from_anchor=False)
    assert_refused(speculators, "config.json", "sample_from_anchor", "speculative_tokens")


def test_field_given_twice_and_differently(zlab):
    edit_config(zlab, nested="dflash_config", block_size=8)
    assert_refused(zlab, "config.json", "block_size", "[8, 4]")


def test_sliding_layers_without_a_window(zlab):
    edit_config(zlab, layer_types=["sliding_attention"], sliding_window=None)
    assert_refused(zlab, "config.json", "sliding_window")


def test_rotary_bases_contradict_each_other(zlab):
    edit_config(zlab, rope_theta=5.0, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert_refused(zlab, "config.json", "rope_theta")


def test_unknown_head_type(speculators):
    edit_config(speculators, markov_head_type="transformer")
    assert_refused(speculators, "config.json", "markov_head_type", "transformer")


def test_newer_version_of_our_own_format(ours):
    edit_config(ours, format_version=99)
    assert_refused(ours, "config.json", "format_version", "99")


def test_field_of_a_newer_speculators(speculators):
    edit_config(speculators, speculators_version="9.0", label_shift=2)
    assert_refused(speculators, "config.json", "label_shift", "9.0")


def test_field_of_a_newer_dflash(zlab):
    edit_config(zlab, nested="dflash_config", convolution=4)
    assert_refused(zlab, "config.json", "convolution")


def test_unknown_method_of_speculators(speculators):
    edit_config(speculators, speculators_model_type="medusa")
    assert_refused(speculators, "config.json", "medusa")


def test_language_model_instead_of_a_drafter(target, tmp_path):
    target.save_pretrained(tmp_path)
    assert_refused(tmp_path, "qwen3", "Qwen3ForCausalLM")


PLACES = {"ours": "text_config", "zlab": None, "speculators": "transformer_layer_config"}


@pytest.mark.parametrize("name", PLACES)
def test_sizes_that_no_memory_holds(name, request):
    """Refused by the shapes alone: nothing of that size is made."""
    folder = request.getfixturevalue(name)
    edit_config(folder, nested=PLACES[name], hidden_size=10**7)
    assert_refused(folder, "fc.weight", "10000000")


@pytest.mark.parametrize("name", PLACES)
def test_another_number_of_layers(name, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, nested=PLACES[name], num_hidden_layers=10**6, layer_types=None)
    assert_refused(folder, "config.json", "num_hidden_layers")


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("field", "value"), [("hidden_act", "foo"), ("rope_parameters", "x"), ("head_dim", 0)])
def test_transformer_that_can_not_be_built(name, field, value, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, nested=PLACES[name], **{field: value})
    assert_refused(folder)


@pytest.mark.parametrize("value", [[0.5], ["a"], [True], [[1]], 3])
@pytest.mark.parametrize("name", LAYER_IDS)
def test_layer_ids_that_are_no_whole_numbers(name, value, request):
    folder, (field, place) = request.getfixturevalue(name), LAYER_IDS[name]
    edit_config(folder, **place, **{field: value})
    assert_refused(folder, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 2.5), ("block_size", True), ("block_size", 0), ("mask_token_id", 1.5), ("mask_token_id", True)],
)
def test_numbers_of_another_type(ours, field, value):
    edit_config(ours, **{field: value})
    assert_refused(ours, "config.json", field)


@pytest.mark.parametrize("name", ["ours", "speculators"])
def test_truth_of_another_type(name, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, enable_confidence_head="no")
    assert_refused(folder, "config.json", "enable_confidence_head")


def test_state_of_an_rnn_head_that_begins_elsewhere(speculators):
    edit_config(speculators, markov_head_type="rnn", sample_from_anchor=False, speculators_config={})
    assert_refused(speculators, "config.json", "markov_head_type", "sample_from_anchor")


@pytest.mark.parametrize("text", ["{", "[1]", '{"num_assistant_tokens": "x"}', '{"num_assistant_tokens": 99}'])
def test_decoding_settings(any_folder, text):
    (any_folder / "generation_config.json").write_text(text)
    assert_refused(any_folder, "generation_config.json")
