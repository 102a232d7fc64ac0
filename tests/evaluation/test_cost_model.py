"""What is predicted of settings that were run, and of those that were not."""

import itertools
import statistics

import pytest
import torch

from hf_dspark.evaluation import benchmark
from hf_dspark.evaluation.log import read_log
from hf_dspark.evaluation.recorded import recorded_units
from hf_dspark.evaluation.results import entry


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
    folder, results = finished
    records = [record for record in read_log(folder) if "unit" in record]
    run = {each["schedule"]: each for each in model["predictions"] if each["measured_speedup"]}
    assert set(run) == {"fixed:2", "fixed:4", "confidence:0.5"}
    for schedule, each in run.items():
        name = "drafter fixed" if schedule == "fixed:4" else f"drafter {schedule}"
        assert each["measured_speedup"] == entry(results, name)["speedup"]
        units = recorded_units(records, "drafter fixed", 1, 4)
        assert statistics.median(unit.speedups[name] for unit in units) == each["measured_speedup"]["value"]
        assert -1 < each["error"] < 5
    # The whole block sets each prompt's level, so that it is foreseen exactly.
    assert run["fixed:4"]["error"] == pytest.approx(0, abs=1e-9)
    assert run["fixed:4"]["speedup"] == pytest.approx(run["fixed:4"]["measured_speedup"]["value"])


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
    monkeypatch.setattr(benchmark, "PROFILE_SECONDS", 0)
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
    for task, points in calibration["thresholds"].items():
        verified = [point["accepted"] + point["rejected"] for point in points]
        measured = entry(results, "drafter fixed", task)
        assert verified[0] == pytest.approx(measured["drafts"]["verified"] / measured["rounds"])
        assert all(a >= b for a, b in itertools.pairwise(verified))


def test_without_the_whole_block_there_is_no_model(evaluate_tiny, tmp_path):
    results = evaluate_tiny(tmp_path, schedules=["fixed:2"], prompts=["Hello."], tasks=[], cost_model=True)
    assert results["cost_model"] is None
    assert results["calibration"] == []


def test_what_was_run_is_replayed_as_it_was(finished, model):
    """The last rounds of an answer too, which have room for fewer drafts."""
    _, results = finished
    measured = entry(results, "drafter fixed")
    predicted = prediction(model, "fixed:4")
    assert predicted["verified_per_round"] == pytest.approx(measured["drafts"]["verified"] / measured["rounds"])
    assert predicted["verified_per_round"] < 4


def test_a_long_prompt_among_short_ones_leaves_costs_above_zero(evaluate_tiny, tmp_path, monkeypatch):
    """Rows are padded to the longest prompt; what its prefill took is measured, not reckoned."""
    monkeypatch.setattr(benchmark, "PROFILE_SECONDS", 0)
    monkeypatch.setattr(benchmark, "write_plots", lambda *_: {})
    prompts = ["x" * 300, *map(str, range(7))]
    settings = {"schedules": ["fixed"], "rows": [8], "max_new_tokens": 4, "tasks": [], "prompts": prompts}
    model = evaluate_tiny(tmp_path, cost_model=True, **settings)["cost_model"]
    (costs,) = model["costs"]
    assert min(costs["steps"].values()) > 0
    assert min(costs["drafts"].values()) > 0
    assert all(each["speedup"] > 0 for each in model["predictions"])


def test_answers_without_a_round(evaluate_tiny, pair, tiny_tokenizer, tmp_path, monkeypatch):
    """Each ends with the prefill's token: there is nothing to predict from, and nothing to draw but times."""
    target, _ = pair
    monkeypatch.setattr(benchmark, "PROFILE_SECONDS", 0)
    ids = torch.tensor([benchmark.encode(tiny_tokenizer, [{"role": "user", "content": "hi"}])])
    first = target.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1].item()
    monkeypatch.setattr(target.generation_config, "eos_token_id", first)
    results = evaluate_tiny(tmp_path, schedules=["fixed"], tasks=[], prompts=["hi"], cost_model=True)
    assert results["complete"]
    assert results["cost_model"] is None
    assert entry(results, "drafter fixed")["accepted_length"]["value"] is None
    assert (tmp_path / "plots" / "accepted_length.png").is_file()
