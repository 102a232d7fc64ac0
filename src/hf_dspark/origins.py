"""Names of the Hub's repositories, and which of them a folder is a copy of."""

import json
import re
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


# What commands and settings call the small pair that comes with the library.
EMBEDDED = "embedded"
# Beside a copy that came another way than from the Hub: where it is from, and the `repo` that it stands for.
SOURCE_FILE = "source.json"
# The Hub's cache keeps a revision as models--owner--name/snapshots/<commit>.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]")


def hub_origin(name: str) -> str | None:
    """The Hub id `owner/name` of the model whose copy a folder holds; `None` for other folders and names."""
    if cached := _CACHED.search(name):
        return f"{cached[1]}/{cached[2]}"
    try:
        source = json.loads((Path(name) / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return source.get("repo") if isinstance(source, dict) and "copy" in source else None


def is_repo_id(name: str) -> bool:
    """Whether the Hub could have a repository of this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
