"""`DraftTrainer`: what is trained and what is not, splits and resumes that change nothing, and refusals."""

import pytest
import torch
from conftest import make_target
from datasets import Dataset
from safetensors.torch import load_file
from training_runs import (
    KINDS,
    KillAt,
    KilledError,
    assert_close_gradients,
    assert_equal_weights,
    first_gradients,
    logged,
    make_data,
    make_drafter,
    make_trainer,
    weights,
)
from transformers import GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, TrainingArguments

from hf_dspark import AutoDrafter, DraftConfig, DraftTrainer, DSparkDrafter
from hf_dspark.training import feature_store
from hf_dspark.training.sampling import GroupedByLength


# ---------------------------------------------------------------------- learning


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, data=make_data(4), max_steps=25, num_anchors=100)
    trainer.train()
    losses = logged(trainer, "loss")
    assert len(losses) == 25
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_terms_are_logged_and_add_up_to_the_loss(tmp_path):
    """Also for the last update of an epoch, which has fewer micro-batches."""
    data = make_data(6)
    trainer = make_trainer(
        tmp_path, data=data, max_steps=3, gradient_accumulation_steps=2, per_device_train_batch_size=2
    )
    trainer.train()
    for entry in trainer.state.log_history[:3]:
        parts = 0.1 * entry["cross_entropy"] + 0.9 * entry["l1"] + 1.0 * entry["confidence"]
        assert parts == pytest.approx(entry["loss"], rel=1e-3)
        # The mean overlap of two distributions is one minus half their distance.
        assert entry["acceptance"] == pytest.approx(1 - entry["l1"] / 2, abs=1e-4)


