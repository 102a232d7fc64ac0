"""Everything around a decode: how `generate` finds the drafter, settings, streamers, counters, and refusals."""

import contextlib
import dataclasses
import logging
import time
from pathlib import Path

import pytest
import torch
from conftest import QueryLengths, make_target, make_tokenizer
from scripted import OracleDrafter, StubbornDrafter
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GenerationMixin,
    MambaConfig,
    MambaForCausalLM,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import hf_dspark
from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter, auto
from hf_dspark.generation import decoding
from hf_dspark.generation.statistics import Speculation
from hf_dspark.hub.custom_generate import write_custom_generate


PROMPT = [11, 7, 30, 2]
BLOCK = {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 1}


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    return DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)


@pytest.fixture
def oracle(target):
    """A drafter that is always right about 24 tokens behind the prompt."""
    oracle = OracleDrafter.from_target(target, markov_rank=8, **BLOCK)
    return oracle.tell(decode(target, max_new_tokens=40)[0].tolist(), 1.0)


def decode(target, **kwargs):
    ids = torch.tensor([PROMPT])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, **kwargs}
    return target.generate(ids, **call)


def speculate(target, drafter, **kwargs):
    return decode(target, assistant_model=drafter, return_dict_in_generate=True, **kwargs)


# ---------------------------------------------------------------------- the ways in


def test_three_ways_agree(target, drafter, tmp_path):
    plain = decode(target)
    assert torch.equal(decode(target, assistant_model=drafter), plain)

    drafter.save_pretrained(tmp_path)
    output = decode(target, custom_generate=hf_dspark.speculative_decoding(drafter), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.target_forwards == output.speculation.rounds + 1

    write_custom_generate(tmp_path)
    output = decode(target, custom_generate=str(tmp_path), trust_remote_code=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.rounds > 0
    with pytest.raises(FileNotFoundError, match="holds no drafter"):
        write_custom_generate(tmp_path / "elsewhere")


def test_second_way_needs_no_hook(target, drafter):
    plain = decode(target)
    loop = hf_dspark.speculative_decoding(drafter, num_assistant_tokens=3)
    auto.unhook_generate()
    try:
        output = decode(target, custom_generate=loop, return_dict_in_generate=True)
    finally:
        auto.hook_generate()
    assert torch.equal(output.sequences, plain)
    assert len(output.speculation.proposed) == 3


def test_what_the_targets_own_config_says_does_not_bind_the_second_way(target, drafter):
    target.generation_config.num_assistant_tokens = 4
    loop = hf_dspark.speculative_decoding(drafter, num_assistant_tokens=3)
    output = decode(target, custom_generate=loop, return_dict_in_generate=True)
    assert len(output.speculation.proposed) == 3


def test_second_way_refuses_a_streamer_that_would_wait_for_ever(target, drafter):
    with pytest.raises(ValueError, match="Give `streamer` to `speculative_decoding` itself"):
        decode(
            target, custom_generate=hf_dspark.speculative_decoding(drafter), streamer=TextStreamer(make_tokenizer())
        )


def test_hook_is_idempotent_and_reversible():
    hooked = GenerationMixin.generate
    auto.register()
    assert GenerationMixin.generate is hooked
    auto.unhook_generate()
    try:
        original = GenerationMixin.generate
        assert original is not hooked
        assert original is hooked._hf_dspark_original
        auto.unhook_generate()
        assert GenerationMixin.generate is original
    finally:
        auto.hook_generate()
    assert GenerationMixin.generate._hf_dspark_original is original


def test_hook_is_loud_if_its_seam_has_moved(monkeypatch):
    auto.unhook_generate()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(GenerationMixin, "generate", lambda self, inputs=None, **kwargs: None)
            with pytest.raises(RuntimeError, match=r"assistant_model.*custom_generate"):
                auto.hook_generate()
    finally:
        auto.hook_generate()


def test_other_assistants_pass_untouched(target):
    """An ordinary model as assistant still runs transformers' own assisted generation."""
    assistant = make_target("llama", 4)
    output = decode(target, assistant_model=assistant, return_dict_in_generate=True)
    assert not hasattr(output, "speculation")
    assert torch.equal(output.sequences, decode(target))


def test_positional_and_named_inputs(target, drafter):
    ids, config = torch.tensor([PROMPT]), GenerationConfig(max_new_tokens=6, do_sample=False)
    expected = decode(target, max_new_tokens=6)
    assert torch.equal(target.generate(ids, config, assistant_model=drafter), expected)
    assert torch.equal(target.generate(inputs=ids, generation_config=config, assistant_model=drafter), expected)
    assert torch.equal(target.generate(input_ids=ids, generation_config=config, assistant_model=drafter), expected)


def test_pipeline(drafter):
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer, markov_rank=8, num_hidden_layers=1)
    call = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("Once upon", **call)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    with QueryLengths(target) as lengths:
        assert ours("Once upon", **call) == plain
    assert max(lengths[1:]) > 1


def test_pipeline_of_a_target_with_another_pad_token(drafter):
    """A pipeline then asks for the drafter's tokenizer, which is the target's."""
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer, markov_rank=8, num_hidden_layers=1)
    target.config.pad_token_id = tokenizer.eos_token_id
    call = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    pair = {"model": target, "tokenizer": tokenizer}
    plain = pipeline("text-generation", **pair)("Once upon", **call)
    ours = pipeline("text-generation", **pair, assistant_model=drafter, assistant_tokenizer=make_tokenizer())
    assert ours("Once upon", **call) == plain
    other = make_tokenizer()
    other.add_tokens(["<|other|>"])
    with pytest.raises(ValueError, match=r"uses its target's tokenizer\. Leave `assistant_tokenizer` out"):
        pipeline("text-generation", **pair, assistant_model=drafter, assistant_tokenizer=other)("Once upon", **call)


