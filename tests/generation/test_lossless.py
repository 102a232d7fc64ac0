"""
Greedy decoding with a drafter gives what plain `generate` gives, whatever the call asks for: the same ids, scores and
logits, the same calls of processors, criteria and streamer, and a cache of the same length.

A case is drawn from its number: a target, a drafter (fresh ones, which are rarely right, and scripted ones, which are
right as often as we like), a prompt, and options of the call. To see case 17 alone: `pytest -k "case[17]"`.
"""

import functools
import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from conftest import make_target, make_tokenizer
from scripted import OracleDrafter
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_dspark import AutoDrafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.generation import lookup


VOCABULARY = 64
NUM_CASES, NUM_SLOW_CASES = 300, 900

DRAFTERS = {
    "vanilla": (DSparkDrafter, {"markov_rank": 8}),
    "gated": (DSparkDrafter, {"markov_rank": 8, "markov_head_type": "gated"}),
    "rnn": (DSparkDrafter, {"markov_rank": 8, "markov_head_type": "rnn"}),
    "no markov": (DSparkDrafter, {"markov_rank": 0}),
    "no confidence": (DSparkDrafter, {"markov_rank": 8, "enable_confidence_head": False}),
    "confidence without markov": (DSparkDrafter, {"markov_rank": 8, "confidence_head_with_markov": False}),
    "sample from anchor": (DFlashDrafter, {}),
    "masks only": (DFlashDrafter, {"sample_from_anchor": False}),
    "eagle3": (Eagle3Drafter, {"num_drafts": 5}),
    "oracle": (OracleDrafter, {"markov_rank": 8}),
}


@functools.cache
def target_of(family: str, tied: bool, seed: int):
    if family == "mistral":
        torch.manual_seed(seed)
        config = MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=8,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            tie_word_embeddings=tied,
        )
        model = MistralForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        return model
    if family == "qwen3 sliding":
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
        return make_target("qwen3", seed, tie_word_embeddings=tied, **window)
    return make_target(family, seed, tie_word_embeddings=tied)


@functools.cache
def drafter_of(kind: str, family: str, tied: bool, seed: int, reduced: bool):
    cls, overrides = DRAFTERS[kind]
    overrides = dict(overrides)
    if cls is not Eagle3Drafter:
        overrides |= {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 1 + seed % 2}
    if reduced:
        overrides |= {"draft_vocab_size": 24, "token_counts": torch.arange(VOCABULARY) * 7 % VOCABULARY}
    torch.manual_seed(seed)
    drafter = cls.from_target(target_of(family, tied, seed), init_from_target=seed % 3 > 0, **overrides)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "markov" in name or "confidence" in name:
                parameter.normal_(std=0.4)
    return drafter


class RecordingProcessor(LogitsProcessor):
    """Writes down its calls and changes the scores, differently at every call."""

    def __init__(self, log: list, in_place: bool):
        self.log, self.calls, self.in_place = log, 0, in_place

    def __call__(self, input_ids, scores):
        self.log.append(("processor", input_ids[0].tolist()))
        self.calls += 1
        scores = scores if self.in_place else scores.clone()
        scores[:, (self.calls * 5) % scores.shape[1]] += 3.0
        return scores


class RecordingCriterion(StoppingCriteria):
    """Writes down its calls, and stops at the call named."""

    def __init__(self, log: list, stop_at: int):
        self.log, self.calls, self.stop_at = log, 0, stop_at

    def __call__(self, input_ids, scores, **kwargs):
        # Scores only reach a criterion if the call collects them.
        self.log.append(("criterion", input_ids[0].tolist(), None if scores is None else len(scores)))
        self.calls += 1
        return torch.tensor([self.calls == self.stop_at])


