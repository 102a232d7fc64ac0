"""Every metric against cases counted by hand, as functions and through the `evaluate` library, and golden counters."""

import json
import math

import evaluate
import pytest
import torch
from conftest import make_target
from transformers import AutoModelForCausalLM

from hf_dspark import AutoDrafter
from hf_dspark.evaluation import metric_path
from hf_dspark.evaluation.bootstrap import estimate, ratio, ratios, resamples
from hf_dspark.evaluation.contenders import Contender
from hf_dspark.evaluation.decoding import decode, plain_scores, until_end
from hf_dspark.evaluation.equality import compare_outputs, first_mismatch, within_two_units
from hf_dspark.generation.statistics import accepted_histogram, count_rounds, row_record


# Rows of rounds, each of proposed, verified, accepted and committed tokens, and what must come of them.
CASES = {
    "one round, all accepted": (
        [[(3, 3, 3, 4)]],
        {"accepted_length": 4.0, "tokens_per_forward": 5 / 2, "verification_efficiency": 1.0},
        {"marginal_acceptance": [1, 1, 1], "conditional_acceptance": [1, 1, 1], "accepted_histogram": [0, 0, 0, 1]},
    ),
    "end of text inside an accepted run": (
        # 5 drafts verified and right, the second is the end of text: 2 tokens are committed, none of the target's own.
        [[(5, 5, 0, 1), (5, 5, 2, 2)]],
        {"accepted_length": 1.5, "tokens_per_forward": 4 / 3, "verification_efficiency": 0.2},
        {
            "marginal_acceptance": [0.5, 0.5, 0, 0, 0],
            # Both rounds reached the first draft, one the second and, after it, the third.
            "conditional_acceptance": [0.5, 1.0, 0.0, math.nan, math.nan],
            "accepted_histogram": [1, 1],
        },
    ),
    "zero drafts": (
        [[(4, 0, 0, 1), (0, 0, 0, 1)]],
        {"accepted_length": 1.0, "tokens_per_forward": 1.0, "verification_efficiency": math.nan},
        {
            "marginal_acceptance": [math.nan] * 4,
            "conditional_acceptance": [math.nan] * 4,
            "accepted_histogram": [2],
        },
    ),
    "several rows of unequal length": (
        [[(2, 2, 2, 3), (2, 2, 0, 1), (2, 1, 1, 2)], [(2, 2, 1, 2)]],
        {"accepted_length": 2.0, "tokens_per_forward": 10 / 6, "verification_efficiency": 4 / 7},
        {
            "marginal_acceptance": [0.75, 1 / 3],
            "conditional_acceptance": [0.75, 0.5],
            "accepted_histogram": [1, 2, 1],
        },
    ),
    "last round cut by the length limit": (
        # Room for 2 tokens: one draft and the target's own.
        [[(4, 4, 1, 2), (1, 1, 1, 2)]],
        {"accepted_length": 2.0, "tokens_per_forward": 5 / 3, "verification_efficiency": 0.4},
        {
            "marginal_acceptance": [1, 0, 0, 0],
            "conditional_acceptance": [1, 0, math.nan, math.nan],
            "accepted_histogram": [0, 2],
        },
    ),
    "no round": (
        [[]],
        {"accepted_length": math.nan, "tokens_per_forward": 1.0, "verification_efficiency": math.nan},
        {"marginal_acceptance": [], "conditional_acceptance": [], "accepted_histogram": []},
    ),
}


def same(found, expected):
    return found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("case", CASES)
def test_functions(case):
    rows, numbers, lists = CASES[case]
    stats = count_rounds(rows)
    assert same(stats.mean_accepted_length, numbers["accepted_length"])
    assert same(stats.verification_efficiency, numbers["verification_efficiency"])
    assert same(stats.marginal_acceptance, lists["marginal_acceptance"])
    assert same(stats.conditional_acceptance, lists["conditional_acceptance"])
    assert accepted_histogram(stats) == lists["accepted_histogram"]


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    return evaluate.load(metric_path(), cache_dir=str(tmp_path_factory.mktemp("metrics")))


@pytest.mark.parametrize("case", CASES)
def test_evaluate_metric(metric, case):
    rows, numbers, lists = CASES[case]
    names = ("proposed", "verified", "accepted", "committed")
    columns = {name: [[round_[i] for round_ in row] for row in rows] for i, name in enumerate(names)}
    found = metric.compute(**columns, target_forwards=[len(row) + 1 for row in rows])
    for name, expected in (numbers | lists).items():
        assert same(found[name], expected), name
    assert found["rounds"] == sum(map(len, rows))


def test_evaluate_metric_refuses_lists_that_do_not_fit(metric):
    with pytest.raises(ValueError, match="Row 1 names different numbers of rounds"):
        metric.compute(
            proposed=[[1], [1]],
            verified=[[1], [1, 1]],
            accepted=[[0], [0]],
            committed=[[1], [1]],
            target_forwards=[2, 2],
        )


