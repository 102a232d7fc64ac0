"""
Sampling with a drafter draws from the target's own distribution. On a vocabulary of eight tokens the exact
probabilities of two consecutive tokens can be computed; samples are compared with them by a chi-square test, with
fixed seeds, for drafters of every kind and for drafters that are bad on purpose.
"""

import functools

import pytest
import torch
from conftest import make_target
from scipy.stats import chi2
from scripted import StubbornDrafter
from transformers import LogitsProcessorList

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_dspark.generation import lookup, verification
from hf_dspark.generation.verification import sample_token, verify_rows


V = 8
PROMPT, FIRST = [3, 1, 4, 1, 5], 2
# A right sampler fails one case in ten thousand by chance; with the seeds fixed, it either does or does not.
LEAST_P = 1e-4


@functools.cache
def target_of(family: str = "llama"):
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    target = make_target(family, 5, num_attention_heads=2, num_key_value_heads=1, **sizes)
    with torch.no_grad():
        # Distributions that are neither flat nor certain.
        target.lm_head.weight.mul_(1.2)
    return target


def right_logits() -> torch.Tensor:
    """The target's own, of the second new token."""
    with torch.no_grad():
        return target_of()(torch.tensor([[*PROMPT, FIRST]])).logits[0, -1]


def bad_logits() -> torch.Tensor:
    """Nearly certain of the token that the target likes least there."""
    return torch.nn.functional.one_hot(right_logits().argmin(), V).float() * 4.0


@functools.cache
def drafter_of(kind: str):
    torch.manual_seed(7)
    target = target_of()
    block = {"mask_token_id": 0, "block_size": 3, "num_hidden_layers": 1}
    reduced = {"draft_vocab_size": 5, "token_counts": torch.arange(V)}
    if kind == "dflash":
        return DFlashDrafter.from_target(target, **block)
    if kind == "eagle3":
        return Eagle3Drafter.from_target(target, num_drafts=3)
    if kind == "eagle3 reduced":
        return Eagle3Drafter.from_target(target, num_drafts=3, **reduced)
    if kind in ("bad", "right"):
        logits = bad_logits() if kind == "bad" else right_logits()
        return StubbornDrafter.from_target(target, markov_rank=0, **block).insist_on(logits)
    extra = reduced if kind == "dspark reduced" else {}
    drafter = DSparkDrafter.from_target(target, markov_rank=4, markov_head_type="rnn", **block, **extra)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "markov" in name or "confidence" in name:
                # Confidences on both sides of one half that depend on the token drafted before.
                parameter.normal_(std=1.0)
    return drafter


def only_first(batch_id, input_ids):
    """Fixes the first new token, so that the two after it have one known prefix."""
    return [FIRST] if len(input_ids) == len(PROMPT) else list(range(V))


def exact(options: dict) -> torch.Tensor:
    """Probabilities `[V, V]` of the second and third new token, by plain forwards through the same processors."""
    target = target_of()
    config = target._prepare_generation_config(None, do_sample=True, max_new_tokens=4, **options)[0]
    prefix = torch.tensor([[*PROMPT, FIRST]])
    target._prepare_special_tokens(config, True, device=torch.device("cpu"))
    processors = target._get_logits_processor(config, len(PROMPT), prefix[:, :-1], None, LogitsProcessorList())

    def distribution(ids):
        with torch.no_grad():
            return torch.softmax(processors(ids, target(ids).logits[:, -1].float()), dim=-1)

    second = distribution(prefix)[0]
    both = torch.cat([prefix.expand(V, -1), torch.arange(V)[:, None]], dim=1)
    third = torch.cat([distribution(row[None]) for row in both])
    return second[:, None] * third


