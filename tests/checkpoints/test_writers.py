"""Exports: read, written and read again, a drafter is the same; what a format can't carry is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import make_target
from drafter_cases import CASES, formats_of, make_drafter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter
from hf_dspark.checkpoints import WRITERS
from hf_dspark.checkpoints.capabilities import CAPABILITIES, NORMS, copied_parts, refusals, table
from hf_dspark.checkpoints.engines import servings


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
GOLDEN = ("deepspec/qwen3_dflash", "deepspec/qwen3_dspark_ownhead", "deepspec/qwen3_eagle3", "others/eagle3_official")
GOLDEN += tuple(f"deepspec/gemma4_{case}" for case in ("dflash", "dspark_keqv", "dspark_kv", "eagle3"))
GOLDEN += ("deepspec/gemma4_unified_dspark",)
GOLDEN += ("others/specforge_dflash_swa_training", "others/specforge_dspark_rnn", "others/specforge_eagle3_fc_norm")
GOLDEN += ("others/speculators_dflash_swa_training", "others/speculators_dspark_vanilla_draft_vocab")
GOLDEN += ("others/speculators_dspark_gated_no_anchor", "others/speculators_eagle3_fc_norm_norm_output")
GOLDEN += ("others/transformers_native_dflash_swa", "others/zlab_dflash_nested_swa", "others/zlab_dflash_llama_target")


@torch.no_grad()
def propose(drafter):
    generator = torch.Generator().manual_seed(3)
    config = drafter.config
    features = torch.randn(1, 20, config.num_features * config.target_hidden_size, generator=generator)
    tokens = torch.randint(config.vocab_size - 1, (1, 20), generator=generator)
    cache = drafter.new_cache()
    drafter.extend(cache, features, tokens)
    return drafter.propose(cache, tokens[:, -1], min(4, drafter.num_drafts))


def assert_same(drafter, again, target):
    """Equal tensors and equal proposals, both attached: copies of the target's are then dropped."""
    drafter, again = drafter.attach(target), again.attach(target)
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    first, second = propose(drafter), propose(again)
    assert torch.equal(first.tokens, second.tokens)
    torch.testing.assert_close(first.confidences, second.confidences)
    assert drafter.generation_config.num_assistant_tokens == again.generation_config.num_assistant_tokens


def engines_of(config, checkpoint="x"):
    return servings(config, checkpoint, "T", config.source_format)


@pytest.mark.parametrize(("case", "name"), [(case, name) for case in CASES for name in formats_of(case)])
def test_there_and_back(case, name, tmp_path):
    """In the format, from it into ours, and from ours into it again."""
    drafter, target = make_drafter(case), make_target("qwen3", tie_word_embeddings=True)
    folder = drafter.attach(target).export(tmp_path / "there", format=name)
    again = AutoDrafter.from_pretrained(folder)
    assert type(again) is type(drafter)
    assert_same(drafter, again, target)
    again.export(tmp_path / "ours")
    back = AutoDrafter.from_pretrained(tmp_path / "ours").attach(target)
    back.export(tmp_path / "back", format=name)
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in ("there", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    if name != "hf-dspark":
        configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("there", "back")]
        assert configs[0] == configs[1]


