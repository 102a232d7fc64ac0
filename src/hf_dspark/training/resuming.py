"""A run goes on from its own checkpoints alone, and writes over no other run's."""

import json
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..models.loading import load_training_record
from .checkpoints import last_complete_checkpoint
from .config import DraftConfig


logger = logging.get_logger(__name__)


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


def require_same_run(checkpoint: str | Path, record: dict[str, Any]) -> None:
    """
    Compares what a checkpoint says of its run with the run that is to go on from it. Other arguments are told and
    allowed (a longer run, another batch size); other data or adapters are not.

    Args:
        checkpoint (`str` or `Path`): The checkpoint's folder.
        record (`dict`): The training record of the run as it is about to begin.

    Raises:
        ValueError: If the checkpoint was trained on other data, or with other adapters.
    """
    before = load_training_record(str(checkpoint))
    if before is None:
        return
    record = json.loads(json.dumps(record))
    counts = ("examples", "tokens", "supervised_tokens")
    data = [{name: run["data"].get(name) for name in counts} for run in (before, record)]
    foreign = differences(*data) + differences(before.get("adapters"), record["adapters"], "adapters")
    if foreign:
        raise ValueError(
            f"{checkpoint} is of another run ({'; '.join(foreign)}). Give the same data and adapters to go on with "
            "it; or load the drafter from it with `AutoDrafter.from_pretrained` and start a new run in another "
            "`output_dir`."
        )
    changed = differences(before["arguments"], record["arguments"])
    if changed:
        logger.warning("The run goes on with other arguments than %s has: %s.", checkpoint, "; ".join(changed))


def refuse_overwriting(args: DraftConfig) -> None:
    """
    Raises:
        ValueError: If the folder of a new run holds checkpoints, which it would mix with its own and delete.
    """
    last = last_complete_checkpoint(args.output_dir)
    if last is not None and args.save_strategy != "no":
        raise ValueError(
            f"{last} is of an earlier run, and a new one would write over it. Go on with that run "
            "(`trainer.train(resume_from_checkpoint=True)`, or `--resume` on the command line), or give another "
            "`output_dir`."
        )


def differences(before: Any, now: Any, name: str = "", leave_out: tuple[str, ...] = ()) -> list[str]:
    """What differs between two JSON values, each as `name: old there, new now`."""
    if before == now:
        return []
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{name}: {before} there, {now} now"]
    names = [key for key in sorted({*before, *now}) if key not in leave_out]
    return [told for key in names for told in differences(before.get(key), now.get(key), f"{name} {key}".strip())]
