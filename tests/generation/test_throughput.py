"""The throughput schedule in `generate`: its profile, its defaults, and output that stays what it was."""

import json

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import make_target
from transformers import GenerationConfig

from hf_dspark import DFlashDrafter, DSparkDrafter, Eagle3Drafter, ThroughputProfile, profile_throughput
from hf_dspark.generation import profile as profiles


BLOCK = {"mask_token_id": 1, "block_size": 4, "num_hidden_layers": 1}
PROMPTS = torch.tensor([[11, 7, 30, 2], [0, 3, 8, 25], [5, 5, 9, 12]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
ROWS = (1, 2, 4)


@pytest.fixture(autouse=True)
def cache_of_profiles(tmp_path, monkeypatch):
    """Profiles of these tests stay among themselves."""
    monkeypatch.setenv("HF_DSPARK_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    return DSparkDrafter.from_target(target, markov_rank=8, **BLOCK)


def keep_profile(target, drafter, step, draft):
    """Stores a made-up profile for the pair."""
    drafter.attach(target)
    conditions = profiles.pair_conditions(target, drafter)
    steps = {r: {r * n: step(r, r * n) for n in range(1, drafter.num_drafts + 2)} for r in ROWS}
    drafts = {r: {n: draft(r, n) for n in range(1, drafter.num_drafts + 1)} for r in ROWS}
    made_up = ThroughputProfile(steps, drafts, conditions)
    made_up.save(profiles.profile_path(conditions))
    return made_up


def free(rows, tokens):
    return 1 + 1e-4 * tokens


def generate(target, drafter, **kwargs):
    call = {"attention_mask": MASK, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    return target.generate(PROMPTS, assistant_model=drafter, **(call | kwargs))


# ---------------------------------------------------------------------- measuring and keeping


def test_profile_of_a_tiny_pair(target, drafter, cache_of_profiles):
    measured = profile_throughput(target, drafter, rows=(2, 1), context=4, seconds=0, progress=False)
    assert list(measured.step_seconds) == list(measured.draft_seconds) == [1, 2]
    assert list(measured.step_seconds[1]) == [1, 2, 3, 4, 5]
    assert list(measured.step_seconds[2]) == [2, 4, 6, 8, 10]
    assert list(measured.draft_seconds[2]) == [1, 2, 3, 4]
    assert all(0 < s < 5 for curve in measured.step_seconds.values() for s in curve.values())
    # It is kept, and found again for the same pair.
    (file,) = cache_of_profiles.glob("*.json")
    assert ThroughputProfile.load(file) == measured
    assert profiles.stored_profile(target, drafter) == measured
    assert "verification_schedule" not in json.loads(file.read_text())["conditions"]
    run = generate(target, drafter, verification_schedule="throughput").speculation
    assert run.generated_tokens == 3 * 24


def test_profile_without_a_drafter(target, cache_of_profiles):
    measured = profile_throughput(target, rows=(1,), context=4, seconds=0, progress=False)
    assert measured.draft_seconds == {}
    assert profiles.stored_profile(target, None) == measured


def test_profile_that_is_only_looked_at(target, drafter, cache_of_profiles):
    profile_throughput(target, drafter, rows=(1,), context=4, seconds=0, progress=False, store=False)
    assert not cache_of_profiles.exists()
    with pytest.raises(ValueError, match="must be positive"):
        profile_throughput(target, drafter, rows=(0, 1), progress=False)


def test_profiling_leaves_no_trace(target, drafter):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = generate(target, drafter, verification_schedule="fixed").sequences
    profile_throughput(target, drafter, rows=(1,), context=4, seconds=0, progress=False, store=False)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(generate(target, drafter, verification_schedule="fixed").sequences, before)


def test_without_a_profile_throughput_is_refused(target, drafter):
    with pytest.raises(ValueError, match=r"hf-dspark profile --target .* --drafter .*none has been measured|none has"):
        generate(target, drafter, verification_schedule="throughput")


def test_a_profile_is_its_pairs_alone(target, drafter):
    """Another shape, type, number of threads or version has other costs; another training has not."""
    keep_profile(target, drafter, free, lambda rows, n: 1e-3)
    assert profiles.stored_profile(target, drafter) is not None
    assert profiles.stored_profile(make_target("llama", 4), drafter) is not None
    assert profiles.stored_profile(make_target("qwen3", 3), drafter) is None
    assert profiles.stored_profile(make_target("llama", 3, intermediate_size=64), drafter) is None
    assert profiles.stored_profile(make_target("llama", 3).to(torch.bfloat16), drafter) is None
    other = DSparkDrafter.from_target(target, markov_rank=4, **BLOCK)
    assert profiles.stored_profile(target, other) is None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert profiles.stored_profile(target, drafter) is None
    finally:
        torch.set_num_threads(threads)


def test_stale_and_damaged_profiles(target, drafter, cache_of_profiles, monkeypatch):
    keep_profile(target, drafter, free, lambda rows, n: 1e-3)
    (file,) = cache_of_profiles.glob("*.json")
    monkeypatch.setattr(profiles.torch, "__version__", "9.9")
    assert profiles.stored_profile(target, drafter) is None
    with pytest.raises(ValueError, match="the stored one is of torch 2"):
        generate(target, drafter, verification_schedule="throughput")
    # Without the wish for it, the default falls back.
    assert sum(generate(target, drafter).speculation.verified) > 0
    monkeypatch.undo()
    for content in (
        "{",
        '{"step_seconds": {}}',
        '{"conditions": {}, "step_seconds": {"1": {"1": -1}}, "draft_seconds": {}}',
        '{"conditions": {}, "step_seconds": {}, "draft_seconds": {}}',
        '{"conditions": {}, "step_seconds": {"0": {"1": 1}}, "draft_seconds": {}}',
        '{"conditions": {"drafter": {}}, "step_seconds": {"1": {"1": 1}}, "draft_seconds": {}}',
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match="is no throughput profile"):
            ThroughputProfile.load(file)
        # The default falls back here too.
        assert generate(target, drafter).speculation.schedule == "fixed"


# ---------------------------------------------------------------------- settings


def test_the_default_is_throughput_where_it_was_measured(target, drafter):
    """Drafting that can't pay is not begun; without a profile everything is verified."""
    fixed = generate(target, drafter).speculation
    assert all(r.scheduled == [4, 4, 4][: len(r.rows)] for r in fixed.history if r.proposed == 4)
    keep_profile(target, drafter, lambda rows, tokens: tokens, lambda rows, n: 1.0)
    throughput = generate(target, drafter).speculation
    assert sum(throughput.proposed) == 0
    assert (fixed.schedule, throughput.schedule) == ("fixed", "throughput")
    # A schedule that is named is kept to: in the call, in its config, in the checkpoint.
    assert sum(generate(target, drafter, verification_schedule="fixed").speculation.verified) > 0
    config = GenerationConfig(verification_schedule="fixed", pad_token_id=0)
    assert sum(generate(target, drafter, generation_config=config).speculation.verified) > 0
    drafter.generation_config.verification_schedule = "fixed"
    assert sum(generate(target, drafter).speculation.verified) > 0
    assert sum(generate(target, drafter, verification_schedule="throughput").speculation.proposed) == 0


def test_temperatures_by_precedence(target, drafter):
    """They reach the schedule from the checkpoint, a config or the call, and are checked."""
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.fill_(2.0)  # a confidence of 0.88 everywhere
    settings = {"assistant_confidence_threshold": 0.7}

    def verified(**kwargs):
        return sum(generate(target, drafter, **settings, **kwargs).speculation.verified)

    everything = verified()
    assert everything > 0
    drafter.generation_config.confidence_temperatures = [4.0] * 4  # 0.62
    assert verified() == 0
    assert verified(generation_config=GenerationConfig(confidence_temperatures=[1.0] * 4, pad_token_id=0)) > 0
    assert verified(confidence_temperatures=[1.0] * 4) == everything
    for wrong in ([1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, float("inf")]):
        with pytest.raises(ValueError, match="`confidence_temperatures` must be 4 positive numbers"):
            verified(confidence_temperatures=wrong)


def test_recorded_confidences_are_the_drafters_own(target, drafter):
    """Not those with temperatures: what is fitted on them must not depend on an earlier fit."""
    first = generate(target, drafter, verification_schedule="fixed").speculation
    again = generate(target, drafter, verification_schedule="fixed", confidence_temperatures=[3.0] * 4).speculation
    pairs = [(one.confidences, other.confidences) for one, other in zip(first.history, again.history) if one.proposed]
    assert len(pairs) > 10
    assert all(torch.equal(*pair) for pair in pairs)


# ---------------------------------------------------------------------- the output stays what it was


@pytest.mark.parametrize("kind", [DSparkDrafter, DFlashDrafter, Eagle3Drafter])
@pytest.mark.parametrize("cost", [1e-4, 0.15, 0.6])
def test_greedy_rows_are_exact(kind, cost, target):
    torch.manual_seed(0)
    drafter = kind.from_target(target, **({} if kind is Eagle3Drafter else BLOCK))
    keep_profile(target, drafter, lambda rows, tokens: 1 + cost * (tokens - 1), lambda rows, n: 0.02)
    plain = target.generate(PROMPTS, attention_mask=MASK, max_new_tokens=40, do_sample=False)
    output = generate(target, drafter, verification_schedule="throughput", max_new_tokens=40)
    assert torch.equal(output.sequences, plain)


def test_a_pause_is_taken_in_at_once(target, drafter):
    """After a pause the drafter knows everything that it would have known without."""
    from hf_dspark.generation.scheduling import Schedule
    from hf_dspark.generation.settings import DraftSettings

    class Pausing(Schedule):
        def __init__(self, pattern):
            super().__init__(DraftSettings(4))
            self.pattern, self.seen = pattern, []

        def num_drafts(self, rows):
            self.pattern = self.pattern[1:] + self.pattern[:1]
            return 4 * self.pattern[-1]

        def lengths(self, confidences, rows):
            self.seen.append(confidences)
            return torch.zeros(len(rows), dtype=torch.long)

    def seen(pattern):
        from hf_dspark.generation.decoding import decode

        schedule = Pausing(pattern)

        def loop(*args, **kwargs):
            return decode(*args, drafter=drafter, settings=DraftSettings(4, schedule), **kwargs)

        target.generate(PROMPTS, attention_mask=MASK, max_new_tokens=18, do_sample=False, custom_generate=loop)
        return schedule.seen

    every, paused = seen([1]), seen([0, 0, 0, 1])
    assert len(paused) > 2
    for i, confidences in enumerate(paused):
        torch.testing.assert_close(confidences, every[4 * i + 3])


def test_waiting_features_are_bounded(target, drafter, monkeypatch):
    import hf_dspark.generation.drafting as drafting

    monkeypatch.setattr(drafting, "MOST_PENDING", 16)
    keep_profile(target, drafter, lambda rows, tokens: tokens, lambda rows, n: 1.0)
    most = []
    add = drafting.Pending.add
    monkeypatch.setattr(drafting.Pending, "add", lambda self, *args: (add(self, *args), most.append(len(self))))
    run = generate(target, drafter, max_new_tokens=40)
    assert sum(run.speculation.proposed) == 0
    assert max(most) <= 16 + 3


def test_same_seed_same_tokens(target, drafter):
    keep_profile(target, drafter, lambda rows, tokens: 1 + 0.1 * (tokens - 1), lambda rows, n: 0.02)
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs.append(generate(target, drafter, do_sample=True, max_new_tokens=60))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert [r.scheduled for r in outputs[0].speculation.history] == [
        r.scheduled for r in outputs[1].speculation.history
    ]


# ---------------------------------------------------------------------- sampling

VOCABULARY = 4


@pytest.fixture(scope="module")
def small_pair():
    """A target of four tokens, and a drafter that is often wrong about it."""
    target = make_target("llama", 5, vocab_size=VOCABULARY)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    torch.manual_seed(1)
    drafter = DSparkDrafter.from_target(target, markov_rank=4, **BLOCK)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.normal_(std=1.0)
    return target, drafter


SITUATIONS = {
    "fixed": ({"verification_schedule": "fixed"}, None),
    "confidence": ({"assistant_confidence_threshold": 0.5}, None),
    # Drafting is free, pays now and then, or is tried in vain.
    "throughput, free": ({}, (1e-4, 1e-3)),
    "throughput, fair": ({}, (0.2, 0.02)),
    "throughput, pausing": ({}, (0.45, 0.05)),
    # Of four tokens, some rows have something to copy in a round and the others draft.
    "fixed, copying": ({"verification_schedule": "fixed", "prompt_lookup_num_tokens": 3}, None),
    "throughput, copying": ({"prompt_lookup_num_tokens": 3}, (0.2, 0.02)),
}


@torch.no_grad()
def exact_distribution(target, prompt, tokens):
    """Probabilities of all continuations of a prompt."""
    outcomes = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * tokens).view(-1, tokens)
    ids = torch.cat([prompt.expand(len(outcomes), -1), outcomes], dim=1)
    logs = target(ids).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
    return logs.gather(2, outcomes[..., None])[..., 0].sum(1).exp().double().numpy()


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("kind", ["trained on nothing", "stubborn"])
def test_every_row_follows_the_targets_distribution(situation, kind, small_pair, monkeypatch):
    """Chi-square per row over the last tokens of short generations, with schedules that see, pause and probe."""
    from hf_dspark.generation import lookup, throughput

    monkeypatch.setattr(lookup, "MATCHED", 2)
    monkeypatch.setattr(throughput, "FIRST_PAUSE", 2)
    target, drafter = small_pair
    if kind == "stubborn":
        # As sure as it can be, of always the same token.
        monkeypatch.setattr(
            type(drafter),
            "base_logits",
            lambda self, hidden: torch.tensor([2.0, 0.5, 0.0, -1.0]).expand(*hidden.shape[:-1], -1),
        )
    settings, costs = SITUATIONS[situation]
    if costs:
        keep_profile(
            target, drafter, lambda rows, tokens: 1 + costs[0] * (tokens - rows) / rows, lambda rows, n: costs[1]
        )
        settings = {**settings, "verification_schedule": "throughput"}
    prompts, tokens, copies, repeats = torch.tensor([[1, 2, 3, 0], [3, 3, 2, 1]]), 5, 100, 8
    counts = np.zeros((2, VOCABULARY**tokens))
    torch.manual_seed(11)
    drafted = copied = 0
    for _ in range(repeats):
        output = target.generate(
            prompts.repeat_interleave(copies, 0),
            attention_mask=torch.ones(2 * copies, 4, dtype=torch.long),
            assistant_model=drafter,
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            pad_token_id=0,
            **settings,
        )
        drafted += sum(output.speculation.verified)
        copied += output.speculation.copied
        places = (output.sequences[:, 4:] * VOCABULARY ** torch.arange(tokens).flip(0)).sum(1).view(2, copies)
        for row in range(2):
            counts[row] += np.bincount(places[row], minlength=VOCABULARY**tokens)
    assert drafted > 0
    assert (copied > 0) == ("copying" in situation)
    for row in range(2):
        expected = exact_distribution(target, prompts[row], tokens)
        assert expected.sum() == pytest.approx(1, abs=1e-4)
        assert chi_square(counts[row], expected / expected.sum()) > 1e-4


def chi_square(counts, expected):
    """p-value; outcomes are pooled until each cell expects at least 8."""
    order = np.argsort(expected)
    total, cells, seen, hoped = counts.sum(), [], 0.0, 0.0
    for i in order:
        seen, hoped = seen + counts[i], hoped + expected[i] * total
        if hoped >= 8:
            cells.append((seen, hoped))
            seen = hoped = 0.0
    observed, wanted = np.array(cells).T
    wanted = wanted * observed.sum() / wanted.sum()
    return scipy.stats.chisquare(observed, wanted).pvalue
