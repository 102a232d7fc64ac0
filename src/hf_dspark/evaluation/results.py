"""`results.json`: what an evaluation leaves for reports, comparisons and model cards. See `docs/evaluate.md`."""

import json
import math
import os
from pathlib import Path
from typing import Any

from ..files import write_whole


SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
# In the order they are written. A reader may rely on all of them.
FIELDS = (
    "schema_version",
    "complete",
    "created",
    "target",
    "settings",
    "versions",
    "hardware",
    "tasks",
    "contenders",
    "results",
    "calibration",
    "cost_model",
)


def write_results(folder: str | os.PathLike, results: dict[str, Any]) -> Path:
    """
    Writes `results.json` aside, then puts it in place, so that a reader never meets half a file.

    Args:
        folder (`str` or `os.PathLike`): Where to; made if it is not there.
        results (`dict`): The fields of [`FIELDS`], `schema_version` left out. Numbers that are not finite become
            `null`.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: If a field is missing or unknown.

    Example:

    ```python
    >>> from hf_dspark.evaluation.results import read_results, write_results

    >>> write_results("runs/mine", results)  # doctest: +SKIP
    >>> read_results("runs/mine")["contenders"]  # doctest: +SKIP
    ```
    """
    results = {"schema_version": SCHEMA_VERSION, **results}
    if wrong := set(FIELDS) ^ set(results):
        raise ValueError(f"Results hold exactly the fields {', '.join(FIELDS)}; missing or unknown: {sorted(wrong)}.")
    file = Path(folder) / RESULTS_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite({name: results[name] for name in FIELDS}), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(file, text + "\n")
    return file


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """
    Reads the results of an evaluation.

    Args:
        path (`str` or `os.PathLike`): The folder, or its `results.json`.

    Returns:
        `dict`: the fields of [`FIELDS`].

    Raises:
        OSError: If there is no such file.
        ValueError: If it is no such file, or of a newer version.
    """
    file = Path(path)
    file = file / RESULTS_FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"No {RESULTS_FILE} in {path}. Name the folder that `hf-dspark evaluate` wrote.")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON file: {error}") from None
    version = results.get("schema_version") if isinstance(results, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ValueError(f"{file} has schema version {version}, this hf-dspark reads {SCHEMA_VERSION}. Update it.")
    if not isinstance(version, int) or set(FIELDS) - set(results):
        raise ValueError(f"{file} was not written by `hf-dspark evaluate`.")
    return results


def entry(results: dict[str, Any], contender: str, task: str = "all", rows: int | None = None) -> dict[str, Any]:
    """
    The entry of `results["results"]` for one contender, task and number of rows.

    Args:
        results (`dict`): What [`read_results`] returned.
        contender (`str`): A key of `results["contenders"]`.
        task (`str`, *optional*, defaults to `"all"`): A task, `"all"` for all prompts together, or `"macro"`.
        rows (`int`, *optional*): Rows decoded at once; the smallest number evaluated by default.

    Raises:
        KeyError: If it was not evaluated.
    """
    found = [e for e in results["results"] if (e["contender"], e["task"]) == (contender, task)]
    found = sorted((e for e in found if rows in (None, e["rows"])), key=lambda e: e["rows"])
    if not found:
        raise KeyError(f"No results of {contender} on {task}" + ("." if rows is None else f" with {rows} rows."))
    return found[0]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
