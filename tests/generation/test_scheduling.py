"""The schedules by themselves: what they may know, what they admit, and that they pay."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dspark.generation.confidence import calibrated
from hf_dspark.generation.profile import ThroughputProfile
from hf_dspark.generation.scheduling import ConfidenceSchedule, Schedule
from hf_dspark.generation.settings import DraftSettings
from hf_dspark.generation.throughput import ThroughputSchedule, rank


ROWS = (1, 2, 4, 8)


def make_profile(step, draft, drafts=4):
    """A profile from functions of (rows, tokens in all) and (rows, drafts a row)."""
    return ThroughputProfile(
        {r: {r * n: step(r, r * n) for n in range(1, drafts + 2)} for r in ROWS},
        {r: {n: draft(r, n) for n in range(1, drafts + 1)} for r in ROWS},
    )


FREE = make_profile(lambda rows, tokens: 1 + 1e-4 * tokens, lambda rows, n: 1e-3)
DEAR = make_profile(lambda rows, tokens: float(tokens), lambda rows, n: 0.2)
FAIR = make_profile(lambda rows, tokens: 1 + 0.15 * (tokens - 1), lambda rows, n: 0.05 * n)


def throughput(profile, drafts=4):
    return ThroughputSchedule(DraftSettings(drafts, "throughput"), profile)


def play(schedule, confidences, rows, chance):
    """One round of the loop; returns the lengths, or `None` where drafting paused."""
    number = schedule.num_drafts(len(rows))
    if number == 0:
        schedule.observe(rows, [0] * len(rows), [0] * len(rows))
        return None
    lengths = schedule.lengths(confidences[:, :number], rows)
    hits = (torch.rand(len(rows), number, generator=chance) < confidences[:, :number]).long().cumprod(1).sum(1)
    schedule.observe(rows, lengths.tolist(), torch.minimum(lengths, hits).tolist())
    return lengths


def play_many(schedule, rounds, rows=(0,), level=0.8, drafts=4, seed=0):
    """Rounds of random confidences around a level; what was verified in each."""
    chance = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(rounds):
        confidences = (level + 0.2 * torch.rand(len(rows), drafts, generator=chance) - 0.1).clamp(0, 1)
        seen.append(play(schedule, confidences, list(rows), chance))
    return seen


# ---------------------------------------------------------------------- lossless: the counterexample of the paper

P, Q = (0.7, 0.3), (0.5, 0.5)
COUNTEREXAMPLE = ThroughputProfile({1: {1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45}}, {1: {1: 1e-9, 2: 1e-9}})


def probability_of_a(length_for) -> float:
    """
    The probability that token A comes out first, exactly. Confidences are 0.8, then 0.9 behind an A and 0 behind a B;
    `length_for` tells how many drafts are verified.
    """
    total = 0.0
    residual = max(P[0] - Q[0], 0) / sum(max(p - q, 0) for p, q in zip(P, Q))
    for token, second in ((0, 0.9), (1, 0.0)):
        if length_for(torch.tensor([[0.8, second]])) == 0:
            total += Q[token] * P[0]
        else:
            accepted = min(1.0, P[token] / Q[token])
            total += Q[token] * (accepted * (token == 0) + (1 - accepted) * residual)
    return total


def global_search(confidences) -> int:
    """The best of all lengths by this round's confidences: what a schedule must not do."""
    survival = confidences[0].cumprod(0).tolist()
    costs = COUNTEREXAMPLE.step_costs(1, 2)
    return int(np.argmax([(1 + sum(survival[:n])) / costs[n] for n in range(3)]))


def test_global_search_over_this_round_is_biased():
    assert probability_of_a(global_search) == pytest.approx(0.85)


@pytest.mark.parametrize("past", range(9))
def test_counterexample_comes_out_unbiased(past):
    """Whatever was seen in how many rounds before."""
    for history in itertools.product((0.05, 0.5, 0.95), repeat=min(past, 3)):

        def length_for(confidences, history=history):
            schedule = throughput(COUNTEREXAMPLE, 2)
            for i in range(past):
                schedule.num_drafts(1)
                if schedule.plan.num_drafts:
                    level = history[i % len(history)]
                    lengths = schedule.lengths(torch.full((1, schedule.plan.num_drafts), level), [0])
                    schedule.observe([0], lengths.tolist(), [0])
                else:
                    schedule.observe([0], [0], [0])
            if schedule.num_drafts(1) == 0:
                return 0
            return int(schedule.lengths(confidences[:, : schedule.plan.num_drafts], [0]))

        assert probability_of_a(length_for) == pytest.approx(0.7)


