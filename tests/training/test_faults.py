"""What goes wrong in a run: NaN, a full disk, a kill at any moment. The last good checkpoint stays and is named."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from conftest import make_target
from training_runs import assert_equal_weights, make_data, make_drafter, make_trainer, weights
from transformers import TrainerCallback, TrainerState

from hf_dspark import AutoDrafter
from hf_dspark.training.checkpoints import last_complete_checkpoint


class Spoil(TrainerCallback):
    """Does something at the beginning of a step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, model=None, **kwargs) -> None:
        if state.global_step == self.step:
            self.action(model)


def saving(**more):
    return {"save_strategy": "steps", "save_steps": 2} | more


@pytest.mark.parametrize("kind,term", [("dspark", "`l1`"), ("dflash", "`cross_entropy`"), ("eagle3", "`soft_cross")])
def test_nan_in_the_loss_names_the_term(tmp_path, kind, term):
    def spoil(model):
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))

    trainer = make_trainer(tmp_path, kind, callbacks=[Spoil(3, spoil)], **saving())
    with pytest.raises(FloatingPointError, match=rf"Step 4 met NaN or infinity in the loss term.*{term}") as error:
        trainer.train()
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-2'}" in str(error.value)
    assert all(
        torch.isfinite(v).all() for v in weights(AutoDrafter.from_pretrained(tmp_path / "checkpoint-2")).values()
    )


def test_nan_from_the_target_names_it(tmp_path):
    target = make_target()

    def spoil(model):
        with torch.no_grad():
            target.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))

    trainer = make_trainer(tmp_path, target=target, callbacks=[Spoil(1, spoil)])
    with pytest.raises(FloatingPointError, match="Step 2 met NaN or infinity in the target's features"):
        trainer.train()


def test_nan_in_a_gradient_names_the_parameter_and_changes_no_weight(tmp_path):
    trainer = make_trainer(tmp_path, **saving())
    drafter = trainer.model
    seen = {}

    def spoil(model):
        seen.update(weights(model))
        model.fc.weight.register_hook(lambda gradient: gradient * float("nan"))

    trainer.add_callback(Spoil(2, spoil))
    with pytest.raises(
        FloatingPointError, match=r"Step 3 met NaN or infinity in the gradient of `fc\.weight`\. No weight"
    ):
        trainer.train()
    assert_equal_weights(weights(drafter), seen)


# ---------------------------------------------------------------------- saving


@pytest.mark.parametrize(
    "what",
    [pytest.param("weights", marks=pytest.mark.slow), "optimizer", pytest.param("state", marks=pytest.mark.slow)],
)
def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path, monkeypatch, what):
    trainer = make_trainer(tmp_path, **saving())
    no_space = OSError(errno.ENOSPC, "No space left on device")

    def fail(original):
        def write(*args, **kwargs):
            if trainer.state.global_step == 4:
                original(*args, **kwargs)  # some of it gets there
                raise no_space
            return original(*args, **kwargs)

        return write

    if what == "weights":
        monkeypatch.setattr(trainer, "save_model", fail(trainer.save_model))
    elif what == "optimizer":
        monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", fail(trainer._save_optimizer_and_scheduler))
    else:
        original = TrainerState.save_to_json

        def half(state, path):
            if state.global_step != 4:
                return original(state, path)
            with open(path, "w") as file:
                file.write('{"epoch":')
            raise no_space

        monkeypatch.setattr(TrainerState, "save_to_json", half)
    with pytest.raises(
        OSError, match=r"Checkpoint 4 could not be written.*No space left.*Make room and resume"
    ) as error:
        trainer.train()
    assert f"The last good checkpoint is {tmp_path / 'checkpoint-2'}" in str(error.value)
    assert [f.name for f in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    monkeypatch.undo()
    resumed = make_trainer(tmp_path, **saving())
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "whole", **saving())
    whole.train()
    assert_equal_weights(weights(resumed.model), weights(whole.model))


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path):
    make_trainer(tmp_path, max_steps=4, **saving()).train()
    half = tmp_path / "checkpoint-6"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"cut off")
    (half / "trainer_state.json").write_text('{"global_step": ')
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    resumed = make_trainer(tmp_path, max_steps=6, **saving())
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert json.loads((half / "trainer_state.json").read_text())["global_step"] == 6


def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint to resume from; start afresh"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


def _train_in_a_child(folder) -> None:
    trainer = make_trainer(folder, data=make_data(15), max_steps=30, save_total_limit=2, **saving())
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) is not None)
    trainer.save_model(str(folder / "final"))
    os._exit(0)


@pytest.mark.slow
def test_runs_killed_at_random_points_end_in_the_same_weights(tmp_path):
    """20 kills without warning; each run is resumed until it is through."""
    start = multiprocessing.get_context("fork").Process
    whole = start(target=_train_in_a_child, args=(tmp_path / "whole",))
    began = time.monotonic()
    whole.start()
    whole.join()
    took = time.monotonic() - began
    expected = weights(AutoDrafter.from_pretrained(tmp_path / "whole" / "final"))
    chance, kills, run = random.Random(0), 0, 0
    while kills < 20:
        run += 1
        folder, finished = tmp_path / f"run{run}", False
        while not finished:
            child = start(target=_train_in_a_child, args=(folder,))
            child.start()
            child.join(chance.uniform(0.2, 1.0) * took if kills < 20 else None)
            if child.is_alive():
                os.kill(child.pid, signal.SIGKILL)
                kills += 1
            child.join()
            finished = child.exitcode == 0
        assert_equal_weights(weights(AutoDrafter.from_pretrained(folder / "final")), expected)
    assert kills == 20


# ---------------------------------------------------------------------- warm starts


def test_a_warm_start_from_another_projects_checkpoint_keeps_its_vocabulary_and_flags(tmp_path):
    target = make_target("qwen3")
    drafter = make_drafter("eagle3", target, draft_vocab_size=24, token_counts=torch.arange(64))
    drafter.export(tmp_path / "theirs", format="speculators")
    loaded = AutoDrafter.from_pretrained(tmp_path / "theirs")
    before = loaded.config.to_dict()
    trainer = make_trainer(tmp_path / "run", drafter=loaded, target=target, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoDrafter.from_pretrained(tmp_path / "saved")
    assert again.attach(target).draft_ids.tolist() == list(range(40, 64))
    changed = {k for k, v in again.config.to_dict().items() if before.get(k) != v}
    assert changed <= {
        "max_trained_length",
        "dtype",
        "own_embedding",
        "own_head",
        "num_target_layers",
        "architectures",
        "_name_or_path",
    }