@pytest.mark.parametrize("counts", [(2, 3, 1, 2), (2, 1, 2, 3), (2, 2, 2, 4), (2, 2, 1, 0), (2, -1, -2, -3)])
def test_evaluate_metric_refuses_impossible_counts(metric, counts):
    names = ("proposed", "verified", "accepted", "committed")
    rounds = {name: [[2, 2], [1, count]] for name, count in zip(names, counts)}
    rounds["committed"][0] = [3, 3]
    rounds["committed"][1][0] = 2
    with pytest.raises(ValueError, match=f"Row 1, round 1 can't be: 2 proposed, {counts[1]} verified"):
        metric.compute(**rounds, target_forwards=[3, 3])


@pytest.mark.parametrize("run", ["speculative", "speculative_threshold_0.5", "speculative_threshold_0.9"])
def test_golden_counters(golden, run):
    """Recorded runs of the reference: their counts of each round are ours, and so are the metrics of them."""
    target = AutoModelForCausalLM.from_pretrained(golden / "target")
    target.generation_config.eos_token_id = None
    drafter = AutoDrafter.from_pretrained(golden / "drafter")
    threshold = float(run.rpartition("_")[2]) if "threshold" in run else None
    for prompt in json.loads((golden / "decode.json").read_text())["prompts"][:2]:
        ids, theirs = torch.tensor([prompt["prompt_ids"]]), prompt[run]
        stats = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            max_new_tokens=48,
            do_sample=False,
            return_dict_in_generate=True,
            assistant_confidence_threshold=threshold,
            verification_schedule="fixed" if threshold is None else None,
        ).speculation
        names = ("proposal_lengths", "accepted_draft_lengths", "acceptance_lengths")
        golden_rounds = list(zip(*(theirs[name] for name in names)))
        rounds = row_record(stats, 0)["rounds"]
        # Near the length limit we draft no more than there is room for; they draft on, and cut the text.
        whole = sum(proposed == drafter.num_drafts for proposed, *_ in rounds)
        assert whole >= 3
        assert [tuple(round_[1:]) for round_ in rounds[:whole]] == golden_rounds[:whole]
        counted = count_rounds([rounds[:whole]])
        committed, verified, accepted = (
            sum(theirs[name][:whole]) for name in ("acceptance_lengths", "proposal_lengths", "accepted_draft_lengths")
        )
        assert same(counted.mean_accepted_length, committed / whole)
        assert same(counted.verification_efficiency, accepted / verified if verified else math.nan)


@pytest.fixture(params=["qwen3_dspark_vanilla", "qwen3_dspark_rnn"])
def golden(request, pytestconfig):
    return pytestconfig.rootpath / "tests" / "parity" / "data" / request.param


def test_tokens_behind_the_end_of_text_do_not_count():
    assert until_end([5, 6, 2, 0, 0], {2}) == [5, 6, 2]
    assert until_end([5, 6], {2}) == [5, 6]


def test_first_mismatch():
    assert first_mismatch([1, 2, 3], [1, 2, 3]) is None
    assert first_mismatch([1, 2, 3], [1, 4, 3]) == 1
    assert first_mismatch([1, 2, 3], [1, 2]) == 2


def test_units_of_bfloat16():
    # Between 16 and 32 bfloat16 steps by 1/8.
    assert within_two_units(17.0, 17.25)
    assert not within_two_units(17.0, 17.375)
    assert within_two_units(-17.0, -17.25)
    # Between 1 and 2 by 1/128.
    assert within_two_units(1.0, 1 + 2 / 128)
    assert not within_two_units(1.0, 1 + 3 / 128)


def test_outputs_are_compared_where_they_part():
    scores = {1: torch.tensor([0.0, 17.0, 17.25, 17.375])}
    assert compare_outputs([0, 1, 2], [0, 1, 2], scores) == "equal"
    assert compare_outputs([0, 2, 2], [0, 1, 3], scores) == "tie"
    assert compare_outputs([0, 3, 2], [0, 1, 2], scores) == "different"
    # Without scores nothing but equal is equal; and a text that is shorter is another text.
    assert compare_outputs([0, 2, 2], [0, 1, 3]) == "different"
    assert compare_outputs([0, 1, 2], [0], scores) == "different"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_that_plain_decoding_chose_from(dtype):
    target = make_target().to(dtype)
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    settings = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3}
    plain = decode(target, Contender("plain", {}), prompts, 0, **settings)
    kept = plain_scores(target, prompts, 0, [(0, 2), (1, 5)], **settings)
    assert set(kept) == {(0, 2), (1, 5)}
    assert all(int(scores.argmax()) == plain.new_ids[row][position] for (row, position), scores in kept.items())
    inputs = {"input_ids": torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    whole = target.generate(**inputs, **settings, pad_token_id=0, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(kept[1, 5], whole.scores[5][1].float())


def test_interval_covers_the_mean_in_95_of_100_cases():
    """100 experiments of 40 prompts each, whose true ratio is 2; seeded, so this is no lottery."""
    import numpy as np

    rng, covered = np.random.default_rng(0), 0
    for _ in range(100):
        below = rng.integers(5, 30, size=40).astype(float)
        above = below * rng.gamma(4, 0.5, size=40)
        found = estimate(ratio(above, below), ratios(above, below, resamples(40, 0)))
        covered += found["low"] <= 2 <= found["high"]
    assert 86 <= covered <= 99  # 95 % with 40 prompts, within 3 standard errors


def test_intervals_are_seeded():
    first, again, other = (resamples(7, seed) for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()
