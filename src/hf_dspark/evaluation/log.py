"""`prompts.jsonl`: what was decoded so far, one line at a time, so that a killed run loses at most one of them."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout  # torch brings it

from ..files import write_whole
from .results import RESULTS_FILE


LOG_FILE = "prompts.jsonl"
REPORT_FILE = "report.md"


class PromptLog:
    """
    The counters of each unit (a group of prompts decoded at once), as they come. The first line says what run it is.
    No other run gets into the folder before [`~PromptLog.close`] is called or the process ends.

    Args:
        folder (`str` or `os.PathLike`): The run's folder; made if it is not there.
        identity (`dict[str, Any]`): All that must be the same for two parts of one run to belong together.

    Attributes:
        created (`str`): When the run began.
        records (`list[dict[str, Any]]`): What is in the file.

    Raises:
        ValueError: If the folder holds another run, naming what differs; if another process is at it; or if it holds
            files of these names that no evaluation wrote.
    """

    def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]) -> None:
        self.file = Path(folder) / LOG_FILE
        refuse_foreign(folder)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.file.parent / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"Another evaluation is writing to {folder}. Wait for it, or name another folder."
            ) from None
        try:
            self._open(identity)
        except BaseException:
            self.close()
            raise

    def _open(self, identity: dict[str, Any]) -> None:
        identity = json.loads(json.dumps(identity))
        if self.file.is_file():
            header, self.records = _read(self.file)
            if differing := _differing(header["run"], identity):
                raise ValueError(
                    f"{self.file.parent} holds another evaluation: it differs in {', '.join(differing)}. Name another "
                    f"folder, or delete this one to start again."
                )
        else:
            now = datetime.datetime.now(datetime.timezone.utc)
            header, self.records = {"created": now.isoformat(timespec="seconds"), "run": identity}, []
        self.created = header["created"]
        # Without the half line that a kill may have left.
        write_whole(self.file, "".join(json.dumps(line) + "\n" for line in [header, *self.records]))

    def append(self, record: dict[str, Any]) -> None:
        """Adds one record; it is on disk when this returns."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.records.append(record)

    def close(self) -> None:
        """Lets other runs into the folder."""
        self._lock.release()


def refuse_foreign(folder: str | os.PathLike) -> None:
    """
    Refuses a folder that holds files which an evaluation would overwrite and which none wrote.

    Raises:
        ValueError: Naming the file.
    """
    file = Path(folder) / LOG_FILE
    if file.exists():
        _read(file)
        return
    for name in (RESULTS_FILE, REPORT_FILE):
        if (Path(folder) / name).exists():
            raise ValueError(
                f"{Path(folder) / name} is there already, and no {LOG_FILE} of the run that it is of. Name another "
                f"folder, or move it away."
            )


def read_log(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """
    The records of a finished or interrupted run, each unit once.

    Raises:
        OSError: If the folder holds none.
        ValueError: If the file is damaged, or none that an evaluation wrote.
    """
    file = Path(folder) / LOG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"No {LOG_FILE} in {folder}. Name the folder that `hf-dspark evaluate` wrote.")
    return _read(file)[1]


def _read(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line, and the records. The text behind the last end of line is half a record."""
    *whole, _ = file.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        header = json.loads(whole[0]) if whole else None
        if not (isinstance(header, dict) and isinstance(header.get("run"), dict) and "created" in header):
            raise ValueError
    except (ValueError, RecursionError):
        raise ValueError(
            f"{file} is not the log of an evaluation, which has this name. Name another folder, or move the file away."
        ) from None
    try:
        records = [json.loads(line) for line in whole[1:]]
    except (ValueError, RecursionError):
        records = [None]
    if not all(map(_is_record, records)):
        raise ValueError(f"{file} is damaged. Delete its folder to start again.")
    once: dict[str, dict[str, Any]] = {}
    for record in records:
        once.setdefault(repr(record["unit"]), record)
    return header, list(once.values())


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and set(record) == {"unit", "digests", "turns"}
        and isinstance(record["unit"], list)
        and len(record["unit"]) == 3
        and isinstance(record["turns"], list)
        and all(isinstance(turn, dict) and isinstance(turn.get("contenders"), dict) for turn in record["turns"])
        and bool(record["turns"])
    )


def _differing(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key in sorted(before.keys() | now.keys()):
        a, b = before.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += _differing(a, b, f"{prefix}{key}.")
        elif a != b:
            names.append(prefix + key)
    return names
