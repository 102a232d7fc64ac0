"""What a person has written into a card stays there when the card is made again."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any


NAMES = ("introduction", "training", "evaluation", "limits", "notes")

_REGION = re.compile(r"<!-- by hand: ([\w-]+) -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
_HEADER = re.compile(r"<!-- hf-dspark card (\{.*?\})\s.*?-->\n?", re.DOTALL)
NOTE = (
    "Made by `hf-dspark card` from the files beside it. What stands between `by hand` and `end of` is yours and "
    "stays; all else is written anew."
)


def region(name: str, text: str) -> str:
    """A region of a card that is written by hand."""
    return f"<!-- by hand: {name} -->\n{text}<!-- end of {name} -->"


def render_regions(kept: dict[str, str]) -> Callable[[str], str]:
    """What the template calls for each region. The last one takes in regions of other names too."""

    def render(name: str) -> str:
        names = [name, *sorted(kept.keys() - set(NAMES))] if name == NAMES[-1] else [name]
        return "\n\n".join(region(each, kept.get(each, "")) for each in names)

    return render


def read_regions(text: str) -> dict[str, str]:
    """The texts of a card's regions, by name."""
    return dict(_REGION.findall(text.replace("\r\n", "\n")))


def read_header(text: str) -> dict[str, Any] | None:
    """What the card remembers of how it was made; `None` for a card that was not made here."""
    found = _HEADER.search(text)
    if not found:
        return None
    try:
        return json.loads(found[1])
    except ValueError:
        return None


def add_header(text: str, data: dict[str, Any], facts: dict[str, Any]) -> str:
    """The text of a card with what it shall remember in front; `data` is its metadata."""
    fields = {**facts, "digest": digest(text), "whole": _whole(data, text)}
    return f"<!-- hf-dspark card {json.dumps(fields)}\n{NOTE} -->\n{text}"


def was_edited(text: str) -> bool:
    """Whether something outside the regions is no longer as it was written."""
    header = read_header(text) or {}
    return header.get("digest") != digest(_HEADER.sub("", text, count=1))


def was_touched(data: dict[str, Any], text: str) -> bool:
    """Whether anything, metadata and regions too, is no longer as it was written."""
    header = read_header(text) or {}
    return header.get("whole") != _whole(data, _HEADER.sub("", text, count=1))


def _whole(data: dict[str, Any], text: str) -> str:
    return _hash(json.dumps(data, sort_keys=True, default=str) + "\n" + text.replace("\r\n", "\n").strip())


def digest(text: str) -> str:
    """Tells a card's text, but for its regions, from any other."""
    return _hash(_REGION.sub(lambda found: found[1], text.replace("\r\n", "\n")))


def _hash(text: str) -> str:
    return hashlib.sha256("\n".join(line.rstrip() for line in text.strip().splitlines()).encode()).hexdigest()[:16]
