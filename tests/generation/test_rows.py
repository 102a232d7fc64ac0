"""
Several rows at once: each gives what it gives alone, token for token when greedy, whatever the others do.

A case is drawn from its number: a target, a drafter, prompts of unequal length, and options of the call. To see case
17 alone: `pytest -k "case[17]"`.
"""

import functools
import random

import pytest
import torch
from conftest import SIZES, make_target
from scripted import OracleDrafter
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.generation import lookup


VOCABULARY = 64
NUM_CASES, NUM_SLOW_CASES = 48, 400
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = {"sliding_window": 8}
FAMILIES = {
    "llama": None,
    "qwen3": None,
    "qwen3 sliding": (None, {"use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "mistral": (MistralForCausalLM, MistralConfig, WINDOW),
    "mixtral": (MixtralForCausalLM, MixtralConfig, EXPERTS),
    "qwen3 moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "gemma4": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4 shared": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
}
DRAFTERS = {
    "vanilla": (DSparkDrafter, {"markov_rank": 8}),
    "rnn": (DSparkDrafter, {"markov_rank": 8, "markov_head_type": "rnn"}),
    "no confidence": (DSparkDrafter, {"markov_rank": 8, "enable_confidence_head": False}),
    "masks only": (DFlashDrafter, {"sample_from_anchor": False}),
    "sliding": (DFlashDrafter, {}),
    "sliding from anchor": (DSparkDrafter, {"markov_rank": 8}),
    "eagle3": (Eagle3Drafter, {"num_drafts": 5}),
    "oracle": (OracleDrafter, {"markov_rank": 8}),
}


@functools.cache
def target_of(family: str, seed: int, attention: str = "sdpa"):
    if family.startswith(("llama", "qwen3")) and family != "qwen3 moe":
        extra = FAMILIES[family][1] if FAMILIES[family] else {}
        model = make_target(family.split()[0], seed, **extra)
    else:
        model_class, config_class, extra = FAMILIES[family]
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **extra})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.3)
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation(attention)
    return model