def test_early_stop_of_the_counterexample():
    """The first draft lowers the throughput from 1 to 0.9, so nothing is admitted, though two would give 1.13."""
    schedule = throughput(COUNTEREXAMPLE, 2)
    schedule.num_drafts(1)
    schedule.plan = type(schedule.plan)(2)
    assert schedule.lengths(torch.tensor([[0.8, 0.9]]), [0]).tolist() == [0]


# ---------------------------------------------------------------------- invariants

SHARES = st.floats(0, 1, width=32)


@st.composite
def situations(draw):
    """A profile (jagged, with endless costs now and then), rows, how many rounds were played, and a last round."""
    rows, drafts = draw(st.sampled_from((1, 2, 3, 5))), draw(st.integers(1, 5))
    seconds = st.one_of(st.floats(0.01, 3), st.just(float("inf")))
    sizes = sorted({r * n for r in ROWS for n in range(1, drafts + 2)})
    times = {size: draw(seconds) for size in sizes}
    times[ROWS[0]] = 1.0
    profile = make_profile(lambda r, tokens: times[tokens], lambda r, n: draw(st.floats(1e-3, 0.5)), drafts)
    confidences = torch.tensor(draw(st.lists(SHARES, min_size=rows * drafts, max_size=rows * drafts)))
    return profile, rows, drafts, draw(st.integers(0, 12)), confidences.view(rows, drafts), draw(st.integers(0, 99))


def at_the_last_round(situation):
    """Schedules in the state before the last round, all the same."""
    profile, rows, drafts, rounds, _, seed = situation
    schedule = throughput(profile, drafts)
    play_many(schedule, rounds, tuple(range(rows)), drafts=drafts, seed=seed)
    return schedule, schedule.num_drafts(rows)


@settings(max_examples=100, deadline=None)
@given(situations())
def test_what_is_verified_depends_on_nothing_drawn_later(situation):
    """
    Confidences behind a position tell of the token drawn there. Changing them may change what is verified behind it,
    never whether that position is.
    """
    _, rows, _, _, confidences, seed = situation
    schedule, number = at_the_last_round(situation)
    if number < 2:
        return
    again, _ = at_the_last_round(situation)
    row, position = seed % rows, 1 + seed % (number - 1)
    changed = confidences.clone()
    changed[row, position:] = torch.rand(len(changed[row, position:]), generator=torch.Generator().manual_seed(seed))
    before = int(schedule.lengths(confidences[:, :number], list(range(rows)))[row])
    after = int(again.lengths(changed[:, :number], list(range(rows)))[row])
    assert min(before, position) == min(after, position)


@settings(max_examples=100, deadline=None)
@given(situations())
def test_invariants(situation):
    profile, rows, drafts, _, confidences, _ = situation
    schedule, number = at_the_last_round(situation)
    assert 0 <= number <= drafts
    if not number:
        return
    lengths = schedule.lengths(confidences[:, :number], list(range(rows)))
    assert lengths.dtype == torch.long and lengths.shape == (rows,)
    assert bool(((lengths >= 0) & (lengths <= number)).all())
    # In the order of admission nothing is skipped: what is verified is the best there is.
    survival = schedule.waiting[-1][2][:, :number]
    verified = [survival[r, k] for r in range(rows) for k in range(int(lengths[r]))]
    left = [survival[r, int(lengths[r])] for r in range(rows) if int(lengths[r]) < number]
    assert not verified or not left or min(verified) >= max(left)
    # A draft that can't be accepted is not verified, and neither is one that makes the step endless.
    assert all(value > 0 for value in verified)
    assert np.isfinite(profile.step_costs(rows, drafts)[int(lengths.sum())])
    if schedule.plan.floors is not None:
        # The budget: past the first candidate that not even certainty would admit, none is.
        assert int(lengths.sum()) <= int((schedule.plan.floors <= 1).cumprod().sum())


