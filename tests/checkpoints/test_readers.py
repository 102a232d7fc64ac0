"""Layouts and defaults of other projects' configs, beyond what the recorded cases have."""

import pytest
from transformers import Qwen3Config

from hf_dspark.checkpoints import FORMATS
from hf_dspark.checkpoints.engines import SGLANG, VLLM, servings
from hf_dspark.models.blocks import Window
from hf_dspark.models.dflash.configuration_dflash import DFlashConfig
from hf_dspark.models.eagle3.configuration_eagle3 import Eagle3Config


TRANSFORMER = {
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "vocab_size": 64,
}
BLOCK = {"block_size": 8, "mask_token_id": 63, "target_layer_ids": [0, 2]}
ZLAB = {**TRANSFORMER, "architectures": ["DFlashDraftModel"], "num_target_layers": 6}
EAGLE = {**TRANSFORMER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
EAGLE["draft_vocab_size"] = 16
SPECULATORS = {
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": 8,
    "mask_token_id": 63,
    "speculators_model_type": "dflash",
    "transformer_layer_config": TRANSFORMER,
}
SPECULATORS_EAGLE = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {**TRANSFORMER, "num_hidden_layers": 1},
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "norm_before_residual": True,
}


def read(config: dict, keys: tuple = ()):
    """The type, and our complete config."""
    model_type, reader = next((t, reader) for reader in FORMATS if (t := reader.recognise(config)) is not None)
    config_class = {"dflash": DFlashConfig, "eagle3": Eagle3Config}[model_type]
    ours = config_class(**reader.read_config(config, keys))
    ours.require_complete()
    return model_type, ours


def without_reasons(config) -> dict:
    return {k: v for k, v in config.to_dict().items() if k != "assumed"}


def test_zlab_nested_flat_and_mixed_are_the_same():
    _, nested = read({**ZLAB, "dflash_config": BLOCK})
    _, flat = read({**ZLAB, **BLOCK})
    mixed = {k: v for k, v in BLOCK.items() if k != "block_size"}
    _, mixed = read({**ZLAB, "block_size": 8, "dflash_config": mixed})
    assert nested.to_dict() == flat.to_dict() == mixed.to_dict()
    assert (nested.block_size, nested.mask_token_id, nested.target_layer_ids) == (8, 63, [0, 2])
    assert nested.num_drafts == 7


@pytest.mark.parametrize("draft_vocab_size", [None, 64])
def test_sliding_layers_are_causal_in_specforge_and_not_in_zlab(draft_vocab_size):
    """Their configs don't say, so what is taken for granted is recorded."""
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
    config = {**ZLAB, **sliding, "dflash_config": BLOCK}
    if draft_vocab_size:
        config["draft_vocab_size"] = draft_vocab_size
    _, ours = read(config)
    assert ours.source_format == ("specforge" if draft_vocab_size else "zlab")
    assert ours.sliding_causal is (draft_vocab_size is not None)
    assert "sliding_causal" in ours.assumed
    assert ours.window(0) == Window(9, from_anchor=False, causal=ours.sliding_causal)
    _, told = read({**config, "dflash_config": {**BLOCK, "is_causal": False}})
    assert told.sliding_causal is False
    assert "sliding_causal" not in told.assumed


def test_rotary_base_flat_nested_and_missing():
    flat = {**ZLAB, "dflash_config": BLOCK}
    nested = {k: v for k, v in flat.items() if k != "rope_theta"}
    missing = dict(nested)
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert read(flat)[1].to_dict() == read(nested)[1].to_dict()
    _, assumed = read(missing)
    assert assumed.text_config.rope_parameters["rope_theta"] == 10000.0
    assert set(assumed.assumed) == {"rope_theta"}


def test_speculators_dflash_of_before_the_convention_was_named():
    _, ours = read(SPECULATORS)
    assert ours.sample_from_anchor is False
    assert set(ours.assumed) == {"sample_from_anchor"}
    _, told = read({**SPECULATORS, "sample_from_anchor": False})
    assert told.assumed == {}
    assert without_reasons(told) == without_reasons(ours)


