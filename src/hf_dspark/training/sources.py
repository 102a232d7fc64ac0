"""Where examples come from: a file, a folder, or the Hub."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import json_lines
from ..origins import is_repo_id


if TYPE_CHECKING:
    from collections.abc import Iterator

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
        ValueError: If it holds no such split or is no dataset; naming file and line of what is no JSON.

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
        with _told_in_a_line(path):
            return load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        found = load_from_disk(str(path))
        if isinstance(found, Dataset):
            return found
    elif path.is_dir() or _may_be_hub_id(source):
        with _told_in_a_line(path):
            found = load_dataset(str(path) if path.is_dir() else str(source), name)
    else:
        raise FileNotFoundError(f"There is no file or folder {source}, and it is no dataset's name on the Hub.")
    if not isinstance(found, DatasetDict) or split not in found:
        raise ValueError(f"{source} has no split {split!r}, only {', '.join(map(repr, found))}.")
    return found[split]


@contextmanager
def _told_in_a_line(path: Path) -> Iterator[None]:
    """Says which line can't be read, where `datasets` shows several tracebacks."""
    from datasets.exceptions import DatasetGenerationError
    from datasets.utils import logging

    files = [file for file in ([path] if path.is_file() else sorted(path.glob("*.jsonl"))) if file.suffix == ".jsonl"]
    # Before `datasets` sees them: it takes bytes that are no UTF-8, and names no line.
    for file in files:
        deque(json_lines(file), maxlen=0)
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises
    try:
        yield
    except DatasetGenerationError as error:
        reason = next(iter(str(error.__cause__ or error).splitlines()), "")
        raise ValueError(f"{path} can't be read as a dataset: {reason}") from error
    finally:
        logging.set_verbosity(level)


def _may_be_hub_id(source: str | Path) -> bool:
    return is_repo_id(str(source)) and Path(str(source)).suffix not in _FORMATS
