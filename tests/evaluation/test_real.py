"""The embedded pair."""

import pytest

from hf_dspark import AutoDrafter, EvaluationConfig, evaluate_drafter
from hf_dspark.evaluation.results import entry
from hf_dspark.hub import embedded_drafter


@pytest.mark.slow
@pytest.mark.real
def test_embedded_pair(real_target, tmp_path):
    target, tokenizer = real_target
    drafter = AutoDrafter.from_pretrained(embedded_drafter(), dtype=target.dtype)
    config = EvaluationConfig(schedules=["fixed", "fixed:2"], max_new_tokens=32, baselines=["prompt_lookup"])
    prompts = ["Tom has 3 apples and buys 4 more. How many apples does he have?", "What is 12 + 30?"]
    results = evaluate_drafter(
        target, drafter, prompts=prompts, output_dir=tmp_path, config=config, tokenizer=tokenizer
    )
    whole, short = (
        next(e for e in results["results"] if e["contender"].endswith(name) and e["task"] == "prompts")
        for name in (" fixed", " fixed:2")
    )
    for each in (whole, short, entry(results, "prompt_lookup")):
        assert each["equality"] == {"checked": 2, "equal": 2, "ties": 0, "different": 0}
    # These are questions as the drafter was trained on.
    assert whole["accepted_length"]["value"] > 1.5
    assert {p["schedule"] for p in results["cost_model"]["predictions"] if p["measured_speedup"]} == {
        "fixed:2",
        f"fixed:{drafter.num_drafts}",
    }
