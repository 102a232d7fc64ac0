"""`prompts.jsonl`: what was decoded so far, one line at a time, so that a killed run loses at most one of them."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from ..files import write_whole


LOG_FILE = "prompts.jsonl"


class PromptLog:
    """
    The counters of each unit (a group of prompts decoded at once), as they come. The first line says what run it is.

    Args:
        folder (`str` or `os.PathLike`): The run's folder; made if it is not there.
        identity (`dict[str, Any]`): All that must be the same for two parts of one run to belong together.

    Attributes:
        created (`str`): When the run began.
        records (`list[dict[str, Any]]`): What is in the file.

    Raises:
        ValueError: If the folder holds another run, naming what differs.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]) -> None:
        self.file = Path(folder) / LOG_FILE
        self.file.parent.mkdir(parents=True, exist_ok=True)
        identity = json.loads(json.dumps(identity))
        lines = _whole_lines(self.file)
        if not lines:
            now = datetime.datetime.now(datetime.timezone.utc)
            lines = [{"created": now.isoformat(timespec="seconds"), "run": identity}]
        elif differing := _differing(lines[0]["run"], identity):
            raise ValueError(
                f"{folder} holds another evaluation: it differs in {', '.join(differing)}. Name another folder, or "
                f"delete this one to start again."
            )
        self.created, self.records = lines[0]["created"], lines[1:]
        self._rewrite(lines)  # without the half line that a kill may have left

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record; it is on disk when this returns."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.records.append(record)

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        write_whole(self.file, "".join(json.dumps(line) + "\n" for line in lines))


def read_log(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """
    The records of a finished or interrupted run.

    Raises:
        OSError: If the folder holds none.
    """
    file = Path(folder) / LOG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"No {LOG_FILE} in {folder}. Name the folder that `hf-dspark evaluate` wrote.")
    return _whole_lines(file)[1:]


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    *whole, _ = text.split("\n")
    try:
        return [json.loads(line) for line in whole]
    except ValueError:
        raise ValueError(f"{file} is damaged. Delete it to start again.") from None


def _differing(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _differing(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(prefix + key)
    return names
