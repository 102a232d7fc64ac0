"""What a batch costs and how it is called: query lengths, padding, many samples of a prompt, refusals by name."""

import pytest
import torch
from conftest import SIZES, QueryLengths, make_target, make_tokenizer
from scripted import OracleDrafter
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

from hf_dspark import AutoDrafter, DSparkDrafter, Eagle3Drafter, hub
from hf_dspark.generation import decoding
from hf_dspark.generation.scheduling import Schedule


PROMPTS = [[11, 7, 30, 2], [5, 6], [9, 8, 7, 6, 5, 4], [21]]
BLOCK = {"mask_token_id": 1, "block_size": 5, "num_hidden_layers": 1}
IDS = torch.tensor([[0] * (6 - len(prompt)) + prompt for prompt in PROMPTS])
MASK = (IDS != 0).long()


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    drafter = DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.normal_(std=3.0)
    return drafter


def decode(target, ids=IDS, mask=MASK, **kwargs):
    call = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **kwargs}
    return target.generate(ids, **call)


def alone(target, ids=IDS, mask=MASK, **kwargs) -> list[list[int]]:
    """What each row gives in a call of its own."""
    rows = range(len(ids))
    return [decode(target, ids[r : r + 1], mask[r : r + 1], **kwargs)[0, ids.shape[1] :].tolist() for r in rows]


def check(target, drafter, ids=IDS, mask=MASK, plain=None, **kwargs):
    """Runs the batch with the drafter, and compares each row with what it gives alone."""
    plain = plain or alone(target, ids, mask, **kwargs)
    output = decode(target, ids, mask, assistant_model=drafter, return_dict_in_generate=True, **kwargs)
    longest = max(map(len, plain))
    assert output.sequences[:, ids.shape[1] :].tolist() == [row + [0] * (longest - len(row)) for row in plain]
    return output


# ---------------------------------------------------------------------- what the target computes


def test_rows_are_packed_and_cut_before_the_forward(target, drafter):
    """The target sees every row's anchor and scheduled drafts, and not one token more."""
    with QueryLengths(target) as lengths:
        run = decode(
            target, assistant_model=drafter, return_dict_in_generate=True, assistant_confidence_threshold=0.5
        ).speculation
    prompt, rounds = lengths[0], lengths[1:]
    assert prompt == IDS.shape[1]
    assert rounds == [len(r.rows) + sum(r.verified) for r in run.history]
    # The schedule is at work: rows of one round differ, and less than everything is verified.
    assert any(len(set(r.verified)) > 1 for r in run.history)
    assert sum(run.verified) < sum(run.proposed)
    assert all(v <= s <= r.proposed for r in run.history for v, s in zip(r.verified, r.scheduled))
    assert all(r.confidences.shape == (len(r.rows), r.proposed) for r in run.history if r.proposed)


def test_finished_rows_leave_the_forward(target):
    free = alone(target, max_new_tokens=24)
    eos = free[1][2]
    ends = [row.index(eos) + 1 if eos in row else 24 for row in free]
    assert min(ends) < 10 < max(ends)
    oracle = OracleDrafter.from_target(target, markov_rank=8, **BLOCK)
    oracle.tell([prompt + row for prompt, row in zip(PROMPTS, free)], 0.5)
    with QueryLengths(target) as lengths:
        run = decode(
            target, assistant_model=oracle, eos_token_id=eos, max_new_tokens=24, return_dict_in_generate=True
        ).speculation
    assert [1 + sum(row) for row in run.accepted_lengths] == ends
    for row, accepted in enumerate(run.accepted_lengths):
        # A row takes part in its first rounds, one for each of its accepted lengths.
        assert [row in r.rows for r in run.history] == [n < len(accepted) for n in range(len(run.history))]
    assert lengths[1:] == [len(r.rows) + sum(r.verified) for r in run.history]


def test_counters_of_an_oracle_with_several_rows(target):
    free = alone(target, max_new_tokens=20)
    oracle = OracleDrafter.from_target(target, markov_rank=8, **BLOCK)
    oracle.tell([prompt + row for prompt, row in zip(PROMPTS, free)], 1.0)
    run = check(target, oracle, max_new_tokens=20).speculation
    # 1 from the prefill, three full rounds and one of a single token, for every row.
    assert run.accepted_lengths == [[6, 6, 6, 1]] * 4
    assert run.target_forwards == 5


