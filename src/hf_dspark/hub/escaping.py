"""Other people's text in our pages: names, values and notes that may hold anything stay text and nothing else."""

import html
import re
import unicodedata


LIMIT = 200

# Bidirectional overrides and isolates reorder what stands around them; zero-width characters hide in names.
_INVISIBLE = re.compile("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
_SPECIAL = re.compile(r"([\\`*\[\]|~$#!{}^])|(?<![^\W_])_|_(?![^\W_])")
_NAME = re.compile(r"[A-Za-z0-9_./ :=+-]+")
_RIGHT_TO_LEFT = {"R", "AL"}
FIRST_STRONG_ISOLATE, POP_ISOLATE = "\u2068", "\u2069"


def one_line(text: object, limit: int = LIMIT) -> str:
    """
    Text without control characters and line breaks, cut at a length.

    Args:
        text: Anything that prints.
        limit (`int`, *optional*, defaults to 200): Most characters; what is longer ends in an ellipsis.
    """
    text = "".join(" " if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") else char for char in str(text))
    text = " ".join(_INVISIBLE.sub("", text).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def markdown(text: object, limit: int = LIMIT) -> str:
    """
    Text that Markdown and HTML show as it is: in running text, in headings and in cells of tables. Right-to-left text
    is isolated, so that it doesn't reorder its neighbours.
    """
    line = one_line(text, limit)
    # An address in it must not become a link, nor a name a mention.
    shown = html.escape(_SPECIAL.sub(r"\\\g<0>", line), quote=False)
    shown = shown.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;")
    if any(unicodedata.bidirectional(char) in _RIGHT_TO_LEFT for char in line):
        return f"{FIRST_STRONG_ISOLATE}{shown}{POP_ISOLATE}"
    return shown


def code(text: object, limit: int = LIMIT) -> str:
    """A name as inline code, also in cells of tables; what is more than a name is shown as text."""
    line = one_line(text, limit)
    return f"`{line}`" if _NAME.fullmatch(line) else markdown(line)


def printable(text: object) -> str:
    """Text for a terminal: line breaks stay, and nothing that moves the cursor, changes colours or hides."""
    kept = (
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else "\ufffd" for char in str(text)
    )
    return _INVISIBLE.sub("", "".join(kept))
