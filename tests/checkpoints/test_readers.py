"""Layouts and defaults of other projects' configs, beyond what the recorded cases have."""

import pytest
from transformers import Qwen3Config

from hf_dspark.checkpoints import FORMATS
from hf_dspark.models.blocks import Window
from hf_dspark.models.dflash.configuration_dflash import DFlashConfig
from hf_dspark.models.eagle3.configuration_eagle3 import Eagle3Config


TRANSFORMER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
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
    eagle = {"speculators_model_type": "eagle3", "transformer_layer_config": {**TRANSFORMER, "num_hidden_layers": 1}}
    assert read({**eagle, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]})[1].target_layer_ids == [-1, 2, 4]


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