class RecordingStreamer(BaseStreamer):
    """Writes down its calls."""

    def __init__(self, log: list):
        self.log = log

    def put(self, value):
        self.log.append(("put", tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.log.append(("end",))


def suppressed(options: dict) -> set[int]:
    return {*options.get("suppress_tokens", ()), *options.get("begin_suppress_tokens", ())}


def draw_case(number: int) -> dict:
    """Everything that a case needs, drawn from its number."""
    chance = random.Random(number)
    family = chance.choice(["llama", "llama", "qwen3", "qwen3", "qwen3 sliding", "mistral"])
    is_sliding = family in ("qwen3 sliding", "mistral")
    tied, seed = chance.random() < 0.5, chance.randrange(3)
    kind = "oracle" if chance.random() < 0.6 else chance.choice(sorted(DRAFTERS))
    pair = (family, tied, seed)
    length = chance.choice([1, 1, 2, 3, 5, 8, 13, 40])
    padding = chance.choice([0, 0, 0, 1, 6])
    # 0 is the padding token: without a mask, `generate` takes every 0 in the prompt for padding.
    prompt = [chance.randrange(1 if padding else 0, VOCABULARY) for _ in range(length)]
    options = {"max_new_tokens": chance.choice([1, 2, 3, 12, 24, 24, 32, 32])}
    if chance.random() < 0.15:
        options = {"max_length": padding + length + options["max_new_tokens"]}

    def maybe(probability, name, value):
        if chance.random() < probability:
            options[name] = value

    maybe(0.2, "repetition_penalty", chance.choice([0.8, 1.3, 2.0]))
    maybe(0.15, "no_repeat_ngram_size", chance.choice([1, 2, 3]))
    maybe(0.1, "bad_words_ids", [[chance.randrange(VOCABULARY)], [5, 9], [chance.randrange(VOCABULARY), 3, 7]])
    maybe(0.1, "suppress_tokens", chance.sample(range(VOCABULARY), 20))
    maybe(0.1, "begin_suppress_tokens", chance.sample(range(VOCABULARY), 20))
    maybe(0.1, "sequence_bias", {(chance.randrange(VOCABULARY),): 4.0, (chance.randrange(VOCABULARY), 2): -8.0})
    maybe(0.1, "forced_eos_token_id", chance.choice(sorted(set(range(VOCABULARY)) - suppressed(options))))
    maybe(0.1, "renormalize_logits", True)
    maybe(0.1, "remove_invalid_values", True)
    if chance.random() < 0.35:
        options["eos_token_id"] = chance.sample(range(VOCABULARY), chance.choice([1, 3, 8]))
        maybe(0.4, "min_new_tokens", chance.choice([2, 6]))
        maybe(0.3, "exponential_decay_length_penalty", (2, 1.3))
    maybe(0.08, "guidance_scale", 1.5)
    if "guidance_scale" in options and chance.random() < 0.5:
        options["negative_prompt_ids"] = torch.tensor([[4, 8, 15]])
    if not is_sliding:
        maybe(0.12, "cache_implementation", "static")
    return {
        "pair": pair,
        "kind": kind,
        "reduced": kind != "oracle" and chance.random() < 0.35,
        "prompt": [0] * padding + prompt,
        "mask": [0] * padding + [1] * length if padding else None,
        "options": options,
        "hit_rate": chance.choice([0.4, 0.8, 0.9, 1.0]),
        "num_assistant_tokens": chance.choice([None, None, None, None, 1, 2, 4]),
        "threshold": chance.choice([None, None, None, None, 0.0, 0.5, 0.7, 1.0]),
        "processor": chance.random() < 0.2,
        "criterion": chance.choice([None, None, None, 1, 2, 5, 1000]),
        "streamer": chance.random() < 0.3,
        "stop_string": chance.random() < 0.12,
        "own_cache": "cache_implementation" not in options and chance.random() < 0.1,
        "wants": chance.choice([(), (), ("output_scores",), ("output_logits",), ("output_scores", "output_logits")]),
        "in_config": chance.random() < 0.3 and "negative_prompt_ids" not in options,
        "copied": chance.choice([None, None, 1, 3, 9]),
    }


def run(case: dict, target, stop_strings, extra: dict):
    """One call of `generate` on a case, with fresh processors, criteria, streamer and cache."""
    log: list = []
    kwargs = {}
    # What a processor writes in place shows in the logits that plain decoding returns, by no one's intention.
    in_place = "output_logits" not in case["wants"]
    if case["mask"] is not None:
        kwargs["attention_mask"] = torch.tensor([case["mask"]])
    if case["processor"]:
        kwargs["logits_processor"] = LogitsProcessorList([RecordingProcessor(log, in_place)])
    if case["criterion"]:
        kwargs["stopping_criteria"] = StoppingCriteriaList([RecordingCriterion(log, case["criterion"])])
    if case["streamer"]:
        kwargs["streamer"] = RecordingStreamer(log)
    if stop_strings:
        kwargs |= {"stop_strings": stop_strings, "tokenizer": tokenizer()}
    if case["own_cache"]:
        kwargs["cache"] = DynamicCache(config=target.config)
    options = {**case["options"], "do_sample": False, "return_dict_in_generate": True}
    options |= dict.fromkeys(case["wants"], True)
    if case["in_config"]:
        options = {"generation_config": GenerationConfig(**options)}
    return target.generate(torch.tensor([case["prompt"]]), **options, **kwargs, **extra), log


@functools.cache
def tokenizer():
    return make_tokenizer()


def find_stop_string(ids: list[int], chance: random.Random) -> str:
    """Two or three characters that plain decoding will write somewhere, so across a border of tokens."""
    text = tokenizer().decode(ids)
    start = chance.randrange(max(len(text) - 3, 1))
    return text[start : start + chance.choice([1, 2, 3])] or "!"


def check(number: int) -> list[int]:
    """Runs a case both ways and compares; returns the accepted lengths."""
    case = draw_case(number)
    target, drafter = target_of(*case["pair"]), drafter_of(case["kind"], *case["pair"], case["reduced"])
    stop_strings = None
    if case["stop_string"]:
        free = run({**case, "criterion": None, "streamer": False}, target, None, {})[0].sequences[0]
        stop_strings = [find_stop_string(free[len(case["prompt"]) :].tolist(), random.Random(number)), "never there"]
    plain, plain_log = run(case, target, stop_strings, {})

    settings = {"assistant_model": drafter, "num_assistant_tokens": case["num_assistant_tokens"]}
    settings["prompt_lookup_num_tokens"] = case["copied"]
    if case["threshold"] is not None and getattr(drafter.config, "enable_confidence_head", False):
        settings["assistant_confidence_threshold"] = case["threshold"]
    if case["kind"] == "oracle":
        real = case["mask"]
        if real is None:
            # `generate` infers padding, unless the padding token is an EOS too.
            guesses = 0 not in case["options"].get("eos_token_id", ())
            real = [int(token != 0 or not guesses) for token in case["prompt"]]
            real = real if any(real) else [1] * len(real)
        whole = plain.sequences[0].tolist()
        prompt = [token for token, is_real in zip(case["prompt"], real) if is_real]
        drafter.tell(prompt + whole[len(case["prompt"]) :], case["hit_rate"], number)
    ours, log = run(case, target, stop_strings, settings)

    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert log == plain_log
    for name in ("scores", "logits"):
        assert (getattr(ours, name) is None) == (getattr(plain, name) is None)
        if getattr(plain, name) is not None:
            assert len(getattr(ours, name)) == len(getattr(plain, name))
            for a, b in zip(getattr(ours, name), getattr(plain, name)):
                assert torch.equal(a.isfinite(), b.isfinite())
                a, b = a[a.isfinite()], b[b.isfinite()]
                assert len(b) == 0 or (a - b).abs().max() <= 3e-5 * max(1.0, float(b.abs().max()))
    assert int(ours.cache.get_seq_length()) == int(plain.cache.get_seq_length())

    new_tokens = ours.sequences.shape[1] - len(case["prompt"])
    speculation = ours.speculation
    assert speculation.generated_tokens == new_tokens
    assert sum(speculation.accepted_lengths[0]) == new_tokens - 1  # the prefill's own token is in no round
    assert speculation.target_forwards == speculation.rounds + 1
    assert all(a <= v <= p for a, v, p in zip(speculation.accepted, speculation.verified, speculation.proposed))
    return speculation.accepted_lengths[0]


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


def test_cases_cover_what_they_should():
    """The drawn cases hold every drafter on every family, and every option."""
    cases = [draw_case(number) for number in range(NUM_CASES)]
    assert {case["kind"] for case in cases} == set(DRAFTERS)
    assert {case["copied"] for case in cases} == {None, 1, 3, 9}
    assert len({case["pair"][0] for case in cases}) == 4
    options = set(itertools.chain.from_iterable(case["options"] for case in cases))
    assert options >= {
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_eos_token_id",
        "guidance_scale",
        "max_length",
        "min_new_tokens",
        "negative_prompt_ids",
        "no_repeat_ngram_size",
        "repetition_penalty",
        "sequence_bias",
        "suppress_tokens",
    }
    for flag in ("processor", "criterion", "streamer", "stop_string", "own_cache", "in_config", "reduced", "mask"):
        assert sum(bool(case[flag]) for case in cases) >= 10, flag


def test_accepted_lengths_are_varied():
    """A comparison would prove little if nearly every draft were rejected, or nearly every one accepted."""
    lengths = [length for number in range(0, NUM_CASES, 6) for length in check(number)]
    # In tokens, because drafters that are rarely right take many more rounds.
    assert 0.35 < sum(length for length in lengths if length > 1) / sum(lengths) < 0.9
    assert set(range(1, 7)) <= set(lengths)


@pytest.mark.parametrize("name", ["qwen3_dspark_vanilla", "qwen3_dspark_rnn", "qwen3_dflash", "qwen3_eagle3"])
def test_trained_drafters(name):
    """Trained drafters, whose drafts are accepted for the right reason, under options that shape the output."""
    folder = Path(__file__).resolve().parents[1] / "parity" / "data" / name
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    target.generation_config.pad_token_id = 0
    drafter, long = AutoDrafter.from_pretrained(folder / "drafter"), 0
    options = [{}, {"repetition_penalty": 1.05}, {"suppress_tokens": [1, 2, 3]}, {"cache_implementation": "static"}]
    for i, prompt in enumerate(json.loads((folder / "decode.json").read_text())["prompts"][1:3]):
        ids = torch.tensor([[0] * i + prompt["prompt_ids"]])
        call = {"attention_mask": torch.tensor([[0] * i + [1] * len(prompt["prompt_ids"])]), "max_new_tokens": 32}
        for option in options:
            plain = target.generate(ids, do_sample=False, **call, **option)
            ours = target.generate(
                ids, do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **call, **option
            )
            assert ours.sequences.tolist() == plain.tolist(), option
            long += sum(length > 1 for length in ours.speculation.accepted_lengths[0])
    assert long >= 10


def test_no_argument_at_all():
    """`generate` without input starts from BOS."""
    target, drafter = target_of("llama", False, 0), drafter_of("vanilla", "llama", False, 0, False)
    call = {"bos_token_id": 3, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(assistant_model=drafter, **call), target.generate(**call))


@pytest.mark.parametrize("mask", [[1, 1, 0, 1, 0, 1], [0, 1, 0, 0, 1, 1]])
def test_mask_with_holes(mask):
    target, drafter = target_of("qwen3", False, 0), drafter_of("eagle3", "qwen3", False, 0, False)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    call = {"attention_mask": torch.tensor([mask]), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=drafter, **call), target.generate(ids, **call))


@pytest.mark.parametrize("kind", ["vanilla", "sample from anchor", "eagle3"])
def test_prompt_of_padding_alone(kind):
    target, drafter = target_of("qwen3", False, 0), drafter_of(kind, "qwen3", False, 0, False)
    for length in (1, 3):
        ids = torch.zeros(1, length, dtype=torch.long)
        call = {"attention_mask": ids, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(target.generate(ids, assistant_model=drafter, **call), target.generate(ids, **call))


def test_criterion_that_reads_the_streamer():
    """A criterion may stop on what the streamer has shown: the streamer is never ahead of plain decoding."""
    target = target_of("llama", False, 1)
    drafter = drafter_of("oracle", "llama", False, 1, False)
    ids, ones = torch.tensor([[7, 8, 9]]), torch.ones(1, 3, dtype=torch.long)

    def decode(**extra):
        log = []
        stop = lambda input_ids, scores: torch.tensor([len(log) > 6])  # noqa: E731
        return target.generate(
            ids,
            attention_mask=ones,
            streamer=RecordingStreamer(log),
            stopping_criteria=StoppingCriteriaList([stop]),
            max_new_tokens=20,
            do_sample=False,
            **extra,
        )

    plain = decode()
    free = target.generate(ids, attention_mask=ones, max_new_tokens=20, do_sample=False)
    drafter.tell(free[0].tolist(), 1.0)
    assert torch.equal(decode(assistant_model=drafter), plain)
    assert plain.shape[1] < free.shape[1]


def test_processor_never_sees_a_prefix_past_the_end():
    """A grammar may raise when it is called with a finished text."""
    target = target_of("llama", False, 1)
    drafter = drafter_of("oracle", "llama", False, 1, False)
    ids, ones = torch.tensor([[7, 8, 9]]), torch.ones(1, 3, dtype=torch.long)
    call = {"attention_mask": ones, "max_new_tokens": 20, "do_sample": False}
    free = target.generate(ids, **call)
    eos = int(free[0, 3 + 6])
    end = free[0, 3:].tolist().index(eos)

    class Grammar(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert eos not in input_ids[0, 3:].tolist(), "called past the end"
            return scores

    drafter.tell(free[0].tolist(), 1.0)
    ours = target.generate(
        ids, assistant_model=drafter, eos_token_id=eos, logits_processor=LogitsProcessorList([Grammar()]), **call
    )
    assert ours[0].tolist() == free[0, : 3 + end + 1].tolist()
