"""Exports: read, written and read again, a drafter is the same; what a format can't carry is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from hf_dspark import (
    AutoDrafter,
    DFlashConfig,
    DFlashDrafter,
    DSparkConfig,
    DSparkDrafter,
    Eagle3Config,
    Eagle3Drafter,
)
from hf_dspark.checkpoints import WRITERS
from hf_dspark.checkpoints.capabilities import CAPABILITIES, NORMS, copied_parts, refusals, table
from hf_dspark.checkpoints.engines import servings
from hf_dspark.hub import export as export_module
from hf_dspark.models.vocabulary import draft_vocabulary


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
KINDS = {"dspark": (DSparkConfig, DSparkDrafter), "dflash": (DFlashConfig, DFlashDrafter)}
KINDS |= {"eagle3": (Eagle3Config, Eagle3Drafter)}
LETTERS = {"h": "hf-dspark", "d": "deepspec", "v": "speculators", "s": "sglang", "z": "zlab"}
# Kind, family, fields of the config, fields of the transformer, and the formats that can carry it, by their letters.
CASES = {
    "dspark": ("dspark", "qwen3", {}, {}, "hdvs"),
    "dspark_llama": ("dspark", "llama", {}, {}, "h"),
    "dspark_gated": ("dspark", "qwen3", {"markov_head_type": "gated"}, {}, "hdvs"),
    "dspark_rnn": ("dspark", "qwen3", {"markov_head_type": "rnn"}, {}, "hdvs"),
    "dspark_no_serial_head": ("dspark", "qwen3", {"markov_rank": 0}, {}, "hdv"),
    "dspark_no_confidence": ("dspark", "qwen3", {"enable_confidence_head": False}, {}, "hdvs"),
    "dspark_confidence_alone": ("dspark", "qwen3", {"confidence_head_with_markov": False}, {}, "hdvs"),
    "dspark_masks_only": ("dspark", "qwen3", {"sample_from_anchor": False}, {}, "hv"),
    "dspark_rnn_masks_only": ("dspark", "qwen3", {"sample_from_anchor": False, "markov_head_type": "rnn"}, {}, "h"),
    "dspark_draft_vocabulary": ("dspark", "qwen3", {"draft_vocab_size": 24}, {}, "hv"),
    "dspark_own_parts": ("dspark", "qwen3", {"own_embedding": True, "own_head": True}, {}, "hdv"),
    "dflash": ("dflash", "qwen3", {}, {}, "hdv"),
    "dflash_masks_only": ("dflash", "qwen3", {"sample_from_anchor": False}, {}, "hvsz"),
    "dflash_scaled_rotary": ("dflash", "qwen3", {"sample_from_anchor": False}, {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 64
    }}, "hvsz"),
    "dflash_draft_vocabulary": ("dflash", "qwen3", {"draft_vocab_size": 24}, {}, "hv"),
    "dflash_window": ("dflash", "qwen3", {"sample_from_anchor": False}, SLIDING, "hsz"),
    "dflash_window_causal": (
        "dflash", "qwen3", {"sample_from_anchor": False, "sliding_causal": True}, SLIDING, "hs",
    ),
    "dflash_window_from_anchor": (
        "dflash", "qwen3", {"window_from_anchor": True, "sample_from_anchor": False}, SLIDING, "hv",
    ),
    "dspark_window_from_anchor_causal": (
        "dspark", "qwen3", {"window_from_anchor": True, "sliding_causal": True}, SLIDING, "hv",
    ),
    "eagle3": ("eagle3", "llama", {}, {}, "hvs"),
    "eagle3_qwen3": ("eagle3", "qwen3", {"num_drafts": 9}, {}, "hdv"),
    "eagle3_draft_vocabulary": ("eagle3", "llama", {"draft_vocab_size": 24}, {}, "hvs"),
    "eagle3_own_head": ("eagle3", "llama", {"own_head": True}, {}, "hvs"),
    "eagle3_own_embedding": ("eagle3", "llama", {"own_embedding": True}, {}, "hv"),
    "eagle3_unknown_depth": ("eagle3", "llama", {"target_layer_ids": "eagle3", "num_target_layers": None}, {}, "hvs"),
    "eagle3_fc_norm": ("eagle3", "llama", {"fc_norm": True}, {}, "hvs"),
    "eagle3_norm_before_fc": ("eagle3", "llama", {"norm_before_fc": True}, {}, "hv"),
    "eagle3_norm_before_residual": ("eagle3", "llama", {"norm_before_residual": True}, {}, "hv"),
    "eagle3_norm_output": ("eagle3", "qwen3", {"norm_output": True}, {}, "hv"),
}  # fmt: skip
TRANSFORMER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": False,
}
GOLDEN = ("deepspec/qwen3_dflash", "deepspec/qwen3_dspark_ownhead", "deepspec/qwen3_eagle3", "others/eagle3_official")
GOLDEN += tuple(f"deepspec/gemma4_{case}" for case in ("dflash", "dspark_keqv", "dspark_kv", "eagle3"))
GOLDEN += ("deepspec/gemma4_unified_dspark",)
GOLDEN += ("others/specforge_dflash_swa_training", "others/specforge_dspark_rnn", "others/specforge_eagle3_fc_norm")
GOLDEN += ("others/speculators_dflash_swa_training", "others/speculators_dspark_vanilla_draft_vocab")
GOLDEN += ("others/speculators_dspark_gated_no_anchor", "others/speculators_eagle3_fc_norm_norm_output")
GOLDEN += ("others/transformers_native_dflash_swa", "others/zlab_dflash_nested_swa", "others/zlab_dflash_llama_target")


def make_drafter(case: str):
    """A random drafter; none of its tensors is trivial."""
    kind, family, fields, text, _ = CASES[case]
    text = TRANSFORMER | {"num_hidden_layers": 1 if kind == "eagle3" else 2} | text
    text = (Qwen3Config if family == "qwen3" else LlamaConfig)(**text)
    shared = {"text_config": text, "target_layer_ids": [0, 1, 2], "num_target_layers": 4}
    block = {} if kind == "eagle3" else {"block_size": 5, "mask_token_id": 63}
    heads = {"markov_rank": 8} if kind == "dspark" else {}
    config_class, drafter_class = KINDS[kind]
    torch.manual_seed(1)
    drafter = drafter_class(config_class(**(shared | block | heads | fields))).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    if drafter.config.draft_vocab_size:
        d2t, t2d = draft_vocabulary(torch.rand(64), 24)
        drafter.d2t.copy_(d2t)
        drafter.t2d.copy_(t2d)
    return drafter


def formats_of(case: str) -> list[str]:
    return [LETTERS[letter] for letter in CASES[case][-1]]


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
    with pytest.raises(FileExistsError, match=r"holds no checkpoint .*so it is not replaced"):
        drafter.export(tmp_path / "home", force=True)
    with pytest.raises(FileExistsError, match="is a file"):
        drafter.export(tmp_path / "home" / "notes.txt", force=True)
    assert (tmp_path / "home" / "notes.txt").read_text() == "mine"


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
        (lambda config: config.update(block_size=4), "another drafter: block_size changed"),
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


def test_bfloat16_and_the_training_mode_stay(tmp_path):
    drafter = make_drafter("dspark").to(torch.bfloat16).train()
    drafter.export(tmp_path / "x", format="speculators")
    assert drafter.training
    assert not drafter.is_attached
    again = AutoDrafter.from_pretrained(tmp_path / "x")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in drafter.state_dict().items())


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
        ("eagle3", "sglang", '"method": "eagle3"', "EAGLE3"),
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


def test_folders_beside_a_checkpoint_are_not_replaced(tmp_path):
    drafter = make_drafter("dspark")
    drafter.export(tmp_path / "out")
    (tmp_path / "out" / "checkpoint-100").mkdir()
    with pytest.raises(FileExistsError, match="more than a checkpoint \\(checkpoint-100\\)"):
        drafter.export(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "checkpoint-100").is_dir()
