"""Evaluation in training: held-out prompts are really decoded, and that chooses the best checkpoint."""

import json

import pytest
import torch
from conftest import make_target
from datasets import Dataset
from training_runs import KINDS, logged, make_data, make_drafter, make_trainer, weights
from transformers import EarlyStoppingCallback

from hf_dspark import AutoDrafter, DraftConfig
from hf_dspark.generation.statistics import Speculation
from hf_dspark.training.evaluation import (
    confidence_error,
    decode_prompts,
    decoding_metrics,
    held_out_prompts,
)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_those_of_generate(tmp_path, kind):
    target, data = make_target(), make_data(3, seed=5)
    trainer = make_trainer(tmp_path, kind, target=target, eval_data=data, eval_prompts=3, eval_max_new_tokens=10)
    found = trainer.evaluate()
    drafter, lengths, forwards, tokens = trainer.model, [], 0, 0
    accepted, reached, verified = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for row in data:
        output = target.generate(
            torch.tensor([row["input_ids"][:4]]),
            assistant_model=drafter,
            max_new_tokens=10,
            do_sample=False,
            return_dict_in_generate=True,
        )
        stats = output.speculation
        lengths += stats.accepted_lengths[0]
        forwards, tokens = forwards + stats.target_forwards, tokens + stats.generated_tokens
        for total, counts in ((accepted, stats.accepted), (reached, stats.reached), (verified, stats.verified)):
            total += torch.tensor(counts)
    assert found["eval_accepted_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["eval_tokens_per_forward"] == pytest.approx(tokens / forwards)
    assert found["eval_marginal_acceptance_1"] == pytest.approx(float(accepted[0] / verified[0]))
    for k in range(3):
        if reached[k]:
            assert found[f"eval_conditional_acceptance_{k + 1}"] == pytest.approx(float(accepted[k] / reached[k]))
    assert 0 <= found["eval_confidence_error"] <= 1
    assert found["eval_loss"] > 0


@pytest.mark.slow
def test_a_drafter_that_learnt_the_answers_is_accepted_longer(tmp_path):
    target = make_target()
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    rows = []
    for prompt in prompts:
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (len(ids) - 4)})
    data = Dataset.from_list(rows)
    settings = {"eval_max_new_tokens": 16, "max_steps": 120, "num_anchors": 32, "learning_rate": 1e-2}
    trainer = make_trainer(tmp_path, target=target, data=data, eval_data=data, logging_steps=40, **settings)
    assert trainer.evaluate()["eval_accepted_length"] < 1.5
    trainer.train()
    # Three drafts a round, all of them right but for the cut at the end: 15 tokens in 4 rounds.
    assert trainer.evaluate()["eval_accepted_length"] > 3


def test_the_best_checkpoint_is_the_one_with_the_longest_accepted_length(tmp_path, monkeypatch):
    lengths = iter([1.5, 2.5, 2.0])
    trainer = make_trainer(
        tmp_path,
        eval_data=make_data(2, seed=5),
        max_steps=6,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    monkeypatch.setattr(trainer, "decode_held_out", lambda dataset: {"accepted_length": next(lengths)})
    trainer.train()
    assert trainer.args.metric_for_best_model == "accepted_length"
    assert trainer.args.greater_is_better
    assert trainer.state.best_metric == 2.5
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    best = weights(AutoDrafter.from_pretrained(tmp_path / "checkpoint-4"))
    assert all(torch.equal(best[name], value) for name, value in weights(trainer.model).items())
    last = weights(AutoDrafter.from_pretrained(tmp_path / "checkpoint-6"))
    assert not all(torch.equal(best[name], value) for name, value in last.items())


def test_training_stops_when_accepted_length_no_longer_rises(tmp_path, monkeypatch):
    lengths = iter([1.5, 1.4, 1.3, 9.0])
    trainer = make_trainer(
        tmp_path,
        eval_data=make_data(2, seed=5),
        max_steps=8,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    monkeypatch.setattr(trainer, "decode_held_out", lambda dataset: {"accepted_length": next(lengths)})
    trainer.train()
    assert trainer.state.global_step == 6
    assert logged(trainer, "eval_accepted_length") == [1.5, 1.4, 1.3]


def test_evaluating_changes_nothing_about_the_training(tmp_path):
    """Also when it samples."""
    settings = {"max_steps": 4, "eval_max_new_tokens": 6, "eval_temperature": 1.0, "eval_data": make_data(2, seed=5)}
    plain = make_trainer(tmp_path, **settings)
    plain.train()
    watched = make_trainer(tmp_path, eval_strategy="steps", eval_steps=1, **settings)
    watched.train()
    assert len(logged(watched, "eval_accepted_length")) == 4
    assert all(torch.equal(weights(plain.model)[name], value) for name, value in weights(watched.model).items())


def test_several_evaluation_sets_are_told_apart(tmp_path):
    sets = {"thinking": make_data(2, seed=5), "direct": make_data(2, seed=6)}
    trainer = make_trainer(
        tmp_path, eval_data=sets, max_steps=2, eval_strategy="steps", eval_steps=2, eval_max_new_tokens=6
    )
    trainer.train()
    for name in sets:
        assert logged(trainer, f"eval_{name}_accepted_length")
        assert logged(trainer, f"eval_{name}_loss")
    # The best checkpoint is that with the longest accepted length over both.
    each = [logged(trainer, f"eval_{name}_accepted_length")[0] for name in sets]
    assert logged(trainer, "eval_accepted_length") == [sum(each) / 2]
    assert "NaN" not in json.dumps(trainer.state.log_history)


def test_the_loss_alone_decodes_nothing(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, eval_data=make_data(2), eval_prompts=0)
    monkeypatch.setattr(trainer.target_model, "generate", None)
    assert "eval_accepted_length" not in trainer.evaluate()
    config = DraftConfig(
        str(tmp_path), eval_prompts=0, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps"
    )
    assert config.metric_for_best_model == "loss"


def test_prompts_are_what_comes_before_the_first_supervised_token():
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
        {"input_ids": [7, 8], "loss_mask": [0, 0]},
        {"input_ids": [9, 8, 7], "loss_mask": [0, 1, 0]},
    ]
    assert held_out_prompts(rows, 5) == [[1, 2], [9]]
    assert held_out_prompts(rows, 1) == [[1, 2]]


def test_sampled_evaluation_repeats_and_leaves_the_random_state_alone():
    target = make_target()
    drafter = make_drafter("dspark", target)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    runs = [decode_prompts(target, drafter, [[5, 6, 7]], 12, temperature=1.0) for _ in range(2)]
    assert runs[0][0].accepted_lengths == runs[1][0].accepted_lengths
    assert torch.equal(torch.rand(3), expected)


def test_confidence_is_judged_by_the_survival_of_the_prefix():
    run = Speculation()
    run.record_round([0], 2, [2], [2], [1], [2], torch.tensor([[0.9, 0.5]]))
    # A round that verified less was chosen by the confidences themselves.
    run.record_round([0], 2, [1], [1], [1], [2], torch.tensor([[0.9, 0.1]]))
    assert confidence_error(run) == pytest.approx((abs(0.9 - 1) + abs(0.45 - 0)) / 2)
    assert "confidence_error" not in decoding_metrics([Speculation()])


@pytest.mark.parametrize("wrong", [{"eval_prompts": -1}, {"eval_max_new_tokens": 0}, {"eval_temperature": -0.5}])
def test_impossible_evaluations_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DraftConfig(str(tmp_path), **wrong)