def sample(kind: str, samples: int, options: dict, seed: int) -> torch.Tensor:
    """Counts `[V, V]` of the second and third new token; both are drafted in the first round."""
    drafter, target = drafter_of(kind), target_of()
    counts = torch.zeros(V, V)
    ids = torch.tensor([PROMPT])
    stop = lambda input_ids, scores: torch.tensor([input_ids.shape[1] >= len(PROMPT) + 3])  # noqa: E731
    torch.manual_seed(seed)
    for _ in range(samples):
        new = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            num_assistant_tokens=2,
            prefix_allowed_tokens_fn=only_first,
            stopping_criteria=[stop],
            max_new_tokens=4,
            do_sample=True,
            **options,
        )[0, len(PROMPT) :]
        assert new[0] == FIRST
        counts[new[1], new[2]] += 1
    return counts


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test; cells with fewer than five expected are put together, and impossible ones must be empty."""
    counts, expected = counts.flatten().double(), probabilities.flatten().double() * counts.sum()
    if counts[expected == 0].sum() > 0:
        return 0.0
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    many = int((expected >= 5).sum())
    if expected[many:].sum() > 0:
        counts = torch.cat([counts[:many], counts[many:].sum()[None]])
        expected = torch.cat([expected[:many], expected[many:].sum()[None]])
    keep = expected > 0
    statistic = float(((counts - expected) ** 2 / expected)[keep].sum())
    return float(chi2.sf(statistic, int(keep.sum()) - 1))


WAYS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "repetition penalty": {"repetition_penalty": 1.6},
    "ban": {"no_repeat_ngram_size": 1, "suppress_tokens": [6]},
    "all": {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3},
    "min-p": {"min_p": 0.1},
    "typical-p": {"typical_p": 0.7},
}
CONFIDENCE = {"assistant_confidence_threshold": 0.5}
KINDS = ("dspark", "dspark reduced", "dflash", "eagle3", "eagle3 reduced", "bad")
FAST = (
    ("dspark", "plain"),
    ("dspark reduced", "top-p"),
    ("dflash", "top-k"),
    ("eagle3", "repetition penalty"),
    ("eagle3 reduced", "cold"),
    ("bad", "all"),
)


def check(kind: str, options: dict, samples: int, settings: dict) -> None:
    probabilities = exact({"top_k": 0, **options})
    assert torch.isclose(probabilities.sum(), torch.tensor(1.0))
    counts = sample(kind, samples, {"top_k": 0, **options, **settings}, seed=11)
    assert p_value(counts, probabilities) > LEAST_P


@pytest.mark.parametrize(("kind", "way"), FAST)
def test_two_tokens(kind, way):
    check(kind, WAYS[way], 500, {})


def test_two_tokens_with_confidence_schedule():
    check("dspark", WAYS["cold"], 500, CONFIDENCE)


@pytest.mark.parametrize("way", ["plain", "repetition penalty"])
def test_two_tokens_that_were_copied(way, monkeypatch):
    """The first new token stood in the prompt, so that what followed it there is tried; nothing was drawn for it."""
    monkeypatch.setattr(lookup, "MATCHED", 1)
    monkeypatch.setitem(globals(), "FIRST", 4)
    copied = {"prompt_lookup_num_tokens": 2}
    ids = torch.tensor([PROMPT])
    run = target_of().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter_of("dspark"),
        prefix_allowed_tokens_fn=only_first,
        max_new_tokens=4,
        do_sample=True,
        return_dict_in_generate=True,
        **copied,
    )
    assert run.speculation.history[0].is_copy
    check("dspark", WAYS[way], 500, copied)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WAYS)))
def test_two_tokens_with_many_samples(number):
    kind, way = KINDS[number % len(KINDS)], sorted(WAYS)[number]
    check(kind, WAYS[way], 1500, {})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "threshold"), [("dspark", 0.3), ("dspark reduced", 0.5), ("bad", 0.7)])
def test_confidence_schedule_with_many_samples(kind, threshold):
    check(kind, {}, 1500, {"assistant_confidence_threshold": threshold})


@pytest.mark.parametrize(
    "options",
    [
        {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 0},
        {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": 7},
        {"typical_p": 0.5},
        {"eta_cutoff": 0.1},
        {"epsilon_cutoff": 0.1},
        {"min_p": 0.3},
        {"sequence_bias": {(0,): 5.0, (7,): 5.0}},
        {"bad_words_ids": [[3], [4], [5], [6], [7]]},
        {"repetition_penalty": 0.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10, "eos_token_id": [3, 4, 5, 6, 7]},
        {"top_k": 1},
        {"temperature": 0.01},
    ],
)
def test_options_with_a_reduced_draft_vocabulary(options):
    """Tokens that can't be drafted have a score of minus infinity, which every processor must survive."""
    drafter, ids = drafter_of("dspark reduced"), torch.tensor([PROMPT])
    assert drafter.draft_ids.tolist() == [3, 4, 5, 6, 7]
    torch.manual_seed(0)
    proposed = 0
    for _ in range(4):
        ours = target_of().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            do_sample=True,
            max_new_tokens=12,
            pad_token_id=0,
            return_dict_in_generate=True,
            **options,
        )
        assert ours.sequences.shape[1] > len(PROMPT)
        proposed += sum(ours.speculation.proposed)
    assert proposed > 0


