"""A file of finished work that survives a kill at any moment."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """
    JSON values, one a line, each there as a whole or not at all: what a kill tore off is cut away on opening.

    Args:
        path (`Path`): The file; made when the first entry is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[Any]:
        """What was added, by this run and those before it."""
        if not self.path.exists():
            return []
        found, whole = [], 0
        with self.path.open("rb") as file:
            for line in file:
                try:
                    found.append(json.loads(line))
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    found.pop()
                    break
                whole += len(line)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        return found

    def add(self, entry: Any) -> None:
        """Adds an entry, on disk when this returns."""
        with self.path.open("ab") as file:
            file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def digest(value: Any) -> str:
    """A short name of a JSON value, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(before: Any, now: Any, name: str = "", leave_out: tuple[str, ...] = ()) -> list[str]:
    """What differs between two JSON values, each as `name: old there, new now`."""
    if before == now:
        return []
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [f"{name}: {before} there, {now} now"]
    names = [key for key in sorted({*before, *now}) if key not in leave_out]
    return [told for key in names for told in differences(before.get(key), now.get(key), f"{name} {key}".strip())]


def seed_of(*parts: Any) -> int:
    """A seed that depends on all parts."""
    return int(digest(list(parts)), 16) & 0x7FFFFFFF