@pytest.mark.parametrize("way", ["argument", "config"])
def test_continuous_batching_is_refused(target, drafter, way):
    """`generate` would hand the call on to it, without the drafter."""
    ask = {"cache_implementation": "paged"}
    if way == "config":
        ask = {"generation_config": GenerationConfig(**ask)}
    with pytest.raises(ValueError, match='does not support `cache_implementation="paged"`'):
        speculate(target, drafter, **ask)


def test_prompts_of_another_integer_type(target, drafter):
    ids = torch.tensor([PROMPT], dtype=torch.int32)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    plain, ours = target.generate(ids, **call), target.generate(ids, assistant_model=drafter, **call)
    assert ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_drafter_keeps_its_mode(target, drafter):
    drafter.train()
    speculate(target, drafter)
    assert drafter.training


def test_two_decodes_share_no_state(target, drafter):
    """One drafter, two generations interleaved by a streamer: neither sees the other."""
    plain, other = decode(target), decode(target, min_new_tokens=3, max_new_tokens=9)
    results = []

    class Nested(BaseStreamer):
        def put(self, value):
            results.append(speculate(target, drafter, max_new_tokens=9).sequences)

        def end(self):
            pass

    assert torch.equal(speculate(target, drafter, streamer=Nested()).sequences, plain)
    assert all(torch.equal(result, other) for result in results)


# ---------------------------------------------------------------------- streamers


