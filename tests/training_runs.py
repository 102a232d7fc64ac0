"""Small training runs that several tests share."""

import torch
from conftest import make_target
from datasets import Dataset
from transformers import TrainerCallback

from hf_dspark import DFlashDrafter, DraftConfig, DraftTrainer, DSparkDrafter, Eagle3Drafter


KINDS = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}


def make_drafter(kind: str, target, **overrides):
    torch.manual_seed(7)
    fields = {"num_drafts": 3} if kind == "eagle3" else {"block_size": 3, "mask_token_id": 1, "num_hidden_layers": 1}
    fields |= {"markov_rank": 8} if kind == "dspark" else {}
    return KINDS[kind].from_target(target, **(fields | overrides))


def make_data(count: int = 8, seed: int = 0, unsupervised: tuple[int, ...] = ()) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = 14 + 3 * (i % 4)
        ids = torch.randint(2, 64, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * 4 + [int(i not in unsupervised)] * (length - 4)})
    return Dataset.from_list(rows)


def make_trainer(
    folder,
    kind: str = "dspark",
    drafter=None,
    target=None,
    data=None,
    callbacks=None,
    eval_data=None,
    peft_config=None,
    **args,
):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_anchors": 6,
        "logits_chunk_size": 16,
        "learning_rate": 5e-3,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    target = make_target() if target is None else target
    return DraftTrainer(
        model=make_drafter(kind, target) if drafter is None else drafter,
        target_model=target,
        args=DraftConfig(**(settings | args)),
        train_dataset=make_data() if data is None else data,
        eval_dataset=eval_data,
        callbacks=callbacks,
        peft_config=peft_config,
    )


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(drafter) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in drafter.state_dict().items()}


def assert_equal_weights(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


class Gradients(TrainerCallback):
    """Keeps the gradients of every update, before they are clipped or used."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def first_gradients(folder, **kwargs) -> dict[str, torch.Tensor]:
    gradients = Gradients()
    make_trainer(folder, callbacks=[gradients], max_steps=1, max_grad_norm=0.0, **kwargs).train()
    return gradients.steps[0]


def assert_close_gradients(ours: dict, theirs: dict, share: float) -> None:
    """Equal up to a share of each parameter's gradient norm."""
    assert ours.keys() == theirs.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in theirs.values())
    for name, gradient in theirs.items():
        difference = (ours[name] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert difference <= share, f"{name} differs by {difference:.1e} of its gradient's norm"


class KilledError(Exception):
    pass


class KillAt(TrainerCallback):
    """Ends the run without warning, as a lost machine does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            raise KilledError
