"""For `mkdocs build`: docstrings write types as transformers' own do, (`str`, *optional*) or [`~trl.SFTTrainer`]."""

import re
from typing import Any


_NAMED = re.compile(r"\[<code>~?([\w.]+)</code>\]")
_TYPE = re.compile(r"<code>([^<]*`[^<]*)</code>")


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Shows names of classes without brackets and modules, and types without the marks around them."""
    html = _NAMED.sub(lambda found: f"<code>{found[1].split('.')[-1]}</code>", html)
    if page.file.src_uri != "reference.md":
        return html
    return _TYPE.sub(lambda found: f"<code>{_plain(found[1])}</code>", html)


def _plain(type_: str) -> str:
    return re.sub(r"\[`~?([\w.]+)`\]", lambda found: found[1].split(".")[-1], type_).replace("`", "").replace("*", "")
