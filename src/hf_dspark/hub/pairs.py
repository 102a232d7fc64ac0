"""Targets and drafters by name, as commands and settings name them: a folder, a Hub id, or `embedded`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..origins import EMBEDDED, is_repo_id
from .embedded import TARGET_ID, embedded_drafter, embedded_target
from .names import hub_id


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def target_folder(name: str | None) -> str:
    """
    Where a target is, as `from_pretrained` takes it; without a name, the embedded one.

    Raises:
        OSError: If there is no folder or model of this name.
    """
    from ..checkpoints.files import require_there

    if name is None or name == EMBEDDED:
        return str(embedded_target())
    require_there(name, {})
    return name


def drafter_folder(name: str | None) -> str:
    """As `target_folder`, of a drafter."""
    from ..checkpoints.files import require_there

    if name is None or name == EMBEDDED:
        return str(embedded_drafter())
    require_there(name, {})
    return name


def target_of(drafter: str) -> str:
    """
    Where the target is that a drafter names, if this machine has it.

    Raises:
        OSError: If there is no such drafter.
        ValueError: If it names none, or one that is not here.
    """
    from huggingface_hub import try_to_load_from_cache

    from ..auto import DRAFTERS
    from ..checkpoints import drafter_type, read_checkpoint
    from ..checkpoints.files import require_there
    from ..models.adapters import adapter_base

    if drafter == EMBEDDED:
        return str(embedded_target())
    require_there(drafter, {})
    base = adapter_base(drafter, {}) or drafter
    named = read_checkpoint(base, DRAFTERS[drafter_type(base)], {"dtype": "float32"}).config.target_name_or_path
    if not named:
        raise ValueError(f"{drafter} does not say which target it is for: name it with --target.")
    if named == EMBEDDED or hub_id(named) == TARGET_ID:
        return str(embedded_target())
    if Path(named).is_dir() or (is_repo_id(named) and isinstance(try_to_load_from_cache(named, "config.json"), str)):
        return named
    raise ValueError(f"{drafter} is for {named}, which is not on this machine: name a target with --target.")


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    A target's tokenizer.

    Raises:
        OSError: If there is no folder or model of this name.
        ValueError: If the folder holds no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ValueError(
            f"{name} has no tokenizer. Save the one that its model was trained with there: "
            f'AutoTokenizer.from_pretrained("THE_MODEL_IT_CAME_FROM").save_pretrained("{name}").'
        )
    return AutoTokenizer.from_pretrained(name)
