"""What is predicted of settings that were run, and of those that were not."""

import functools
import itertools

import pytest

from hf_dspark.evaluation import benchmark
from hf_dspark.evaluation.results import entry
from hf_dspark.generation.profiling import profile_throughput


@pytest.fixture
def model(finished):
    return finished[1]["cost_model"]


def prediction(model, schedule):
    return next(each for each in model["predictions"] if each["schedule"] == schedule)


def test_every_block_length_and_schedule_is_predicted(model):
    names = [each["schedule"] for each in model["predictions"]]
    assert names[:4] == ["fixed:1", "fixed:2", "fixed:3", "fixed:4"]
    assert {"confidence:0.1", "confidence:0.9", "throughput"} <= set(names)
    assert all(each["speedup"] > 0 for each in model["predictions"])


def test_what_was_run_stands_beside(finished, model):
    _, results = finished
    run = {each["schedule"]: each for each in model["predictions"] if each["measured_speedup"]}
    assert set(run) == {"fixed:2", "fixed:4", "confidence:0.5"}
    for schedule, each in run.items():
        name = "drafter fixed" if schedule == "fixed:4" else f"drafter {schedule}"
        assert each["measured_speedup"] == entry(results, name)["speedup"]
        assert each["error"] == pytest.approx(each["speedup"] / each["measured_speedup"]["value"] - 1)


def test_accepted_length_is_foreseen(finished, model):
    """Of the whole block exactly, for it is what was recorded; of a shorter one within a tenth."""
    _, results = finished
    for schedule, name, error in (("fixed:4", "drafter fixed", 1e-9), ("fixed:2", "drafter fixed:2", 0.1)):
        measured = entry(results, name)["accepted_length"]["value"]
        assert prediction(model, schedule)["accepted_length"] == pytest.approx(measured, rel=error), schedule


def test_the_best_is_recommended(model):
    (advice,) = model["recommended"]
    best = max(model["predictions"], key=lambda each: each["speedup"])
    assert (advice["schedule"], advice["speedup"]) == (best["schedule"], best["speedup"])
    assert advice["plain"] == (best["speedup"] < 1.05)


def test_what_generate_does_by_itself_stands_for_the_same_setting(evaluate_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "profile_throughput", functools.partial(profile_throughput, seconds=0))
    results = evaluate_tiny(tmp_path, schedules=["own", "fixed"], prompts=["Hello."], tasks=[], cost_model=True)
    assert list(results["contenders"]) == ["plain", "drafter own"]
    whole = prediction(results["cost_model"], "fixed:4")
    assert whole["measured_speedup"] == entry(results, "drafter own")["speedup"]


def test_curves_are_written(model):
    (costs,) = model["costs"]
    assert list(costs["steps"]) == ["1", "2", "3", "4", "5"]
    assert list(costs["drafts"]) == ["1", "2", "3", "4"]
    assert costs["prefill_per_token"] > 0


def test_thresholds_verify_less_the_higher_they_are(finished):
    _, results = finished
    (calibration,) = results["calibration"]
    for points in calibration["thresholds"].values():
        verified = [point["accepted"] + point["rejected"] for point in points]
        assert verified[0] == pytest.approx(4, abs=1e-9)
        assert all(a >= b for a, b in itertools.pairwise(verified))


def test_without_the_whole_block_there_is_no_model(evaluate_tiny, tmp_path):
    results = evaluate_tiny(tmp_path, schedules=["fixed:2"], prompts=["Hello."], tasks=[], cost_model=True)
    assert results["cost_model"] is None
    assert results["calibration"] == []