def test_terms_that_are_not_computed_are_not_logged(tmp_path):
    trainer = make_trainer(tmp_path, "dflash", max_steps=1)
    trainer.train()
    assert logged(trainer, "cross_entropy")
    assert not logged(trainer, "acceptance") and not logged(trainer, "confidence")


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_loss_per_supervised_draft(tmp_path, kind):
    """So it compares with the training loss, which counts only what is supervised."""
    data = make_data(4)
    alone = make_trainer(tmp_path, kind, eval_data=data.select([1]), per_device_eval_batch_size=1)
    expected = alone.evaluate()["eval_loss"]
    assert expected > 0
    trainer = make_trainer(tmp_path, kind, data=data.select([1]), max_steps=1, learning_rate=0.0)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path, kind):
    """Long and short examples count by their supervised tokens, however they are batched."""

    def evaluated(batch_size):
        settings = {"eval_data": make_data(7, seed=1), "eval_prompts": 0, "per_device_eval_batch_size": batch_size}
        return make_trainer(tmp_path, kind, **settings).evaluate()

    whole, split = evaluated(7), evaluated(2)
    terms = [name for name in whole if name.endswith(("loss", "l1", "cross_entropy", "acceptance"))]
    assert terms
    for name in terms:
        assert split[name] == pytest.approx(whole[name], rel=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_supervision_do_not_count_in_an_evaluation(tmp_path, kind):
    rows = make_data(6, unsupervised=(1, 4))
    some = rows.select([0, 2, 3, 5])
    settings = {"eval_data": some, "eval_prompts": 0, "per_device_eval_batch_size": 1}
    trainer = make_trainer(tmp_path, kind, **settings)
    expected = trainer.evaluate()
    stream = make_trainer(tmp_path, kind, **settings | {"eval_data": rows.to_iterable_dataset()})
    found = stream.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    # A prediction is measured the same way.
    found = trainer.predict(trainer.eval_dataset).metrics
    assert found["test_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)


def test_a_chat_is_trained_with_the_tokenizer_alone(tmp_path, tiny_tokenizer):
    target = make_target(vocab_size=len(tiny_tokenizer))
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is four."}]
    trainer = DraftTrainer(
        model=DSparkDrafter.from_target(target, tokenizer=tiny_tokenizer, markov_rank=8),
        target_model=target,
        args=DraftConfig(output_dir=str(tmp_path), max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True),
        train_dataset=Dataset.from_list([{"messages": chat}] * 2),
        processing_class=tiny_tokenizer,
    )
    assert trainer.train().training_loss > 0


# ---------------------------------------------------------------------- splits


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_micro_batches_trains_the_same(tmp_path, kind):
    """Rows of different length and supervision weigh as in one batch."""
    rows = make_data(4).to_list()
    rows[0]["loss_mask"] = [0] * (len(rows[0]["loss_mask"]) - 2) + [1, 1]
    data = Dataset.from_list(rows)
    whole = first_gradients(tmp_path, kind=kind, data=data, per_device_train_batch_size=4)
    split = first_gradients(
        tmp_path, kind=kind, data=data, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert_close_gradients(split, whole, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_supervision_gives_a_finite_zero_that_reaches_every_parameter(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind)
    rows = make_data(2, unsupervised=(0, 1)).to_list()
    batch = trainer.data_collator(rows)
    total = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=total)
    loss.backward()
    assert loss.item() == 0
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.all(parameter.grad == 0), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_supervision_changes_nothing(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind)
    rows = make_data(2, unsupervised=(1,)).to_list()
    found = []
    for batch in (trainer.data_collator(rows), trainer.data_collator(rows[:1])):
        total = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
        found.append(trainer.compute_loss(trainer.model, batch, num_items_in_batch=total).item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] > 0


# ---------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_float32_and_norms_move_whatever_was_loaded(tmp_path, kind):
    target = make_target()
    make_drafter(kind, target).save_pretrained(tmp_path / "drafter")
    drafter = AutoDrafter.from_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16
    # So small a step would vanish in bfloat16 beside a weight of 1.
    trainer = make_trainer(tmp_path, kind, drafter, target, learning_rate=1e-4, max_steps=3)
    before = weights(trainer.model)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    norms = [name for name in before if "norm" in name]
    assert norms
    for name in norms:
        assert not torch.equal(before[name], trainer.model.state_dict()[name]), f"{name} did not move"


def test_autocast_keeps_float32_parameters_and_about_the_same_gradients(tmp_path):
    exact = first_gradients(tmp_path)
    cast = first_gradients(tmp_path, bf16=True, use_cpu=True)
    assert {gradient.dtype for gradient in cast.values()} == {torch.float32}
    assert_close_gradients(cast, exact, 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_is_frozen_and_neither_optimised_nor_saved(tmp_path, kind):
    target = make_target().train()
    before = weights(target)
    trainer = make_trainer(tmp_path, kind, target=target, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal_weights(weights(target), before)
    assert all(parameter.grad is None for parameter in target.parameters())
    assert not target.training
    own = {id(p) for p in trainer.model.parameters()}
    optimised = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in optimised} == own
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == trainer.model.state_dict().keys()
    assert not any("embed_tokens" in name or "lm_head" in name for name in saved)


def test_an_embedding_and_head_of_the_drafters_own_stay_as_they_are(tmp_path):
    target = make_target()
    drafter = make_drafter("dspark", target, own_embedding=True, own_head=True)
    trainer = make_trainer(tmp_path, drafter=drafter, target=target, max_steps=2)
    before = weights(trainer.model)
    assert "embed_tokens.weight" in before and "lm_head.weight" in before
    trainer.train()
    after = weights(trainer.model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "embed_tokens.weight" not in moved and "lm_head.weight" not in moved
    assert moved == before.keys() - {"embed_tokens.weight", "lm_head.weight"}


def test_a_reduced_vocabulary_keeps_its_map(tmp_path):
    target = make_target()
    drafter = make_drafter("dspark", target, draft_vocab_size=24, token_counts=torch.arange(64))
    trainer = make_trainer(tmp_path, drafter=drafter, target=target, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoDrafter.from_pretrained(tmp_path / "saved").attach(target)
    assert loaded.draft_ids.tolist() == list(range(40, 64))
    assert_equal_weights(weights(loaded), weights(trainer.model))


# ---------------------------------------------------------------------- features on disk


def count_target_forwards(target) -> list[int]:
    calls = []
    target.model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_stored_features_train_the_same_up_to_rounding(tmp_path, kind):
    exact = first_gradients(tmp_path, kind=kind)
    stored = first_gradients(tmp_path, kind=kind, feature_store=str(tmp_path / "features"))
    assert_close_gradients(stored, exact, 0.05)
    again = first_gradients(tmp_path, kind=kind, feature_store=str(tmp_path / "features"))
    # Read back or just computed: the same step, or a resumed run would take another path.
    assert_equal_weights(again, stored)


def test_stored_features_spare_the_target_from_the_second_epoch_on(tmp_path):
    target, folder = make_target(), tmp_path / "features"
    trainer = make_trainer(tmp_path, target=target, feature_store=str(folder), max_steps=-1, num_train_epochs=3)
    calls = count_target_forwards(target)
    trainer.train()
    assert len(calls) == 2
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"]
    again = make_trainer(tmp_path, target=target, feature_store=str(folder), max_steps=2)
    calls.clear()
    again.train()
    assert calls == []


def test_held_out_examples_are_stored_too(tmp_path):
    target = make_target()
    store = {"feature_store": str(tmp_path / "features"), "eval_prompts": 0}
    trainer = make_trainer(tmp_path, target=target, data=make_data(4), eval_data=make_data(4, seed=1), **store)
    calls = count_target_forwards(target)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert len(calls) == 2
    plain = make_trainer(
        tmp_path, target=target, data=make_data(4), eval_data=make_data(4, seed=1), eval_prompts=0
    ).evaluate()
    assert first == pytest.approx(plain["eval_loss"], rel=0.01)


def test_a_streamed_dataset_has_no_store(tmp_path):
    with pytest.raises(ValueError, match="train without it on a streamed dataset"):
        make_trainer(tmp_path, data=make_data().to_iterable_dataset(), feature_store=str(tmp_path / "features"))


def test_without_a_store_nothing_but_checkpoints_is_written(tmp_path):
    make_trainer(tmp_path / "out", max_steps=2).train()
    assert not any(path.suffix == ".safetensors" for path in tmp_path.rglob("*"))


def test_a_disk_too_small_for_the_features_is_refused_before_training(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="Train without `feature_store`, or choose another folder"):
        make_trainer(tmp_path, feature_store=str(tmp_path / "features"))


# ---------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    "kind,save_steps,kill_at,args",
    [
        pytest.param("dspark", 2, 3, {}, id="dspark, in an epoch"),
        pytest.param("dspark", 5, 8, {}, id="dspark, in the second epoch"),
        pytest.param("dspark", 4, 4, {}, id="dspark, between epochs"),
        pytest.param("dspark", 3, 4, {"gradient_accumulation_steps": 2}, id="dspark, accumulating"),
        pytest.param("dspark", 3, 4, {"feature_store": True}, id="dspark, with stored features"),
        pytest.param("dspark", 2, 3, {"train_sampling_strategy": "group_by_length"}, id="dspark, by length"),
        pytest.param("dflash", 4, 7, {"train_sampling_strategy": "group_by_length"}, id="by length, second epoch"),
        pytest.param("dflash", 3, 5, {}, id="dflash"),
        pytest.param("eagle3", 3, 5, {}, id="eagle3"),
    ],
)
def test_a_killed_and_resumed_run_ends_in_the_same_weights(tmp_path, kind, save_steps, kill_at, args):
    """Optimizer, schedule, order of the data, anchors and dtype go on where they were."""

    def trainer(folder, **more):
        mine = {
            "data": make_data(15),
            "max_steps": -1,
            "num_train_epochs": 3,
            "save_strategy": "steps",
            "save_steps": save_steps,
        }
        mine |= args | more
        if mine.get("feature_store"):
            mine["feature_store"] = str(folder / "features")
        return make_trainer(folder, kind, **mine)

    whole = trainer(tmp_path / "whole")
    whole.train()
    with pytest.raises(KilledError):
        trainer(tmp_path / "killed", callbacks=[KillAt(kill_at)]).train()
    resumed = trainer(tmp_path / "killed")
    start = weights(resumed.model)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step > kill_at
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    assert_equal_weights(weights(resumed.model), weights(whole.model))
    assert not all(torch.equal(start[name], value) for name, value in weights(whole.model).items())


def test_every_epoch_draws_other_anchors_also_after_a_resume(tmp_path):
    seen = []

    def watch(trainer):
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: (batch := collate(rows), seen.append((collate.epoch, batch)))[0]
        return trainer

    settings = {"data": make_data(4), "max_steps": -1, "num_train_epochs": 3, "num_anchors": 3}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KilledError):
        watch(make_trainer(tmp_path, callbacks=[KillAt(2)], **settings)).train()
    watch(make_trainer(tmp_path, **settings)).train(resume_from_checkpoint=True)
    # The killed run had begun the epoch that the resumed one begins again.
    assert [epoch for epoch, _ in seen] == [0, 1, 2, 2]
    draws = [batch["anchors"][batch["input_ids"][:, 4].argmax()].tolist() for _, batch in seen]
    assert draws[2] == draws[3]
    assert draws[0] != draws[1] != draws[2] != draws[0]


def test_examples_of_similar_length_come_in_another_order_every_epoch():
    sampler = GroupedByLength(list(range(40)), 4, seed=0)
    first = list(sampler)
    assert sorted(first) == list(range(40)) and first == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_weights_alone_are_no_checkpoint_to_resume_from(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    make_trainer(tmp_path, max_steps=2, **settings).train()
    with pytest.raises(ValueError, match=r"checkpoint-2 holds no optimizer state.*start a new run"):
        make_trainer(tmp_path, **settings).train(resume_from_checkpoint=True)


SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    "other,told",
    [
        ({"data": make_data(12)}, "examples: 8 there, 12 now"),
        ({"data": make_data(8, seed=1)}, "the data's tokens, or their order"),
        ({"data": make_data(8).select(range(7, -1, -1))}, "the data's tokens, or their order"),
        ({"max_length": 16}, "tokens: .* max_length: 2048 there, 16 now"),
        ({"target_seed": 9}, "the target's weights"),
        ({"block_size": 4}, "block_size: 3 there, 4 now"),
        ({"kind": "dflash"}, "model_type: dspark there, dflash now"),
    ],
    ids=str,
)
def test_a_run_does_not_go_on_from_another_run_s_checkpoint(tmp_path, other, told):
    make_trainer(tmp_path, max_steps=2, **SAVING).train()
    settings = dict(other)
    target = make_target(seed=settings.pop("target_seed", 0))
    sizes = {name: settings.pop(name) for name in ("block_size",) if name in settings}
    drafter = make_drafter(settings.pop("kind", "dspark"), target, **sizes)
    trainer = make_trainer(tmp_path, drafter=drafter, target=target, **settings, **SAVING)
    with pytest.raises(ValueError, match=rf"checkpoint-2 is of another run \(.*{told}"):
        trainer.train(resume_from_checkpoint=True)


def test_other_arguments_at_resume_are_told(tmp_path, caplog):
    make_trainer(tmp_path, max_steps=2, **SAVING).train()
    longer = make_trainer(tmp_path, max_steps=4, weight_decay=0.1, **SAVING)
    with caplog.at_level("WARNING"):
        longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step == 4
    assert "max_steps: 2 there, 4 now; weight_decay: 0.0 there, 0.1 now" in caplog.text


def test_a_new_run_writes_over_no_checkpoint(tmp_path):
    make_trainer(tmp_path, max_steps=2, **SAVING).train()
    before = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint-2 is of an earlier run.*another `output_dir`"):
        make_trainer(tmp_path, max_steps=2, seed=5, **SAVING).train()
    assert_equal_weights(before, load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    make_trainer(tmp_path, max_steps=2).train()  # saves nothing
    # Nor does one that goes on from elsewhere.
    make_trainer(tmp_path / "elsewhere", max_steps=2, **SAVING).train()
    with pytest.raises(ValueError, match=r"checkpoint-2 is of an earlier run"):
        make_trainer(tmp_path, max_steps=4, **SAVING).train(tmp_path / "elsewhere" / "checkpoint-2")


def test_a_stream_is_passed_again_when_it_ends(tmp_path):
    trainer = make_trainer(tmp_path, data=make_data(8).to_iterable_dataset(), max_steps=5)
    trainer.train()
    assert trainer.state.global_step == 5


def test_a_checkpoint_is_a_complete_drafter(tmp_path):
    target = make_target()
    trainer = make_trainer(tmp_path, target=target, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    loaded = DSparkDrafter.from_pretrained(tmp_path / "checkpoint-2").attach(target)
    assert_equal_weights(weights(loaded), weights(trainer.model))
    prompt = torch.tensor([[5, 6, 7]])
    drafted = target.generate(prompt, assistant_model=loaded, max_new_tokens=12, do_sample=False)
    assert torch.equal(drafted, target.generate(prompt, max_new_tokens=12, do_sample=False))


# ---------------------------------------------------------------------- refusals


def test_only_drafters_are_trained(tmp_path):
    target = make_target()
    with pytest.raises(TypeError, match=r"must be the drafter to train, not a LlamaForCausalLM.*`target_model`"):
        make_trainer(tmp_path, drafter=target, target=target)


def test_a_drafter_is_no_target(tmp_path):
    target = make_target()
    with pytest.raises(TypeError, match="The target is itself a drafter"):
        make_trainer(tmp_path, target=make_drafter("dspark", target), drafter=make_drafter("dspark", target))


@pytest.mark.parametrize(
    "overrides,what",
    [
        ({"hidden_size": 48}, "hidden size 32, this one has 48"),
        ({"vocab_size": 80}, "vocabulary size 64, this one has 80"),
        ({"num_hidden_layers": 5}, "number of layers 4, this one has 5"),
    ],
)
def test_a_target_of_another_shape_is_refused(tmp_path, overrides, what):
    drafter = make_drafter("dspark", make_target())
    with pytest.raises(ValueError, match=f"don't belong together.*{what}"):
        make_trainer(tmp_path, drafter=drafter, target=make_target(**overrides))


def test_data_without_supervision_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is nothing to learn"):
        make_trainer(tmp_path, data=make_data(2, unsupervised=(0, 1)))


@pytest.mark.parametrize(
    "kind,settings,message",
    [
        ("dspark", {"label_smoothing_factor": 0.1}, "`label_smoothing_factor` has no place"),
        ("dspark", {"train_heads": True}, "`train_heads` is for new adapters"),
        ("eagle3", {"l1_weight": 0.9}, "EAGLE-3 has one loss.*leave out `l1_weight`"),
        ("dflash", {"confidence_weight": 1.0}, "no confidence head to train"),
        ("dspark", {"l1_weight": -1.0}, "no weight of a loss may be negative"),
        ("dspark", {"loss_decay": 0.0}, "`loss_decay` must be above 0"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, kind, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, kind, **settings)


@pytest.mark.parametrize("name", ["compute_loss_func", "compute_metrics"])
def test_losses_and_metrics_of_others_are_refused(tmp_path, name):
    target = make_target()
    with pytest.raises(ValueError, match=f"losses and metrics of their own: leave out `{name}`"):
        DraftTrainer(
            model=make_drafter("dspark", target),
            target_model=target,
            args=DraftConfig(output_dir=str(tmp_path), report_to=[]),
            train_dataset=make_data(),
            **{name: lambda *_: {}},
        )


def test_transformers_own_arguments_are_refused(tmp_path):
    target = make_target()
    with pytest.raises(TypeError, match=r"`args` must be a DraftConfig .* not TrainingArguments"):
        DraftTrainer(
            model=make_drafter("dspark", target),
            target_model=target,
            args=TrainingArguments(output_dir=str(tmp_path)),
            train_dataset=make_data(),
        )


@pytest.mark.parametrize("several", [False, True])
def test_the_best_checkpoint_needs_prompts_to_decode(tmp_path, several):
    rows = [{"input_ids": list(range(2, 12)), "loss_mask": [1] * 10}] * 2
    held_out = {"text": Dataset.from_list(rows)} if several else Dataset.from_list(rows)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(ValueError, match=r"found by decoding held-out prompts, and `eval_dataset.*has none"):
        make_trainer(tmp_path, eval_data=held_out, load_best_model_at_end=True, **settings)
    best_by_loss = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    make_trainer(tmp_path, eval_data=held_out, **settings, **best_by_loss)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_target_that_scales_its_logits_is_refused(tmp_path, kind):
    """Its head on its last hidden states is not its distribution, which these losses compare with."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    target = GraniteForCausalLM(GraniteConfig(vocab_size=64, logits_scaling=4.0, **sizes))
    with pytest.raises(ValueError, match="GraniteForCausalLM's logits are not its LM head applied"):
        make_trainer(tmp_path, kind, target=target)
    if kind == "dspark":
        weights = {"cross_entropy_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0}
        make_trainer(tmp_path, kind, target=target, max_steps=1, **weights).train()


def test_tokens_of_another_model_are_refused(tmp_path):
    data = [*make_data(2), {"input_ids": [3, 4, 64, 5], "loss_mask": [0, 1, 1, 1]}]
    with pytest.raises(ValueError, match="Example 2 holds token 64, and the target's vocabulary has 64"):
        make_trainer(tmp_path, data=data)
    with pytest.raises(ValueError, match="Example 2 holds token 64"):
        make_trainer(tmp_path, eval_data=data)


def test_examples_longer_than_the_target_s_positions_are_told(tmp_path, caplog):
    told = "The longest example has 23 tokens, and the target was made for 20: `max_length=20` cuts it."
    with caplog.at_level("WARNING"):
        make_trainer(tmp_path, target=make_target(max_position_embeddings=20))
    assert told in caplog.text
    caplog.clear()
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 20}
    make_trainer(tmp_path, target=make_target(max_position_embeddings=20, rope_parameters=scaled))
    assert told not in caplog.text
    learned = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=20, vocab_size=64))
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path, target=learned)
    make_trainer(tmp_path, target=learned, max_length=20)