def test_order_of_admission():
    values, rows = rank(np.array([[0.9, 0.5, 0.5], [0.9, 0.9, 0.5], [0.2, 0.0, 0.0]]))
    # Larger survivals first, among equals smaller positions, then smaller rows.
    assert values.tolist() == [0.9, 0.9, 0.9, 0.5, 0.5, 0.5, 0.2, 0.0, 0.0]
    assert rows.tolist() == [0, 1, 1, 0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("rows", [1, 3])
def test_no_confidence_no_verification(rows):
    schedule = throughput(FREE)
    for _ in range(5):
        lengths = play(schedule, torch.zeros(rows, 4), list(range(rows)), torch.Generator().manual_seed(0))
        assert lengths is None or lengths.tolist() == [0] * rows


def test_what_the_other_schedules_verify():
    confidences = torch.tensor([[0.9, 0.4, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.8]])
    assert Schedule(DraftSettings(3)).lengths(None, [0, 4, 7]).tolist() == [3, 3, 3]
    schedule = ConfidenceSchedule(DraftSettings(3, "confidence", 0.5))
    assert schedule.lengths(confidences, [0, 4, 7]).tolist() == [1, 0, 3]
    # Temperatures come before anything else: at 8, a confidence of 0.9 is one of 0.57.
    tempered = ConfidenceSchedule(DraftSettings(3, "confidence", 0.5, (8.0, 1.0, 1.0)))
    assert tempered.lengths(torch.tensor([[0.9, 0.4, 0.9]]), [0]).tolist() == [1]
    strict = ConfidenceSchedule(DraftSettings(3, "confidence", 0.7, (8.0, 1.0, 1.0)))
    assert strict.lengths(torch.tensor([[0.9, 0.9, 0.9]]), [0]).tolist() == [0]


def test_temperatures():
    confidences = torch.tensor([[0.9, 0.2, 0.0, 1.0]])
    assert torch.equal(calibrated(confidences, None), confidences)
    torch.testing.assert_close(calibrated(confidences, [1.0] * 5), confidences)
    expected = torch.sigmoid(torch.logit(torch.tensor([0.9, 0.2])) / torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(calibrated(confidences[:, :2], [2.0, 0.5, 1.0]), expected[None])


# ---------------------------------------------------------------------- does it pay


def gain(schedule, profile, rounds, rows, level, seed=0):
    """Time of plain decoding over the schedule's, for the same tokens, by the profile."""
    chance = torch.Generator().manual_seed(seed)
    tokens = seconds = 0.0
    for i in range(rounds):
        number = schedule.num_drafts(rows)
        confidences = torch.full((rows, number), level(i))
        lengths = schedule.lengths(confidences, list(range(rows))) if number else torch.zeros(rows, dtype=torch.long)
        hits = (torch.rand(rows, number, generator=chance) < level(i)).long().cumprod(1).sum(1)
        accepted = torch.minimum(lengths, hits)
        schedule.observe(list(range(rows)), lengths.tolist(), accepted.tolist())
        tokens += rows + int(accepted.sum())
        seconds += profile.draft_costs(rows, 4)[number] + profile.step_costs(rows, 4)[int(lengths.sum())]
    return tokens / seconds / (rows / profile.step_costs(rows, 4)[0])


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("profile", [FREE, FAIR, DEAR], ids=["free", "fair", "dear"])
def test_never_slower_than_plain_and_near_the_best(profile, level, rows):
    others = (Schedule(DraftSettings(n)) for n in range(1, 5))
    best = max(1.0, *(gain(other, profile, 150, rows, lambda i: level) for other in others))
    ours = gain(throughput(profile), profile, 150, rows, lambda i: level)
    assert ours >= 0.98
    assert ours >= 0.95 * best


def test_drafting_is_never_begun_where_even_certainty_does_not_pay():
    assert play_many(throughput(DEAR), 300, level=0.9) == [None] * 300


def test_pauses_grow():
    """On text that is too hard, ever fewer rounds find out whether it still is."""
    seen = play_many(throughput(FAIR), 1000, level=0.15)
    drafted = [i for i, lengths in enumerate(seen) if lengths is not None]
    assert 4 <= len(drafted) <= 16
    gaps = np.diff(drafted)
    assert gaps[-1] > 100 > gaps[2]


def test_drafting_resumes_when_the_text_gets_easy():
    schedule = throughput(FAIR)
    hard = play_many(schedule, 60, level=0.1)
    easy = play_many(schedule, 200, level=0.9)
    assert sum(lengths is not None for lengths in hard) < 12
    assert sum(lengths is not None for lengths in easy[-100:]) > 90


def test_a_boastful_drafter_is_found_out():
    """Confidences of 0.9 whose drafts are never accepted: the losses against plain decoding stay small."""
    schedule = throughput(FAIR)
    rounds = drafted = 0
    for _ in range(400):
        number = schedule.num_drafts(1)
        lengths = schedule.lengths(torch.full((1, number), 0.9), [0]) if number else torch.zeros(1, dtype=torch.long)
        schedule.observe([0], lengths.tolist(), [0])
        rounds, drafted = rounds + 1, drafted + (number > 0)
    assert drafted < 0.15 * rounds


def test_verification_shrinks_with_the_load():
    """The same confidences are worth less verification in a full batch."""
    means = []
    for rows in ROWS:
        seen = play_many(throughput(FAIR), 60, tuple(range(rows)), level=0.7)
        means.append(sum(float(lengths.double().mean()) for lengths in seen if lengths is not None) / len(seen))
    assert means == sorted(means, reverse=True)
    assert means[0] > 2 * means[-1]


def test_a_jagged_curve_is_crossed():
    """A step of 2 tokens costs as much as one of 5: stopping early would verify nothing, though all of it pays."""
    jagged = make_profile(lambda rows, tokens: 1.0 if tokens == rows else 2.0, lambda rows, n: 1e-3)
    schedule = throughput(jagged)
    seen = play_many(schedule, 12, level=0.85)
    assert [lengths.tolist() for lengths in seen[:2]] == [[0], [0]]
    assert all(lengths.tolist() == [4] for lengths in seen[2:])


def test_rows_may_leave():
    schedule = throughput(FAIR)
    chance = torch.Generator().manual_seed(0)
    for rows in ([0, 1, 2, 3, 4], [0, 2, 3], [0, 2, 3], [3], [3], [3], [3]):
        lengths = play(schedule, torch.full((len(rows), 4), 0.9), rows, chance)
        assert lengths is None or lengths.shape == (len(rows),)


def test_same_seed_same_decisions():
    first, second = (play_many(throughput(FAIR), 80, (0, 1, 2), level=0.6, seed=3) for _ in range(2))
    assert [None if x is None else x.tolist() for x in first] == [None if x is None else x.tolist() for x in second]


def test_no_clock_is_read(monkeypatch):
    import time

    for name in ("time", "perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("a schedule looked at a clock"))
    play_many(throughput(FAIR), 20)


# ---------------------------------------------------------------------- the profile


def test_costs_never_fall():
    """A step can be padded up to a cheaper larger one."""
    profile = ThroughputProfile({1: {1: 1.0, 2: 3.0, 3: 2.0, 4: 2.5}}, {1: {1: 0.1, 3: 0.3}})
    assert profile.step_costs(1, 3).tolist() == [1.0, 2.0, 2.0, 2.5]
    assert profile.draft_costs(1, 3).tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_costs_between_and_beyond_what_was_measured():
    profile = ThroughputProfile(
        {2: {2: 1.0, 4: 2.0, 6: 3.0}, 4: {4: 2.0, 8: 4.0, 12: 6.0}}, {2: {1: 1.0, 2: 2.0}, 4: {1: 3.0, 2: 4.0}}
    )
    assert profile.step_costs(3, 2).tolist() == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5])
    assert profile.draft_costs(3, 2).tolist() == pytest.approx([0.0, 2.0, 3.0])
    # More rows, more drafts: in proportion, never for free.
    assert profile.step_costs(8, 2)[0] == pytest.approx(4.0)
    assert profile.step_costs(2, 4)[-1] == pytest.approx(5.0)