def test_text_streamer(capsys):
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer))
    drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer, markov_rank=8, num_hidden_layers=1)
    decode(target, streamer=TextStreamer(tokenizer, skip_prompt=True))
    plain = capsys.readouterr().out
    decode(target, assistant_model=drafter, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == plain
    assert plain.strip()


class RoundStreamer(BaseStreamer):
    """Notes rounds and tokens in the order in which they come."""

    def __init__(self):
        self.log = []

    def on_round(self, num_drafted, num_verified, num_accepted, is_copy):
        self.log.append(("round", num_drafted, num_verified, num_accepted))

    def put(self, value):
        self.log.append(value.tolist())

    def end(self):
        self.log.append("end")


@pytest.mark.parametrize("way", ["hook", "custom_generate"])
def test_streamer_hears_of_rounds(target, oracle, way):
    streamer = RoundStreamer()
    if way == "hook":
        output = decode(target, assistant_model=oracle, streamer=streamer, max_new_tokens=10)
    else:
        loop = hf_dspark.speculative_decoding(oracle, streamer=streamer)
        output = decode(target, custom_generate=loop, max_new_tokens=10)
    new = [[token] for token in output[0, len(PROMPT) :].tolist()]
    # The prefill's token, a round of six, and the last three: two drafts, because the third is the target's own.
    expected = [[PROMPT], new[0], ("round", 5, 5, 5), *new[1:7], ("round", 2, 2, 2), *new[7:10], "end"]
    assert streamer.log == expected


# ---------------------------------------------------------------------- settings


def test_settings_precedence(target, drafter):
    """A call's argument, then a `generation_config` passed to it, then the drafter's own, then the whole block."""

    def drafted(**kwargs):
        return len(speculate(target, drafter, max_new_tokens=20, **kwargs).speculation.proposed)

    assert drafted() == 5
    drafter.generation_config.num_assistant_tokens = 4
    assert drafted() == 4
    config = GenerationConfig(num_assistant_tokens=3, max_new_tokens=20, do_sample=False)
    passed = target.generate(
        torch.tensor([PROMPT]), generation_config=config, assistant_model=drafter, return_dict_in_generate=True
    )
    assert len(passed.speculation.proposed) == 3
    assert drafted(num_assistant_tokens=2) == 2
    mixed = target.generate(
        torch.tensor([PROMPT]),
        generation_config=config,
        assistant_model=drafter,
        num_assistant_tokens=1,
        return_dict_in_generate=True,
    )
    assert len(mixed.speculation.proposed) == 1


def test_defaults_of_transformers_do_not_count(target, drafter):
    """20 drafts and a threshold of 0.4, which transformers fills in, are not what a bare call asks for."""
    run = speculate(target, drafter, generation_config=GenerationConfig(max_new_tokens=20, do_sample=False))
    assert run.speculation.verified == run.speculation.proposed
    assert len(run.speculation.proposed) == 5
    assert run.speculation.proposed[0] >= run.speculation.rounds - 1 > 0  # the last may have no room for a draft


def test_a_threshold_alone_asks_for_the_confidence_schedule(target, drafter):
    everything = speculate(target, drafter).speculation
    nothing = speculate(target, drafter, assistant_confidence_threshold=1.0).speculation
    assert sum(everything.verified) == sum(everything.proposed) > 0
    assert sum(nothing.verified) == 0 < sum(nothing.proposed)
    # Saying "fixed" beside it wins.
    both = speculate(target, drafter, assistant_confidence_threshold=1.0, verification_schedule="fixed").speculation
    assert both.verified == everything.verified
    # The drafter's own threshold counts only when its own schedule says so.
    drafter.generation_config.assistant_confidence_threshold = 1.0
    assert speculate(target, drafter).speculation.verified == everything.verified
    drafter.generation_config.verification_schedule = "confidence"
    assert sum(speculate(target, drafter).speculation.verified) == 0


def test_settings_of_the_generation_config_of_the_target(target, drafter, monkeypatch):
    """Options that live in the target's own generation config shape the output as in plain decoding."""
    free = decode(target)[0, len(PROMPT) :].tolist()
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.4)
    monkeypatch.setattr(target.generation_config, "eos_token_id", free[3])
    plain = decode(target)
    assert plain[0, len(PROMPT) :].tolist() != free
    assert torch.equal(speculate(target, drafter).sequences, plain)


@pytest.mark.parametrize("where", ["argument", "generation_config", "target"])
def test_stop_strings_from_anywhere(where, monkeypatch):
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer))
    drafter = DFlashDrafter.from_target(target, tokenizer=tokenizer, num_hidden_layers=1)
    text = tokenizer.decode(decode(target)[0, len(PROMPT) :])
    kwargs = {"tokenizer": tokenizer}
    if where == "argument":
        kwargs["stop_strings"] = text[4:6]
    elif where == "generation_config":
        kwargs["generation_config"] = GenerationConfig(stop_strings=[text[4:6]])
    else:
        monkeypatch.setattr(target.generation_config, "stop_strings", text[4:6])
    plain = decode(target, **kwargs)
    assert plain.shape[1] < len(PROMPT) + 16
    assert torch.equal(decode(target, assistant_model=drafter, **kwargs), plain)