@pytest.mark.parametrize("case", CASES)
def test_the_table_says_what_can_be_carried(case, tmp_path):
    drafter = make_drafter(case).attach(make_target("qwen3"))
    for name in CAPABILITIES:
        assert (not refusals(drafter.config, name)) is (name in formats_of(case)), name
        if name not in formats_of(case):
            with pytest.raises(ValueError, match=f"The format '{name}' can't carry this drafter: .*Formats that can"):
                drafter.export(tmp_path / name, format=name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", GOLDEN)
def test_recorded_drafters(case, shared, tmp_path):
    folder = shared / "golden" / case
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    drafter = AutoDrafter.from_pretrained(folder / "drafter").attach(target)
    carried = [name for name in CAPABILITIES if not refusals(drafter.config, name)]
    for name in carried:
        drafter.export(tmp_path / name, format=name)
        assert_same(drafter, AutoDrafter.from_pretrained(tmp_path / name), target)
    # Back in the format it came from, if that is one we write.
    assert drafter.config.source_format not in WRITERS or drafter.config.source_format in carried


@pytest.mark.parametrize(
    ("case", "name", "message"),
    [
        (
            "dspark_llama",
            "deepspec",
            "its DSpark drafters have qwen3 or gemma4_text layers, this one has llama layers",
        ),
        ("eagle3", "zlab", "it holds DFlash drafters only, this one is EAGLE-3"),
        ("dflash", "sglang", r"only the mask slots of a block propose there \(`sample_from_anchor` is True here\)"),
        ("dflash_masks_only", "deepspec", r"every slot of a block proposes there"),
        ("dspark_draft_vocabulary", "sglang", r"no reduced draft vocabulary for DSpark \(`draft_vocab_size`\)"),
        ("dspark_own_parts", "sglang", "always take the target's token embedding and LM head, and this drafter has"),
        ("dspark_no_serial_head", "sglang", r"have a serial head \(`markov_rank` is 0 here\)"),
        ("dflash_window", "speculators", "no sliding layers with `window_from_anchor` False"),
        ("eagle3_norm_output", "deepspec", "it can't say `norm_output`"),
    ],
)
def test_refusals_name_the_reason(case, name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_drafter(case).export(tmp_path / "x", format=name)


def test_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="Unknown format 'gguf'; available: hf-dspark, deepspec"):
        make_drafter("dspark").export(tmp_path / "x", format="gguf")


@pytest.mark.parametrize(
    ("case", "name", "parts"),
    [
        ("dspark", "deepspec", "token embedding and LM head"),
        ("eagle3", "speculators", "token embedding and LM head"),
        ("eagle3_draft_vocabulary", "sglang", "LM head"),
    ],
)
def test_copies_come_from_the_attached_target(case, name, parts, tmp_path):
    drafter, target = make_drafter(case), make_target("qwen3")
    with pytest.raises(ValueError, match=rf"stores copies of the target's {parts}.*attach\(target\)` first.*--target"):
        drafter.export(tmp_path / "x", format=name)
    copies = copied_parts(drafter.config, name)
    drafter.attach(target).export(tmp_path / "x", format=name)
    stored = load_file(tmp_path / "x" / "model.safetensors")
    assert {key.removesuffix(".weight") for key in stored} >= set(copies)
    head = target.get_output_embeddings().weight
    rows = head if drafter.draft_ids is None else head[drafter.draft_ids]
    assert torch.equal(stored["lm_head.weight"], rows)
    # The drafter itself still borrows them.
    assert drafter.lm_head is None


def test_a_vocabulary_left_to_the_target_is_named(tmp_path):
    drafter = make_drafter("dflash_masks_only")
    drafter.config.text_config.vocab_size = 0
    with pytest.raises(ValueError, match=r"names the size of the vocabulary.*attach\(target\)"):
        drafter.export(tmp_path / "x", format="zlab")
    drafter.attach(make_target("qwen3")).export(tmp_path / "x", format="zlab")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["vocab_size"] == 64


def test_what_engines_look_for(tmp_path):
    """Names and places as read from vLLM 0.28.0 and 0.33.0, and from SGLang 0.5.23."""
    target = make_target("qwen3")
    read = lambda: json.loads((tmp_path / "x" / "config.json").read_text())  # noqa: E731
    make_drafter("dspark").export(tmp_path / "x", format="speculators")
    config = read()
    # With a model type vLLM would not take it for speculators'.
    assert "model_type" not in config
    assert config["speculators_model_type"] == "dspark"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert "name_or_path" in config["speculators_config"]["verifier"]
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["sample_from_anchor"] is True
    # False would make vLLM's DFlash causal in layers that are not sliding.
    assert config["sliding_window_non_causal"] is True
    make_drafter("dspark").export(tmp_path / "x", format="sglang", force=True)
    config = read()
    assert (config["architectures"], config["markov_rank"]) == (["DSparkDraftModel"], 8)
    assert config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    make_drafter("eagle3").attach(target).export(tmp_path / "x", format="sglang", force=True)
    config, weights = read(), load_file(tmp_path / "x" / "model.safetensors")
    # No size: the engine then takes the target's head.
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], None)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert "midlayer.self_attn.q_proj.weight" in weights