@functools.cache
def drafter_of(kind: str, family: str, seed: int, attention: str = "sdpa"):
    cls, overrides = DRAFTERS[kind]
    overrides = dict(overrides)
    if cls is not Eagle3Drafter:
        overrides |= {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    drafter = cls.from_target(target_of(family, seed, attention), init_from_target=False, **overrides)
    if kind.startswith("sliding") and not family.startswith("gemma4"):
        text = drafter.config.text_config
        text.layer_types, text.sliding_window = ["sliding_attention", "full_attention"], 6
        drafter.config.window_from_anchor = kind == "sliding from anchor"
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "markov" in name or "confidence" in name:
                parameter.normal_(std=0.4)
    return drafter


def draw_case(number: int) -> dict:
    """Everything that a case needs, drawn from its number."""
    chance = random.Random(number)
    rows = chance.choice([2, 2, 3, 4, 5, 8] if number < NUM_CASES else [1, 2, 3, 4, 6, 8, 11, 16])
    lengths = [chance.choice([1, 2, 3, 5, 8, 13, 30]) for _ in range(rows)]
    options = {"max_new_tokens": chance.choice([1, 3, 12, 24, 24])}

    def maybe(probability, name, value):
        if chance.random() < probability:
            options[name] = value

    if chance.random() < 0.6:
        options["eos_token_id"] = chance.sample(range(VOCABULARY), chance.choice([1, 4, 8]))
        maybe(0.3, "min_new_tokens", chance.choice([2, 6]))
    maybe(0.15, "repetition_penalty", chance.choice([0.8, 1.3]))
    maybe(0.1, "no_repeat_ngram_size", 2)
    maybe(0.1, "suppress_tokens", chance.sample(range(VOCABULARY), 20))
    maybe(0.1, "begin_suppress_tokens", chance.sample(range(VOCABULARY), 20))
    maybe(0.1, "cache_implementation", "static")
    family = chance.choice(sorted(FAMILIES))
    if "cache_implementation" in options and ("sliding" in family or family.startswith(("mistral", "gemma4"))):
        del options["cache_implementation"]  # a full window in a static cache is refused
    return {
        "pair": (family, chance.randrange(2), chance.choice(["sdpa", "sdpa", "eager"])),
        "kind": "oracle" if chance.random() < 0.5 else chance.choice(sorted(DRAFTERS)),
        "prompts": [[chance.randrange(1, VOCABULARY) for _ in range(n)] for n in lengths],
        "padding": chance.choice([0, 0, 0, 2]),
        "options": options,
        "hit_rate": chance.choice([0.5, 0.8, 0.95]),
        "settings": {
            "num_assistant_tokens": chance.choice([None, None, 1, 3]),
            "assistant_confidence_threshold": chance.choice([None, None, 0.5, 0.7, 1.0]),
        },
        "wants": chance.choice([(), (), ("output_scores", "output_logits"), ("output_hidden_states",)]),
        "copied": chance.choice([None, None, 1, 3, 9]),
    }


def padded(prompts: list[list[int]], extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts)) + extra
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def check(number: int) -> list[list[int]]:
    """Runs a case, and each of its rows alone; returns the accepted lengths."""
    case = draw_case(number)
    target, drafter = target_of(*case["pair"]), drafter_of(case["kind"], *case["pair"])
    ids, mask = padded(case["prompts"], case["padding"])
    call = {**case["options"], "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    call |= dict.fromkeys(case["wants"], True)
    alone = [target.generate(ids[r : r + 1], attention_mask=mask[r : r + 1], **call) for r in range(len(ids))]
    continuations = [run.sequences[0, ids.shape[1] :].tolist() for run in alone]
    if case["kind"] == "oracle":
        drafter.tell([a + b for a, b in zip(case["prompts"], continuations)], case["hit_rate"], number)
    ours = target.generate(
        ids,
        attention_mask=mask,
        assistant_model=drafter,
        **call,
        **case["settings"],
        prompt_lookup_num_tokens=case["copied"],
    )

    longest = max(map(len, continuations))
    expected = [tokens + [0] * (longest - len(tokens)) for tokens in continuations]
    assert ours.sequences[:, ids.shape[1] :].tolist() == expected
    assert torch.equal(ours.sequences[:, : ids.shape[1]], ids)
    for r, (run, tokens) in enumerate(zip(alone, continuations)):
        for name in ("scores", "logits"):
            if getattr(run, name) is not None:
                assert len(getattr(ours, name)) == longest
                for step, theirs in zip(getattr(ours, name), getattr(run, name)):
                    torch.testing.assert_close(step[r], theirs[0], rtol=1e-3, atol=1e-3)
                assert all(step[r].count_nonzero() == 0 for step in getattr(ours, name)[len(tokens) :])
        if run.hidden_states is not None:
            assert len(ours.hidden_states) == longest
            for step, (mine, theirs) in enumerate(zip(ours.hidden_states, run.hidden_states)):
                real = mask[r].bool() if step == 0 else slice(None)
                for a, b in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(a[r][real], b[0][real], rtol=1e-3, atol=1e-3)
    counted = ours.speculation
    assert counted.generated_tokens == sum(map(len, continuations))
    assert [sum(lengths) for lengths in counted.accepted_lengths] == [len(tokens) - 1 for tokens in continuations]
    if "cache_implementation" not in case["options"]:
        # All rows go through the target together, and none that has ended.
        assert counted.target_forwards == 1 + max(map(len, counted.accepted_lengths))
    return counted.accepted_lengths


@pytest.fixture(autouse=True)
def copies_from_short_matches(monkeypatch):
    """One token that stood before is enough, so that texts of random models have something to copy, right or wrong."""
    monkeypatch.setattr(lookup, "MATCHED", 1)


@pytest.mark.parametrize("number", range(NUM_CASES))
def test_case(number):
    check(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_CASES, NUM_SLOW_CASES))
def test_more_cases(number):
    check(number)
