"""Files that appear whole or not at all, and files of JSON lines."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Writes a file aside, then puts it in place, so that a reader never meets half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def json_line(line: bytes) -> Any:
    """
    What one line of a file of JSON lines holds.

    Raises:
        ValueError: Saying what is wrong with it.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Not UTF-8: byte {line[error.start]:#04x} at {error.start}. Save the file as UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"Not JSON: {error.msg.removesuffix(' at')} at column {error.colno}.") from None
    except RecursionError:
        raise ValueError("Not read: lists or objects are nested too deeply.") from None


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """
    The values of a file of JSON lines with their line numbers; empty lines are passed over.

    Raises:
        ValueError: Naming file and line of what is no JSON.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, json_line(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from None
