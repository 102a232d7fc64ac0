"""Checkpoints of a run are whole: one that could not be written to its end leaves nothing to resume from."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging


logger = logging.get_logger(__name__)

# The trainer writes it after everything else.
LAST_FILE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def _checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders of a run's checkpoints, oldest first, complete or not."""
    found = [f for f in Path(output_dir).glob("checkpoint-*") if f.is_dir() and _NAME.fullmatch(f.name)]
    return sorted(found, key=lambda folder: int(_NAME.fullmatch(folder.name)[1]))


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / LAST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def last_complete_checkpoint(output_dir: str | Path, clean: bool = False) -> str | None:
    """
    The newest checkpoint that was written to its end.

    Args:
        output_dir (`str` or `Path`): The run's folder.
        clean (`bool`, *optional*, defaults to `False`): Whether to delete those that a killed run left unfinished.
    """
    folders = _checkpoints(output_dir)
    for folder in folders:
        if clean and not _is_complete(folder):
            logger.warning("%s was not written to its end; it is deleted.", folder)
            shutil.rmtree(folder)
    complete = [folder for folder in folders if _is_complete(folder)]
    return str(complete[-1]) if complete else None


@contextmanager
def saving_whole(output_dir: str | Path, step: int) -> Iterator[None]:
    """
    Deletes a checkpoint whose writing fails, and says what is left.

    Raises:
        OSError: Naming the last good checkpoint.
    """
    try:
        yield
    except Exception as error:
        folder = Path(output_dir) / f"checkpoint-{step}"
        if _is_complete(folder):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if not is_write_error(error):
            raise
        raise OSError(
            f"Checkpoint {step} could not be written to {output_dir} and was deleted: {error}. "
            f"{kept(output_dir)} Make room and resume with `trainer.train(resume_from_checkpoint=True)`."
        ) from error


def is_write_error(error: Exception) -> bool:
    """Whether a disk refused; safetensors and torch have errors of their own for it."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError" or "file write" in str(error)


def kept(output_dir: str | Path) -> str:
    """A sentence on the last good checkpoint."""
    last = last_complete_checkpoint(output_dir)
    return f"The last good checkpoint is {last}." if last else "No earlier checkpoint exists."