def test_a_paused_schedule_loses_nothing(target, monkeypatch):
    """Rounds without a draft: what was committed meanwhile reaches the drafter when it drafts again."""

    class Pausing(Schedule):
        asked = 0

        def num_drafts(self, rows):
            self.asked += 1
            return 0 if self.asked % 4 else 3

    monkeypatch.setattr(decoding, "make_schedule", lambda settings, *_: Pausing(settings))
    free = alone(target, max_new_tokens=24)
    eos = free[1][5]
    free = [row[: row.index(eos) + 1] if eos in row else row for row in free]
    # The oracle checks that its cache holds every position before the anchor.
    oracle = OracleDrafter.from_target(target, markov_rank=8, **BLOCK)
    oracle.tell([prompt + row for prompt, row in zip(PROMPTS, free)], 1.0)
    run = check(target, oracle, plain=free, max_new_tokens=24, eos_token_id=eos).speculation
    assert {r.proposed for r in run.history} >= {0, 3}
    # All that was verified is right, except behind a row's end.
    assert run.verification_efficiency > 0.8


# ---------------------------------------------------------------------- calls


def test_padding_as_plain_generate(target, drafter):
    eos = alone(target)[0][4]
    plain = decode(target, eos_token_id=eos, pad_token_id=63)
    assert torch.equal(decode(target, assistant_model=drafter, eos_token_id=eos, pad_token_id=63), plain)
    # Without a padding token of its own, the EOS serves.
    plain = decode(target, eos_token_id=eos, pad_token_id=None)
    assert torch.equal(decode(target, assistant_model=drafter, eos_token_id=eos, pad_token_id=None), plain)


def test_right_padding_as_plain_generate(target, drafter):
    """Plain decoding goes on behind the padding, which it can't see; so do we."""
    ids = torch.tensor([prompt + [0] * (6 - len(prompt)) for prompt in PROMPTS])
    plain = decode(target, ids, (ids != 0).long())
    assert torch.equal(decode(target, ids, (ids != 0).long(), assistant_model=drafter), plain)


def test_a_row_of_padding_alone(target, drafter):
    ids, mask = torch.cat([IDS, 0 * IDS[:1]]), torch.cat([MASK, 0 * MASK[:1]])
    for kind in (drafter, Eagle3Drafter.from_target(target)):
        assert torch.equal(decode(target, ids, mask, assistant_model=kind), decode(target, ids, mask))


def test_several_samples_of_a_prompt(target, drafter):
    call = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "top_k": 0}
    torch.manual_seed(1)
    output = decode(target, assistant_model=drafter, return_dict_in_generate=True, output_scores=True, **call)
    assert output.sequences.shape == (12, 18)
    assert torch.equal(output.sequences[:, :6], IDS.repeat_interleave(3, dim=0))
    assert len({tuple(row.tolist()) for row in output.sequences[:, 6:]}) > 6
    assert len(output.speculation.accepted_lengths) == 12
    assert len(output.scores) == 12
    assert output.scores[0].shape == (12, 64)
    # A seed gives the same again.
    torch.manual_seed(1)
    assert torch.equal(decode(target, assistant_model=drafter, **call), output.sequences)


def test_allowed_tokens_by_row(target, drafter):
    """`prefix_allowed_tokens_fn` is told the row, also when rows are looked at one by one."""
    allowed = lambda row, ids: [10 + row, 20 + row, 30 + (row + len(ids)) % 7]  # noqa: E731
    plain = decode(target, prefix_allowed_tokens_fn=allowed, repetition_penalty=1.3)
    ours = decode(target, prefix_allowed_tokens_fn=allowed, repetition_penalty=1.3, assistant_model=drafter)
    assert torch.equal(ours, plain)


def test_stop_strings_by_row():
    tokenizer = make_tokenizer()
    target = make_target("llama", 3, vocab_size=len(tokenizer), pad_token_id=0)
    drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer, markov_rank=8, num_hidden_layers=1)
    text = tokenizer.decode(alone(target)[1])
    call = {"stop_strings": [text[2:4]], "tokenizer": tokenizer}
    output = check(target, drafter, plain=alone(target, **call), **call)
    ends = [1 + sum(row) for row in output.speculation.accepted_lengths]
    assert ends[1] < 16 == max(ends)