def always_accept(p, draft, q):
    return (draft, True) if draft is not None else sample_token(p, None, None)


def draw_anew_from_p(p, draft, q):
    """The common mistake: after a rejection, a draw from `p` instead of from what is left of it."""
    token, accepted = sample_token(p, draft, q)
    return (token, True) if accepted else (torch.multinomial(p, 1)[0], False)


def accept_the_match(p, draft, q):
    """Greedy acceptance under sampling: right only if the draft does not depend on the draw."""
    best = p.argmax()
    return (best, draft is not None and bool(best == draft))


@pytest.mark.parametrize("wrong_rule", [always_accept, draw_anew_from_p, accept_the_match])
def test_a_wrong_rule_is_noticed(wrong_rule, monkeypatch):
    monkeypatch.setattr(verification, "sample_token", wrong_rule)
    counts = sample("bad", 300, {"top_k": 0}, seed=11)
    assert p_value(counts, exact({"top_k": 0})) < LEAST_P


def test_a_schedule_that_looks_at_the_drawn_token_is_noticed(monkeypatch):
    """Verifying a draft only where it is itself likely biases the output, although every single verdict is right."""
    from hf_dspark.generation import decoding

    def looks_ahead(run, drafted):
        drafted.tokens, drafted.scheduled = [[]], [0]
        if drafted.proposal is not None:
            tokens = drafted.proposal.tokens[0]
            chosen = drafted.proposal.probabilities[0].gather(1, tokens[:, None])[:, 0]
            length = int((chosen >= 0.3).long().cumprod(0).sum())
            drafted.tokens, drafted.scheduled = [tokens[:length].tolist()], [length]
        return drafted

    # With a drafter that is exactly right about the first draft, likely tokens still come out too often.
    monkeypatch.setattr(decoding._Run, "_scheduled", looks_ahead)
    counts = sample("right", 400, {"top_k": 0}, seed=11)
    # Eight cells show it with fewer samples than 64.
    assert p_value(counts.sum(1), exact({"top_k": 0}).sum(1)) < LEAST_P


# ---------------------------------------------------------------------- one position


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(6, generator=generator), dim=-1)
    return p, torch.softmax(2 * torch.randn(6, generator=generator), dim=-1)


def draw_many(p: torch.Tensor, q: torch.Tensor, samples: int, rule=sample_token) -> torch.Tensor:
    torch.manual_seed(3)
    counts = torch.zeros(len(p))
    for draft in torch.multinomial(q, samples, replacement=True):
        token, _ = rule(p, draft, q)
        counts[token] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_one_position(seed):
    p, q = distributions(seed)
    assert p_value(draw_many(p, q, 5000), p) > LEAST_P
    assert p_value(draw_many(p, q, 5000, always_accept), p) < LEAST_P
    assert p_value(draw_many(p, q, 5000, draw_anew_from_p), p) < LEAST_P


def test_one_position_without_draft():
    p, _ = distributions(0)
    torch.manual_seed(3)
    counts = torch.zeros(6)
    for _ in range(3000):
        token, accepted = sample_token(p, None, None)
        assert not accepted
        counts[token] += 1
    assert p_value(counts, p) > LEAST_P


@pytest.mark.parametrize("rule", ["one", "rows"])
@pytest.mark.parametrize("draft", range(3))
def test_a_draft_that_was_not_drawn(draft, rule):
    """A copied token is accepted with its own probability, and else another one is drawn."""
    p, _ = distributions(0)
    torch.manual_seed(3)
    if rule == "one":
        drawn = [int(sample_token(p, torch.tensor(draft), None)[0]) for _ in range(3000)]
    else:
        scores = p.log().expand(2 * 3000, -1)
        drawn = [row[0].token for row in verify_rows(scores, [[draft]] * 3000, None, True, range(3000))]
    assert p_value(torch.bincount(torch.tensor(drawn), minlength=6).float(), p) > LEAST_P