def test_sliding_layers_of_speculators_are_causal_unless_told():
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
    config = {**SPECULATORS, "sample_from_anchor": False, "transformer_layer_config": TRANSFORMER | sliding}
    _, ours = read(config)
    assert ours.window(0) == Window(9, from_anchor=True, causal=True)
    assert set(ours.assumed) == {"sliding_causal"}
    _, told = read({**config, "sliding_window_non_causal": True})
    assert told.window(0) == Window(9, from_anchor=True, causal=False)
    assert told.assumed == {}


def test_speculators_layer_ids_are_one_higher():
    assert read(SPECULATORS)[1].target_layer_ids == [0, 2]
    assert read({**SPECULATORS_EAGLE, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]})[1].target_layer_ids == [-1, 2, 4]


def test_eagle3_layers_come_from_the_target():
    model_type, ours = read(EAGLE)
    assert (model_type, ours.target_layer_ids, ours.num_features) == ("eagle3", "eagle3", 3)
    assert set(ours.assumed) == {"target_layer_ids"}
    ours.complete_from(Qwen3Config(num_hidden_layers=36, vocab_size=64))
    # `hidden_states[2]`, `[18]` and `[33]`.
    assert ours.target_layer_ids == [1, 17, 32]
    assert ours.num_target_layers == 36


def test_eagle3_layers_that_a_config_names():
    named = {"eagle_aux_hidden_state_layer_ids": [1, 10, 20], "use_aux_hidden_state": True}
    _, ours = read({**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": named})
    assert ours.target_layer_ids == [1, 10, 20]
    assert ours.assumed == {}


def test_own_or_borrowed_is_decided_by_the_stored_keys():
    assert not read(EAGLE)[1].own_embedding
    _, ours = read(EAGLE, ("embed_tokens.weight", "lm_head.weight"))
    assert ours.own_embedding
    assert ours.own_head


def test_a_draft_vocabulary_of_the_whole_size_is_none():
    assert read({**EAGLE, "draft_vocab_size": 64})[1].draft_vocab_size is None
    assert read(EAGLE)[1].draft_vocab_size == 16


@pytest.mark.parametrize("norm", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_variants_of_eagle3_that_its_authors_never_wrote_are_refused(norm):
    with pytest.raises(ValueError, match=norm):
        read({**EAGLE, norm: True})


def test_a_quantization_copied_from_the_target_is_left_out():
    _, ours = read({**ZLAB, "dflash_config": BLOCK, "quantization_config": {"quant_method": "fp8"}})
    assert not hasattr(ours.text_config, "quantization_config")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rms_norm_eps", 1e-06), ("hidden_act", "silu"), ("num_attention_heads", 32), ("head_dim", 128)],
)
def test_what_a_transformer_takes_from_its_class_is_recorded(name, value):
    config = {k: v for k, v in ZLAB.items() if k != name}
    _, ours = read({**config, "dflash_config": BLOCK})
    assert getattr(ours.text_config, name) == value
    assert set(ours.assumed) == {name}


def test_a_vocabulary_that_the_config_leaves_out_is_the_targets():
    config = {k: v for k, v in ZLAB.items() if k != "vocab_size"}
    _, ours = read({**config, "dflash_config": BLOCK})
    assert (ours.vocab_size, set(ours.assumed)) == (0, {"vocab_size"})
    ours.complete_from(Qwen3Config(num_hidden_layers=6, vocab_size=64))
    assert ours.vocab_size == 64
    with pytest.raises(ValueError, match="`vocab_size` is missing"):
        read({k: v for k, v in EAGLE.items() if k != "vocab_size"})


SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}


@pytest.mark.parametrize(
    "config",
    [
        {**ZLAB, **SLIDING, "dflash_config": BLOCK},
        {**ZLAB, **SLIDING, "dflash_config": BLOCK, "draft_vocab_size": 64},
        {**ZLAB, "use_sliding_window": True, "max_window_layers": 1, "dflash_config": BLOCK},
        {**SPECULATORS, "transformer_layer_config": TRANSFORMER | SLIDING},
    ],
)
def test_a_window_is_never_guessed(config):
    with pytest.raises(ValueError, match="`sliding_window` is missing"):
        read(config)


def test_which_layers_slide_is_recorded_where_it_is_derived():
    fields = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}
    _, ours = read({**ZLAB, **fields, "dflash_config": BLOCK})
    assert [ours.is_sliding(i) for i in range(2)] == [False, True]
    assert set(ours.assumed) == {"layer_types"}