def test_watchers_that_look_at_rows_alone(target, drafter):
    class Favour(LogitsProcessor):
        row_wise = True

        def __call__(self, input_ids, scores):
            favoured = (input_ids.sum(1, keepdim=True) * 7 + 3) % 64
            return scores.scatter_add(1, favoured, torch.full_like(favoured, 3.0, dtype=scores.dtype))

    class Stop(StoppingCriteria):
        row_wise = True

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, 6:].sum(1) > 250

    watchers = {
        "logits_processor": LogitsProcessorList([Favour()]),
        "stopping_criteria": StoppingCriteriaList([Stop()]),
    }
    output = check(target, drafter, **watchers)
    assert len({sum(row) for row in output.speculation.accepted_lengths}) > 1


def test_pipeline_with_a_batch():
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    target = make_target("llama", 3, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    drafter = DSparkDrafter.from_target(target, tokenizer=tokenizer, markov_rank=8, num_hidden_layers=1)
    call = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False, "batch_size": 3}
    texts = ["Once upon", "a", "time there was"]
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(texts, **call)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    with QueryLengths(target) as lengths:
        assert ours(texts, **call) == plain
    assert max(lengths[1:]) > 3


# ---------------------------------------------------------------------- rows one by one


def test_convolutions_run_row_by_row():
    """A cache with states that every token changes can't hold rows of different lengths."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    torch.manual_seed(0)
    config = Lfm2Config(**sizes, **heads, layer_types=kinds, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    target = Lfm2ForCausalLM(config).eval()
    drafter = DSparkDrafter.from_target(make_target("llama"), markov_rank=8, target_layer_ids=[0, 2], **BLOCK)
    ids = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    with QueryLengths(target) as lengths:
        run = check(target, drafter, ids, torch.ones_like(ids), plain=alone(target, ids, torch.ones_like(ids)))
    assert lengths.count(4) >= 2
    assert run.speculation.target_forwards == 2 + sum(map(len, run.speculation.accepted_lengths))
    assert [sum(row) for row in run.speculation.accepted_lengths] == [15, 15]


def test_static_cache_runs_row_by_row(target, drafter):
    run = check(target, drafter, cache_implementation="static").speculation
    assert run.target_forwards == 4 + sum(map(len, run.accepted_lengths))


# ---------------------------------------------------------------------- refusals


class Anything(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Ever(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processor": LogitsProcessorList([Anything()])}, "Anything, which would be called with one row"),
        ({"stopping_criteria": StoppingCriteriaList([Ever()])}, "Ever, which would be called with one row"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor, which would be called"),
        ({"cache": DynamicCache()}, "a cache of your own"),
        ({"streamer": TextStreamer(None)}, "a streamer"),
        ({"max_time": 9.0, "pad_token_id": None}, "without a `pad_token_id`"),
    ],
)
def test_refused_by_name_with_several_rows(target, drafter, options, message, monkeypatch):
    monkeypatch.setattr(target.generation_config, "pad_token_id", None)
    with QueryLengths(target) as lengths, pytest.raises(ValueError, match=message):
        decode(target, assistant_model=drafter, **options)
    assert lengths == []


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"assistant_confidence_threshold": 0.5}, {"draft_context_window": 16}])
def test_real_pair(real_target, settings):
    """Questions of unequal length, in float32: each answer is the one that it gets alone."""
    target, tokenizer = real_target
    drafter = AutoDrafter.from_pretrained(hub.embedded_drafter())
    questions = [
        "What is 17 + 25?",
        "Name three rivers.",
        "Write a Python function that reverses a list, with a test.",
    ]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in questions
    ]
    inputs = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    call = {"max_new_tokens": 32, "pad_token_id": tokenizer.pad_token_id}
    plain = alone(target, ids, mask, **call)
    longest = max(map(len, plain))
    output = decode(target, ids, mask, assistant_model=drafter, return_dict_in_generate=True, **call, **settings)
    expected = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in plain]
    assert output.sequences[:, ids.shape[1] :].tolist() == expected
    assert output.speculation.mean_accepted_length > 1.3


# ---------------------------------------------------------------------- kernels


@pytest.mark.parametrize("kernel", ["eager", "flex_attention"])
def test_soft_caps_hold_whatever_the_kernel(kernel):
    """PyTorch's attention knows no cap of the logits, so it must not take the place of a kernel that does."""
    torch.manual_seed(0)
    sizes = {**SIZES, "attn_logit_softcapping": 1.0, "sliding_window": 8, "query_pre_attn_scalar": 8}
    target = Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    expected = alone(target)
    target.set_attn_implementation(kernel)
    check(target, DSparkDrafter.from_target(target, markov_rank=8, **BLOCK), plain=expected)