@pytest.mark.parametrize(
    ("case", "vllm", "sglang"),
    [
        ("dspark", '"method": "dspark", "model": "x-speculators", "num_speculative_tokens": 5', "DSPARK"),
        ("dflash", None, None),
        ("dflash_masks_only", '"method": "dflash"', "DFLASH"),
        ("dspark_gated", None, "DSPARK"),
        ("dspark_window_from_anchor_causal", '^VLLM_USE_V2_MODEL_RUNNER=1 .*"method": "dspark"', None),
        ("eagle3", '"method": "eagle3"', "EAGLE3 .*--speculative-num-steps 7 .*--speculative-num-draft-tokens 8"),
        ("eagle3_own_embedding", '"method": "eagle3"', "EAGLE3"),
    ],
)
def test_engines(case, vllm, sglang):
    found = servings(make_drafter(case).config, "some/x", "T", "hf-dspark")
    # No engine knows our own format.
    assert all(serving.reasons for serving in found if serving.format is None)
    exports = [serving for serving in found if serving.format]
    for serving, expected in zip(exports, (vllm, sglang), strict=True):
        assert bool(serving.reasons) is (expected is None), serving
        if expected is not None:
            assert re.search(expected, serving.command)


@pytest.mark.parametrize(
    ("case", "name", "vllm", "sglang"),
    [
        ("dspark", "deepspec", '"method": "dspark"', "DSPARK"),
        ("dspark_gated", "deepspec", None, "DSPARK"),
        ("dflash", "deepspec", None, None),
        ("eagle3_qwen3", "deepspec", None, None),
        ("dspark", "speculators", '"method": "dspark"', None),
        ("dflash_masks_only", "zlab", '"method": "dflash".*"num_speculative_tokens": 4', "DFLASH"),
        ("dflash_window", "zlab", "^VLLM_USE_V2_MODEL_RUNNER=1 vllm serve T", "DFLASH"),
        ("dflash_window_causal", "sglang", '"method": "dflash"', "DFLASH"),
        ("dspark", "sglang", None, "DSPARK"),
        ("eagle3", "sglang", None, "EAGLE3"),
    ],
)
def test_engines_that_take_a_checkpoint_as_it_is(case, name, vllm, sglang, tmp_path):
    drafter = make_drafter(case).attach(make_target("qwen3"))
    folder = drafter.export(tmp_path / "x", format=name)
    config = AutoDrafter.from_pretrained(folder).config
    direct = [serving for serving in engines_of(config, str(folder)) if serving.format is None]
    for serving, expected in zip(direct, (vllm, sglang), strict=True):
        assert bool(serving.reasons) is (expected is None), serving
        if expected is not None:
            assert re.search(expected, serving.command)
            assert str(folder) in serving.command


@pytest.mark.parametrize("case", ["gemma4_dspark_keqv", "gemma4_eagle3"])
def test_engines_of_gemma_4(case, shared):
    config = AutoDrafter.from_pretrained(shared / "golden" / "deepspec" / case / "drafter").config
    able = [(serving.engine.split()[0], serving.format) for serving in engines_of(config) if not serving.reasons]
    assert able == ([("vLLM", None)] if "dspark" in case else [])


def test_an_unspoken_convention_that_engines_read_otherwise(shared):
    """z-lab's own code sees both ways in sliding layers; engines don't, unless the config says so."""
    config = AutoDrafter.from_pretrained(shared / "golden" / "others" / "zlab_dflash_nested_swa" / "drafter").config
    direct, export = [[s for s in engines_of(config) if bool(s.format) is exported] for exported in (False, True)]
    assert all("causal where the config doesn't say" in serving.reasons[0] for serving in direct)
    assert [serving.format for serving in export if not serving.reasons] == ["sglang"]


def test_the_table_is_in_the_guide():
    text = GUIDE.read_text(encoding="utf-8")
    rows = table()
    for row in [dict(zip(rows[0], rows[0])), *rows]:
        assert f"| {' | '.join(row.values())} |" in text
    assert set(CAPABILITIES) == {"hf-dspark", *WRITERS}
    assert CAPABILITIES["hf-dspark"].norms == NORMS


def test_a_checkpoint_saved_again_is_in_our_format(tmp_path):
    """What engines make of a folder depends on its files, not on where the drafter first came from."""
    make_drafter("dspark").export(tmp_path / "vllm", format="speculators")
    read = AutoDrafter.from_pretrained(tmp_path / "vllm")
    read.save_pretrained(tmp_path / "ours")
    again = AutoDrafter.from_pretrained(tmp_path / "ours")
    assert (read.stored_format, again.stored_format) == ("speculators", "hf-dspark")
    assert read.config.source_format == again.config.source_format == "speculators"
    direct = [s for s in servings(again.config, "ours", "T", again.stored_format) if s.format is None]
    assert all("in the format hf-dspark" in serving.reasons[0] for serving in direct)