def test_where_the_residual_begins_is_never_guessed():
    """speculators and vLLM take opposite defaults, and no weight tells."""
    assert read(SPECULATORS_EAGLE)[1].norm_before_residual is True
    with pytest.raises(ValueError, match="`norm_before_residual` is missing"):
        read({k: v for k, v in SPECULATORS_EAGLE.items() if k != "norm_before_residual"})


def test_later_variants_of_eagle3_are_off_where_they_are_not_named():
    _, ours = read(SPECULATORS_EAGLE)
    assert set(ours.assumed) == {"norm_before_fc", "fc_norm", "norm_output"}
    _, told = read(SPECULATORS_EAGLE | dict.fromkeys(ours.assumed, False))
    assert told.assumed == {}
    assert without_reasons(told) == without_reasons(ours)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3"])
def test_eagle3_layers_beside_the_transformers_fields_are_counted_as_vllm_does(architecture):
    config = {**EAGLE, "architectures": [architecture], "eagle_aux_hidden_state_layer_ids": [2, 11, 21]}
    _, ours = read(config)
    assert ours.target_layer_ids == [1, 10, 20]
    assert set(ours.assumed) == {"target_layer_ids"}
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 10, 20]}
    assert read({**config, "eagle_config": nested})[1].assumed == {}
    nested["eagle_aux_hidden_state_layer_ids"] = [2, 11, 21]
    with pytest.raises(ValueError, match="given twice and differently"):
        read({**config, "eagle_config": nested})


@pytest.mark.parametrize("field", [{"use_aux_hidden_state": False}, {"pooling": 2}])
def test_an_eagle_config_that_asks_for_something_else(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        read({**EAGLE, "eagle_config": field})


def test_engines_serve_layers_only_from_where_they_read_them():
    """vLLM from beside the transformer's fields, SGLang from `eagle_config`."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 11, 21]}
    config = {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"]}
    for fields, serving in (
        ({}, {VLLM, SGLANG}),
        (ids, {VLLM}),
        ({"eagle_config": ids}, {SGLANG}),
    ):
        _, ours = read({**config, **fields})
        found = servings(ours, "drafter", "target", "specforge")
        assert {s.engine for s in found if s.format is None and not s.reasons} == serving
    assert [s.format for s in found if s.engine == VLLM] == [None, "speculators"]
    assert "eagle_aux_hidden_state_layer_ids" in found[0].reasons[0]


GEMMA = {
    "architectures": ["Gemma4DSparkModel"],
    "attention_k_eq_v": True,
    "block_size": 4,
    "global_head_dim": 16,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 48,
    "layer_types": ["full_attention"] * 2,
    "markov_rank": 0,
    "mask_token_id": 4,
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    },
    "target_layer_ids": [1, 3],
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("enable_moe_block", True),
        ("num_kv_shared_layers", 1),
        ("hidden_size_per_layer_input", 8),
        ("use_double_wide_mlp", True),
        ("rms_norm_eps", -1e-06),
    ],
)
def test_drafts_of_gemma_4_are_what_their_config_says_or_refused(field, value):
    assert read(GEMMA)[1].text_config.layer_types == ["full_attention"] * 2
    with pytest.raises(ValueError, match=field):
        read({**GEMMA, field: value})