def test_acceptance_rate_is_the_overlap():
    p, q = distributions(1)
    torch.manual_seed(3)
    drafts = torch.multinomial(q, 5000, replacement=True)
    rate = sum(sample_token(p, draft, q)[1] for draft in drafts) / 5000
    overlap = float(torch.minimum(p, q).sum())
    assert abs(rate - overlap) < 4 * (overlap * (1 - overlap) / 5000) ** 0.5


def test_equal_distributions_accept_always():
    p, _ = distributions(2)
    for draft in torch.multinomial(p, 500, replacement=True):
        assert sample_token(p, draft, p) == (draft, True)


def test_impossible_draft_is_never_accepted():
    p = torch.tensor([0.0, 0.4, 0.6])
    q = torch.tensor([1.0, 0.0, 0.0])
    counts = draw_many(p, q, 2000)
    assert counts[0] == 0
    assert p_value(counts, p) > LEAST_P


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_drafter_that_overflows_only_costs_speed(broken, everywhere):
    """As drafters in float16 may: there is still something to draw, and what comes out is still possible."""
    logits = torch.zeros(V)
    logits[slice(None) if everywhere else slice(0, 2)] = broken
    drafter = drafter_of("bad")
    kept = drafter.fixed_logits
    try:
        drafter.insist_on(logits)
        for do_sample in (True, False):
            call = {"attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long), "do_sample": do_sample}
            call |= {"max_new_tokens": 8, "suppress_tokens": [1, 6]}
            new = target_of().generate(torch.tensor([PROMPT]), assistant_model=drafter, **call)[0, len(PROMPT) :]
            assert len(new) == 8
            assert not set(new.tolist()) & {1, 6}
    finally:
        drafter.insist_on(kept)


def test_seeded_sampling_repeats():
    target, drafter, ids = target_of(), drafter_of("dspark"), torch.tensor([PROMPT])
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=True).tolist())
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------- several rows


def exact_first(prompt: list[int], options: dict) -> torch.Tensor:
    """Probabilities `[V, V]` of the second and third new token, by plain forwards."""
    target = target_of()
    temperature = options.get("temperature", 1.0)

    def distribution(ids):
        with torch.no_grad():
            return torch.softmax(target(ids).logits[:, -1].float() / temperature, dim=-1)

    tokens = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    start = torch.tensor([prompt])
    first = distribution(start)[0]
    second = distribution(torch.cat([start.expand(V, -1), torch.arange(V)[:, None]], dim=1))
    third = distribution(torch.cat([start.expand(len(tokens), -1), tokens], dim=1))
    joint = first[:, None, None] * second[:, :, None] * third.view(V, V, V)
    return joint.sum(0)


def check_rows(kind: str, options: dict, samples: int, seed: int = 3) -> None:
    """Many samples of two prompts of unequal length in each call; a test for each of the two."""
    drafter, target = drafter_of(kind), target_of()
    prompts = [[3, 1, 4, 1, 5], [2, 6]]
    ids = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (5 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    counts, each = torch.zeros(len(prompts), V, V), 100
    torch.manual_seed(seed)
    for _ in range(samples // each):
        new = target.generate(
            ids,
            attention_mask=mask,
            assistant_model=drafter,
            num_assistant_tokens=2,
            num_return_sequences=each,
            max_new_tokens=4,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            **options,
        )[:, 5:]
        for row, (_, second, third, _) in enumerate(new.tolist()):
            counts[row // each, second, third] += 1
    for prompt, counted in zip(prompts, counts):
        assert p_value(counted, exact_first(prompt, options)) > LEAST_P


@pytest.mark.parametrize(
    ("kind", "options"), [("dspark", {}), ("dspark", CONFIDENCE), ("eagle3", {"temperature": 0.6}), ("bad", {})]
)
def test_rows(kind, options):
    check_rows(kind, options, 800)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, CONFIDENCE, {"assistant_confidence_threshold": 0.3, "temperature": 1.7}])
def test_rows_with_many_samples(kind, settings):
    check_rows(kind, settings, 6000)


def test_rows_would_show_a_bias(monkeypatch):
    """The test is able to fail: drafts that are always accepted follow the drafter, not the target."""
    monkeypatch.setattr(torch, "rand", lambda *size, **kwargs: torch.zeros(*size))
    with pytest.raises(AssertionError):
        check_rows("bad", {}, 400)
