"""Damaged checkpoints are refused: one clear error that names the checkpoint or file, and the key or field."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_config, edit_weights, weights_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_dspark import AutoDrafter


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


def test_tensor_in_two_shards(any_folder):
    """The file that the index names counts."""
    first, second = split_into_shards(any_folder)
    key = sorted(load_file(first))[0]
    save_file(load_file(second) | {key: load_file(first)[key] + 5}, second)
    assert torch.equal(AutoDrafter.from_pretrained(any_folder).state_dict()[key], load_file(first)[key])


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(any_folder, value):
    weight = weights_of(any_folder)["fc.weight"].clone()
    weight[3, 5] = value
    edit_weights(any_folder, fc__weight=weight)
    assert_refused(any_folder, "model.safetensors", "fc.weight", "NaN or infinite")


def pickle_weights(folder: Path, change=lambda weights: None) -> Path:
    """Turns the weights into a `.bin`, as older projects and transformers write them."""
    weights = weights_of(folder)
    change(weights)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_pickled_weights_load(any_folder):
    whole = AutoDrafter.from_pretrained(any_folder).state_dict()
    pickle_weights(any_folder)
    pickled = AutoDrafter.from_pretrained(any_folder).state_dict()
    assert all(torch.equal(pickled[key], whole[key]) for key in whole)


def test_pickled_weights_cut_off(any_folder):
    file = pickle_weights(any_folder)
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(any_folder, "pytorch_model.bin", "damaged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("fc.weight"), ("missing", "fc.weight")),
        (lambda weights: weights.update({"gate.weight": torch.zeros(3)}), ("unknown", "gate.weight")),
        (lambda weights: weights.update({"fc.weight": torch.zeros(32, 33)}), ("fc.weight", "33")),
        (lambda weights: weights["fc.weight"].fill_(float("nan")), ("pytorch_model.bin", "fc.weight", "NaN")),
    ],
)
def test_pickled_weights_that_do_not_fit(any_folder, change, words):
    pickle_weights(any_folder, change)
    assert_refused(any_folder, *words)


def test_index_without_metadata_loads(any_folder):
    split_into_shards(any_folder)
    index = any_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    AutoDrafter.from_pretrained(any_folder)


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


@pytest.mark.parametrize("name", ["ours_reduced", "speculators", "eagle"])
def test_d2t_that_was_cast_to_floating_point(name, request):
    folder = request.getfixturevalue(name)
    edit_weights(folder, d2t=weights_of(folder)["d2t"].to(torch.bfloat16))
    assert_refused(folder, "d2t", "whole numbers")


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


@pytest.mark.parametrize("name", LAYER_IDS)
def test_layer_ids_below_the_embeddings(name, request):
    """Known to be wrong without the target."""
    folder, (field, place) = request.getfixturevalue(name), LAYER_IDS[name]
    edit_config(folder, **place, **{field: [-2, 0]})
    assert_refused(folder, "config.json", "target_layer_ids")


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


@pytest.mark.parametrize(
    "field",
    [
        "text_config",
        "block_size",
        "sample_from_anchor",
        "format_version",
        "markov_rank",
        "own_head",
        "sliding_causal",
        "window_from_anchor",
    ],
)
def test_field_of_our_own_format_missing(ours, field):
    edit_config(ours, drop=(field,))
    assert_refused(ours, "model_type" if field == "format_version" else f"`{field}` is missing")


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_parameters", "hidden_act", "layer_types", "sliding_window"])
def test_field_of_our_own_transformer_missing(ours, field):
    edit_config(ours, nested="text_config", drop=(field,))
    assert_refused(ours, "config.json", f"`text_config.{field}` is missing")


@pytest.mark.parametrize("field", ["norm_before_residual", "norm_output", "num_drafts"])
def test_field_of_our_own_eagle3_missing(ours_reduced, field):
    edit_config(ours_reduced, drop=(field,))
    assert_refused(ours_reduced, "config.json", f"`{field}` is missing")


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


def test_rotary_base_beside_our_own_settings(ours):
    edit_config(ours, nested="text_config", rope_theta=5.0)
    assert_refused(ours, "config.json", "rope_theta")


@pytest.mark.parametrize("name", ["ours", "zlab", "speculators"])
def test_rotary_settings_by_both_names_contradict_each_other(name, request):
    folder = request.getfixturevalue(name)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    edit_config(folder, nested=PLACES[name], rope_parameters=yarn, rope_scaling={"type": "linear", "factor": 4.0})
    assert_refused(folder, "config.json", "rope_scaling", "rope_parameters")
    same = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_config(folder, nested=PLACES[name], rope_scaling=same)
    assert AutoDrafter.from_pretrained(folder).config.text_config.rope_parameters["factor"] == 4.0


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
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "foo"),
        ("rope_parameters", "x"),
        ("rope_parameters", {"rope_type": "foo", "rope_theta": 1.0}),
        ("head_dim", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", -1),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-6),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0.0}),
        ("sliding_window", 0),
        ("attention_bias", "false"),
        ("use_sliding_window", "false"),
    ],
)
def test_transformer_that_can_not_be(name, field, value, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, nested=PLACES[name], **{field: value})
    named = next(reversed(value)) if isinstance(value, dict) and value["rope_type"] == "default" else field
    assert_refused(folder, "config.json", "rope_type" if "foo" in str(value) and field != "hidden_act" else named)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("zlab", "dflash_config", [1]),
        ("zlab", "rope_scaling", 1),
        ("zlab", "model_type", ["qwen3"]),
        ("ours", "model_type", ["dspark"]),
        ("ours", "text_config", [1]),
        ("speculators", "speculators_config", "x"),
        ("speculators", "transformer_layer_config", [1]),
    ],
)
def test_parts_of_another_shape(name, field, value, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, **{field: value})
    assert_refused(folder, "config.json", f"`{field}`")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("ours", "sample_from_anchor"),
        ("ours", "confidence_head_with_markov"),
        ("ours", "own_head"),
        ("ours_reduced", "norm_before_residual"),
        ("speculators", "sliding_window_non_causal"),
        ("speculators", "enable_confidence_head"),
        ("zlab", "is_causal"),
    ],
)
@pytest.mark.parametrize("value", ["false", 1])
def test_what_is_neither_true_nor_false(name, field, value, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, **{field: value})
    assert_refused(folder, "config.json", f"`{field}` {value!r}")


@pytest.mark.parametrize("value", [0, -3, "7", 2.5, True])
@pytest.mark.parametrize(("name", "field"), [("ours_reduced", "num_drafts"), ("eagle", "ttt_length")])
def test_numbers_of_drafts_that_are_none(name, field, value, request):
    folder = request.getfixturevalue(name)
    edit_config(folder, **{field: value})
    assert_refused(folder, "config.json", f"`{field}` {value!r}")


@pytest.mark.parametrize("value", [0, -1, True, 0.5, "1", None])
def test_version_that_is_none(ours, value):
    edit_config(ours, format_version=value)
    assert_refused(ours, "config.json", f"`format_version` {value}" if value != "1" else "`format_version` '1'")


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_assistant_tokens", True),
        ("verification_schedule", 3),
        ("assistant_confidence_threshold", "x"),
        ("assistant_confidence_threshold", 7.0),
        ("confidence_temperatures", "x"),
        ("confidence_temperatures", [1.0, -1.0]),
        ("draft_context_window", -1),
        ("draft_context_window", "x"),
        ("calibration_temperature", "x"),
    ],
)
def test_decoding_settings_of_another_kind(ours, name, value):
    (ours / "generation_config.json").write_text(json.dumps({name: value}))
    assert_refused(ours, "generation_config.json", f"`{name}`")


# ------------------------------------------------------------------ adapters


@pytest.fixture
def adapters(ours) -> Path:
    """Adapters of the drafter in our own format, in a folder of their own."""
    drafter = get_peft_model(AutoDrafter.from_pretrained(ours), LoraConfig(r=2, target_modules=["q_proj"]))
    drafter.save_pretrained(ours / "adapters")
    edit_adapter_config(ours / "adapters", base_model_name_or_path=str(ours))
    return ours / "adapters"


def edit_adapter_config(folder: Path, **fields) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_adapters(folder: Path, change) -> None:
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


LORA = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_undamaged_adapters_load(adapters):
    assert AutoDrafter.from_pretrained(adapters).has_adapters


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_adapter_config_cut_off(adapters, text):
    (adapters / "adapter_config.json").write_text(text)
    assert_refused(adapters, "adapter_config.json", "damaged")


@pytest.mark.parametrize("field", [{"peft_type": "NEWER"}, {"peft_type": None}, {"r": "two"}])
def test_adapter_config_with_damaged_fields(adapters, field):
    edit_adapter_config(adapters, **field)
    assert_refused(adapters, "adapter")


def test_adapter_weights_cut_off(adapters):
    file = adapters / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(adapters, "adapter_model.safetensors", "cut off")


def test_adapter_weights_missing(adapters):
    (adapters / "adapter_model.safetensors").unlink()
    assert_refused(adapters, "adapter_model.safetensors", "missing", error=OSError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop(LORA), ("missing", "layers.0.self_attn.q_proj.lora_A")),
        (lambda weights: weights.update(gate=torch.zeros(3)), ("unknown", "gate")),
        (lambda weights: weights.update({LORA: torch.zeros(3, 3)}), ("layers.0.self_attn.q_proj.lora_A", "[3, 3]")),
        (lambda weights: weights[LORA].fill_(float("nan")), (LORA, "NaN")),
    ],
)
def test_adapter_weights_that_do_not_fit(adapters, change, words):
    edit_adapters(adapters, change)
    assert_refused(adapters, "adapter_model.safetensors", *words)