# ---------------------------------------------------------------------- what the target computes, and what is counted


def test_a_schedule_shortens_the_forward(target, drafter):
    """Drafts that are not verified never reach the target."""
    for threshold, longest in ((0.0, 6), (1.0, 1)):
        with QueryLengths(target) as lengths:
            run = speculate(target, drafter, assistant_confidence_threshold=threshold, max_new_tokens=12).speculation
        assert lengths[0] == len(PROMPT)
        assert max(lengths[1:]) == longest
        assert sum(lengths[1:]) == run.rounds + sum(run.verified)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.normal_(std=3.0)
    with QueryLengths(target) as lengths:
        run = speculate(target, drafter, assistant_confidence_threshold=0.5, max_new_tokens=32).speculation
    assert len(set(lengths[1:])) > 2
    assert sum(lengths[1:]) == run.rounds + sum(run.verified) < run.rounds + sum(run.proposed)


def test_no_round_verifies_past_the_length_limit(target, oracle):
    for budget in range(1, 10):
        with QueryLengths(target) as lengths:
            run = speculate(target, oracle, max_new_tokens=budget)
        assert run.sequences.shape[1] == len(PROMPT) + budget
        # Each forward gives as many tokens as it reads, the prefill one: nothing is computed in vain.
        assert sum(lengths[1:]) == budget - 1


def test_counters_of_an_oracle(target, oracle):
    run = speculate(target, oracle, max_new_tokens=15).speculation
    # 1 from the prefill, 6 and 6 from full rounds, and 2 from a last one that had room for one draft.
    assert run.accepted_lengths == [[6, 6, 2]]
    assert (run.rounds, run.target_forwards, run.generated_tokens) == (3, 4, 15)
    assert run.proposed == run.verified == run.accepted == [3, 2, 2, 2, 2]
    assert run.mean_accepted_length == pytest.approx(14 / 3)
    assert run.tokens_per_forward == pytest.approx(15 / 4)
    assert run.verification_efficiency == 1.0
    assert run.marginal_acceptance == run.conditional_acceptance == [1.0] * 5
    assert 0 < run.draft_seconds < run.total_seconds
    assert 0 < run.target_seconds < run.total_seconds
    assert (run.most_drafts, run.mean_drafts) == (5, pytest.approx(11 / 3))


def test_statistics_say_what_ran_in_a_few_words(target, oracle):
    run = speculate(target, oracle, max_new_tokens=15).speculation
    assert run.schedule == "fixed"
    assert repr(run).startswith(
        "Speculation(15 tokens in 4 target forwards, 3.75 a forward; mean accepted length 4.67 over 3 rounds; fixed "
        "schedule; 11 drafts proposed, 11 verified, 11 accepted;"
    )
    assert run == dataclasses.replace(run) and run != dataclasses.replace(run, generated_tokens=14)
    assert "nan accepted" not in repr(Speculation()) and len(repr(Speculation())) < 300


def test_preparing_the_layers_is_told_from_the_rounds(target, oracle, monkeypatch):
    @contextlib.contextmanager
    def slow(*models):
        time.sleep(0.2)
        yield

    monkeypatch.setattr(decoding, "fast_linear_layers", slow)
    run = speculate(target, oracle, max_new_tokens=8).speculation
    assert run.preparation_seconds >= 0.2
    assert run.draft_seconds + run.target_seconds + run.preparation_seconds <= run.total_seconds


def test_counters_stop_at_eos_inside_an_accepted_run(target, oracle):
    tokens = decode(target, max_new_tokens=30)[0, len(PROMPT) :].tolist()
    # An EOS that first appears as the third draft of the first round.
    eos = tokens[3]
    assert eos not in tokens[:3]
    run = speculate(target, oracle, max_new_tokens=30, eos_token_id=eos, pad_token_id=0)
    assert run.sequences[0].tolist() == PROMPT + tokens[:4]
    counted = run.speculation
    assert counted.accepted_lengths == [[3]]
    assert counted.proposed == counted.verified == [1, 1, 1, 1, 1]
    assert counted.accepted == [1, 1, 1, 0, 0]
    assert counted.generated_tokens == 4
    assert run.cache.get_seq_length() == len(PROMPT) + 3


