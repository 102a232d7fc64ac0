"""Two processes on the CPU, through accelerate: they train, evaluate and resume as one does."""

import json

import pytest
import torch
from accelerate import debug_launcher
from accelerate.state import AcceleratorState
from conftest import make_target
from torch.distributed.tensor import DTensor
from training_runs import (
    KINDS,
    Gradients,
    assert_close_gradients,
    first_gradients,
    make_data,
    make_trainer,
    weights,
)

from hf_dspark import AutoDrafter


CPU = {"use_cpu": True, "ddp_backend": "gloo"}


@pytest.fixture(autouse=True)
def fresh_state():
    """Children inherit what this process has set up, and must set up their own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def uneven_data():
    """Rows of different length, of which one has hardly anything to learn."""
    rows = make_data(4).to_list()
    rows[0]["loss_mask"] = [0] * (len(rows[0]["loss_mask"]) - 2) + [1, 1]
    return rows


def gradients_of_a_process(folder, kind) -> None:
    gradients = Gradients()
    trainer = make_trainer(
        folder,
        kind,
        data=uneven_data(),
        callbacks=[gradients],
        max_steps=1,
        max_grad_norm=0.0,
        per_device_train_batch_size=2,
        **CPU,
    )
    trainer.train()
    assert trainer.args.world_size == 2
    # The gradients are read from under the wrapper of the processes.
    found = {name.removeprefix("module."): value for name, value in gradients.steps[0].items()}
    torch.save(found, folder / f"{trainer.args.process_index}.pt")
    if trainer.args.process_index == 0:
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_gradients_of_one(tmp_path, kind):
    """The same examples and anchors, the loss divided by the weights of both."""
    debug_launcher(gradients_of_a_process, args=(tmp_path, kind), num_processes=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    whole = first_gradients(tmp_path, kind=kind, data=uneven_data(), per_device_train_batch_size=4)
    for process in range(2):
        assert_close_gradients(torch.load(tmp_path / f"{process}.pt"), whole, 1e-4)


def evaluate_in_a_process(folder, shard) -> None:
    target = make_target()
    trainer = make_trainer(
        folder,
        target=target,
        eval_data=make_data(4, seed=5),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_max_new_tokens=8,
        shard_target=shard,
        save_strategy="steps",
        save_steps=2,
        **CPU,
    )
    assert isinstance(target.model.layers[0].mlp.up_proj.weight, DTensor) == shard
    trainer.train()
    if trainer.args.process_index == 0:
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True], ids=["whole target", "sharded target"])
def test_two_processes_evaluate_and_save_as_one_does(tmp_path, shard):
    debug_launcher(evaluate_in_a_process, args=(tmp_path / "two", shard), num_processes=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    one = make_trainer(
        tmp_path / "one",
        eval_data=make_data(4, seed=5),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_max_new_tokens=8,
        use_cpu=True,
    )
    one.train()
    log = json.loads((tmp_path / "two" / "log.json").read_text())
    found = {k: v for entry in log for k, v in entry.items() if k.startswith("eval_")}
    expected = {k: v for entry in one.state.log_history for k, v in entry.items() if k.startswith("eval_")}
    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    assert found.keys() == expected.keys()
    for name in ("eval_accepted_length", "eval_tokens_per_forward", "eval_marginal_acceptance_1"):
        assert name not in timed and found[name] == pytest.approx(expected[name], rel=1e-3)
    trained = weights(AutoDrafter.from_pretrained(tmp_path / "two" / "checkpoint-2"))
    torch.testing.assert_close(trained, weights(one.model), rtol=1e-3, atol=1e-4)


def test_sharding_over_one_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match="over several processes: start with `accelerate launch`"):
        make_trainer(tmp_path, shard_target=True, use_cpu=True)
