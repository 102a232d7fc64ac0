"""Names of models and datasets: which are the Hub's, and what is told of the others."""

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..origins import hub_origin, is_repo_id


_LOCAL = ("~/", "./", "../", ".\\", "..\\", "file://")


def hub_id(name: Any) -> str | None:
    """The Hub id `owner/name` that a name stands for; `None` for folders and whatever else the Hub can't have."""
    if not isinstance(name, str):
        return None
    name = hub_origin(name) or name
    if not is_repo_id(name) or "/" not in name or Path(name).is_dir():
        return None
    return name


def short_name(name: Any) -> str | None:
    """What a model is called in a heading: the last part of its id or path."""
    if not isinstance(name, str) or not name.strip():
        return None
    return (hub_id(name) or name.replace("\\", "/")).rstrip("/").split("/")[-1] or None


def without_paths(value: Any, name: str = "") -> Any:
    """
    A JSON value in which local paths are cut to what they lead to, for files that others will read.

    Args:
        value: The value.
        name (`str`, *optional*): Its key. Those that end in `name_or_path` may hold a relative path too.
    """
    if isinstance(value, dict):
        return {key: without_paths(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [without_paths(each, name) for each in value]
    if not isinstance(value, str):
        return value
    is_path = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute() or value.startswith(_LOCAL)
    return hub_id(value) or short_name(value) or value if is_path or name.endswith("name_or_path") else value
