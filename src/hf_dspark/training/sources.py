"""Where examples come from: a file, a folder, or the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset


_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_examples(source: str | Path, split: str = "train", name: str | None = None) -> Dataset:
    """
    Loads one split of a dataset, whatever form it has.

    Args:
        source (`str` or `Path`): A file (jsonl, json, parquet, csv, txt: one example a line), a folder (as
            `save_to_disk` or `regenerate` wrote it, or of such files), or a Hub id.
        split (`str`, *optional*, defaults to `"train"`): The split; of `save_to_disk` folders with one split that one.
        name (`str`, *optional*): The configuration, of datasets that have several.

    Returns:
        `datasets.Dataset`

    Raises:
        FileNotFoundError: If nothing is there.
        ValueError: If it holds no such split or is no dataset.

    Example:

    ```python
    >>> from hf_dspark.training.sources import load_examples

    >>> answers = load_examples("answers")  # doctest: +SKIP
    ```
    """
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in _FORMATS:
            raise ValueError(f"{source}: can't read a {path.suffix or 'nameless'} file, only {', '.join(_FORMATS)}.")
        return load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        found = load_from_disk(str(path))
        if isinstance(found, Dataset):
            return found
    elif path.is_dir() or _may_be_hub_id(source):
        found = load_dataset(str(path) if path.is_dir() else str(source), name)
    else:
        raise FileNotFoundError(f"There is no file or folder {source}, and no dataset on the Hub has such a name.")
    if not isinstance(found, DatasetDict) or split not in found:
        raise ValueError(f"{source} has no split {split!r}, only {', '.join(map(repr, found))}.")
    return found[split]


def _may_be_hub_id(source: str | Path) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(str(source))
    except HFValidationError:
        return False
    return Path(str(source)).suffix not in _FORMATS
