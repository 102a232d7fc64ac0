"""A run goes on from its own checkpoints alone, and writes over no other run's."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..models.configuration_checks import own_fields
from ..models.drafter import Drafter
from ..models.loading import load_training_record
from .checkpoints import last_complete_checkpoint
from .journal import differences


logger = logging.get_logger(__name__)

# Fields of a drafter that say where it comes from, not what it is; the shapes of `text_config` tell themselves.
_ABOUT = {"text_config", "target_name_or_path", "source_format", "assumed", "max_trained_length", "format_version"}
_COUNTS = ("examples", "tokens", "supervised_tokens")


def require_optimizer(checkpoint: str | Path) -> None:
    """
    Raises:
        ValueError: If a checkpoint holds weights alone, so that a run could not go on as it was.
    """
    folder = Path(checkpoint)
    if folder.is_dir() and not any(folder.glob("optimizer*")) and not any(folder.glob("global_step*")):
        raise ValueError(
            f"{folder} holds no optimizer state (`save_only_model`), so training can't go on where it stopped. Load "
            "the drafter from it with `AutoDrafter.from_pretrained` and start a new run."
        )


def run_identity(drafter: Drafter, dataset: Any, weights: dict[str, str | None]) -> dict[str, Any]:
    """
    What makes a run the same run, as a JSON value that checkpoints keep.

    Args:
        drafter ([`Drafter`]): What is trained.
        dataset (`datasets.Dataset`): The data as it is trained on; streams are not told apart.
        weights (`dict[str, str | None]`): Fingerprints of the `target`, and of the `base` that new adapters sit on.
    """
    config = drafter.config
    fields = {field.name: getattr(config, field.name) for field in own_fields(config) if field.name not in _ABOUT}
    return {
        "drafter": {"model_type": config.model_type, **fields},
        **weights,
        "data": _digest(dataset) if hasattr(dataset, "__len__") else None,
    }


def _digest(dataset: Any) -> str:
    """A name of the tokens of a dataset and of their order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = hashlib.sha256()
    for batch in dataset.with_format("arrow").iter(1000):
        for column in (batch["input_ids"], batch["loss_mask"]):
            for part in (pc.list_value_length(column), pc.list_flatten(column)):
                found.update(part.cast(pa.int64()).to_numpy().tobytes())
    return found.hexdigest()[:16]


def require_same_run(checkpoint: str | Path, record: dict[str, Any]) -> None:
    """
    Compares what a checkpoint says of its run with the run that is to go on from it. Other arguments are told and
    allowed (a longer run, another batch size); other data, drafters and targets are not.

    Args:
        checkpoint (`str` or `Path`): The checkpoint's folder.
        record (`dict`): The training record of the run as it is about to begin.

    Raises:
        ValueError: If the checkpoint is of another run.
    """
    before = load_training_record(str(checkpoint))
    if before is None or "run" not in before:
        return
    record = json.loads(json.dumps(record))
    foreign = _foreign(before, record)
    changed = differences(before.get("arguments", {}), record["arguments"])
    if foreign:
        raise ValueError(
            f"{checkpoint} is of another run ({'; '.join(foreign + changed)}). Give the same drafter, target and data "
            "to go on with it (on the command line `--held_out`, `--seed` and `--eval_strategy` choose of the data "
            "too); or load the drafter from it with `AutoDrafter.from_pretrained` and start a new run in another "
            "`output_dir`."
        )
    if changed:
        logger.warning("The run goes on with other arguments than %s has: %s.", checkpoint, "; ".join(changed))


def _foreign(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between the records of two runs and can't differ between parts of one."""
    counts = [{name: run["data"].get(name) for name in _COUNTS} for run in (before, now)]
    # The base's name may change with its place; its weights are compared.
    adapters = [{**(run["adapters"] or {}), "base": None} for run in (before, now)]
    foreign = differences(*counts) + differences(*adapters, "adapters")
    foreign += differences(before["run"]["drafter"], now["run"]["drafter"])
    same = {name: before["run"][name] == now["run"][name] for name in ("base", "target", "data")}
    if not same["data"] and not differences(*counts):
        foreign.append("the data's tokens, or their order")
    if not same["target"]:
        foreign.append("the target's weights")
    if not same["base"] and not differences(*adapters):
        foreign.append("the weights of the drafter that the adapters sit on")
    return foreign


def refuse_overwriting(output_dir: str | Path) -> None:
    """
    Raises:
        ValueError: If the folder of a new run holds checkpoints, which it would mix with its own and delete.
    """
    last = last_complete_checkpoint(output_dir)
    if last is not None:
        raise ValueError(
            f"{last} is of an earlier run, and this one would write over it. Go on with that run "
            "(`trainer.train(resume_from_checkpoint=True)`, or `--resume` on the command line), or give another "
            "`output_dir`."
        )