def test_counters_of_a_drafter_that_is_always_wrong(target):
    drafter = StubbornDrafter.from_target(target, markov_rank=0, **BLOCK)
    tokens = decode(target)[0, len(PROMPT) :].tolist()
    never = next(token for token in range(64) if token not in tokens)
    drafter.insist_on(torch.nn.functional.one_hot(torch.tensor(never), 64).float())
    run = speculate(target, drafter).speculation
    assert run.accepted_lengths == [[1] * 15]
    assert run.proposed == run.verified == [14, 13, 12, 11, 10]
    assert run.accepted == [0] * 5
    assert run.mean_accepted_length == run.tokens_per_forward == 1.0
    assert run.verification_efficiency == 0.0
    assert run.marginal_acceptance[0] == run.conditional_acceptance[0] == 0.0


def test_counters_without_a_round(target, drafter):
    run = speculate(target, drafter, max_new_tokens=1).speculation
    assert (run.rounds, run.target_forwards, run.generated_tokens) == (0, 1, 1)
    assert run.accepted_lengths == [[]]
    assert run.mean_accepted_length != run.mean_accepted_length  # nan
    assert run.tokens_per_forward == 1.0


def test_a_round_without_drafts(target, drafter):
    run = speculate(target, drafter, assistant_confidence_threshold=1.0)
    assert torch.equal(run.sequences, decode(target))
    assert run.speculation.accepted_lengths == [[1] * 15]
    assert run.speculation.verification_efficiency != run.speculation.verification_efficiency  # nan


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams > 1"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"output_attentions": True}, "output_attentions"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": -1}, "`prompt_lookup_num_tokens` must be a whole number from 1, or 0"),
        ({"prompt_lookup_num_tokens": 2.5}, "`prompt_lookup_num_tokens` must be a whole number from 1, or 0"),
        ({"prompt_lookup_num_tokens": "3"}, "`prompt_lookup_num_tokens` must be a whole number from 1, or 0"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}, "max_matching_ngram_size"),
        ({"num_assistant_tokens": 6}, "`num_assistant_tokens` 6 is out of reach: this drafter drafts 1 to 5"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` 0 is out of reach"),
        ({"num_assistant_tokens": 2.5}, "`num_assistant_tokens` 2.5 is out of reach"),
        ({"num_assistant_tokens": "3"}, "`num_assistant_tokens` '3' is out of reach"),
        ({"num_assistant_tokens": True}, "`num_assistant_tokens` True is out of reach"),
        ({"draft_context_window": 2.5}, "`draft_context_window` must be at least 1, got 2.5"),
        ({"draft_context_window": "8"}, "`draft_context_window` must be at least 1, got '8'"),
        ({"assistant_confidence_threshold": "x"}, "between 0 and 1, got 'x'"),
        ({"confidence_temperatures": 1.0}, "`confidence_temperatures` must be 5 positive numbers"),
        ({"confidence_temperatures": "abcde"}, "`confidence_temperatures` must be 5 positive numbers"),
        ({"assistant_confidence_threshold": 1.5}, "between 0 and 1, got 1.5"),
        ({"verification_schedule": "confidence"}, "needs `assistant_confidence_threshold`"),
        ({"verification_schedule": "psychic"}, "'psychic' is not available; choose one of fixed, confidence"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"use_mtp": True}, "use_mtp"),
        ({"token_healing": True}, "token_healing"),
        ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
        ({"stop_strings": "x"}, "`stop_strings` needs the tokenizer"),
    ],
)
def test_refused_by_name(target, drafter, options, message):
    with QueryLengths(target) as lengths, pytest.raises(ValueError, match=message):
        speculate(target, drafter, **options)
    assert lengths == []  # before any forward


@pytest.mark.parametrize("in_config", [False, True])
def test_settings_beside_a_custom_loop_are_refused(target, drafter, in_config):
    options = {"num_assistant_tokens": 2}
    if in_config:
        config = GenerationConfig(max_new_tokens=4)
        config.verification_schedule = "confidence"
        options = {"generation_config": config}
    with pytest.raises(ValueError, match=r"Give `.*` to `speculative_decoding` itself"):
        target.generate(torch.tensor([PROMPT]), custom_generate=hf_dspark.speculative_decoding(drafter), **options)


def test_input_embeddings_are_refused(target, drafter):
    embeds = target.get_input_embeddings()(torch.tensor([PROMPT])).detach()
    with pytest.raises(ValueError, match="inputs_embeds"):
        target.generate(inputs_embeds=embeds, assistant_model=drafter, max_new_tokens=4)


def test_full_static_window_is_refused():
    target = make_target("qwen3", 3, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    drafter = DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)
    with QueryLengths(target) as lengths, pytest.raises(ValueError, match="a static cache whose sliding window"):
        speculate(target, drafter, cache_implementation="static")
    assert lengths == []


def test_recurrent_target_is_refused(drafter):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, state_size=4, pad_token_id=0)
    target = MambaForCausalLM(config).eval()
    with pytest.raises(ValueError, match="recurrent"):
        speculate(target, drafter)


def test_encoder_decoder_target_is_refused(drafter):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    target = BartForConditionalGeneration(BartConfig(vocab_size=64, **sizes, **heads)).eval()
    with pytest.raises(TypeError, match="no decoder-only language model"):
        speculate(target, drafter)


def test_second_way_refuses_what_it_does_not_know(target, drafter):
    with pytest.raises(TypeError, match="`drafter` must be a drafter, not a LlamaForCausalLM"):
        hf_dspark.speculative_decoding(target)
    with pytest.raises(ValueError, match=r"Unknown settings \['temprature'\]; known are num_assistant_tokens"):
        hf_dspark.speculative_decoding(drafter, temprature=0.1)
    with pytest.raises(ValueError, match="`stop_strings` needs the tokenizer"):
        hf_dspark.speculative_decoding(drafter, stop_strings="x")


def test_failed_call_leaves_the_drafter_usable(target, drafter):
    drafter.train()

    def boom(batch_id, ids):
        raise KeyError("boom")

    with pytest.raises(KeyError):
        speculate(target, drafter, prefix_allowed_tokens_fn=boom)
    assert drafter.training
    assert torch.equal(speculate(target, drafter).sequences, decode(target))


# ---------------------------------------------------------------------- types and devices


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_meet(target_dtype, drafter_dtype, caplog, tmp_path):
    target = make_target("llama", 3)
    Eagle3Drafter.from_target(target).save_pretrained(tmp_path)
    target, drafter = target.to(target_dtype), Eagle3Drafter.from_pretrained(tmp_path, dtype=drafter_dtype)
    logging.Logger.warning_once.cache_clear()
    run = speculate(target, drafter, max_new_tokens=6)
    assert run.sequences.shape[1] == len(PROMPT) + 6
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("hf_dspark")]
    assert any("float16 overflows" in text for text in messages) == (torch.float16 in (target_dtype, drafter_dtype))
    assert any("features are cast" in text for text in messages) == (target_dtype != drafter_dtype)


def test_float32_output_is_exact_whatever_the_drafters_dtype(target):
    for dtype in (torch.bfloat16, torch.float16):
        drafter = DSparkDrafter.from_target(target, markov_rank=8, **BLOCK).to(dtype)
        assert torch.equal(speculate(target, drafter).sequences, decode(target))


def test_saved_target_of_another_class(target, drafter, tmp_path):
    """The drafter works on the same target loaded anew."""
    target.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(speculate(again, drafter).sequences, decode(target))


@pytest.mark.parametrize("kind", [str, Path])
def test_an_assistant_s_name_is_no_assistant(tiny_target, kind):
    with pytest.raises(TypeError, match=r"AutoDrafter\.from_pretrained\('my-drafter'"):
        tiny_target.generate(torch.ones(1, 3, dtype=torch.long), assistant_model=kind("my-drafter"))
