"""What a row of a file of prompts asks. Every command that takes prompts reads `prompt`, `messages` or `turns`."""

from collections.abc import Mapping
from typing import Any


def prompt_of(row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """
    The prompt of a row, for one answer: the text or messages in `prompt`; those in `messages`, without the assistant's
    last; or the first of the user's `turns`.

    Raises:
        ValueError: If the row holds none of them, or an empty one.
    """
    name, value = _column(row)
    if name == "turns":
        return _texts(value)[0]
    if isinstance(value, str) and name == "prompt":
        return _texts([value], name)[0]
    messages = _messages(value, name)
    while name == "messages" and messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("`messages` asks nothing: there is no message before the assistant's.")
    return messages


def user_turns(row: Mapping[str, Any]) -> list[str]:
    """
    The user's messages of a row, for a conversation in which the model answers each.

    Raises:
        ValueError: As in `prompt_of`, and if a chat holds what is not a user's text, such as a system message.
    """
    name, value = _column(row)
    if name == "turns":
        return _texts(value)
    if isinstance(value, str) and name == "prompt":
        return _texts([value], name)
    messages = _messages(value, name)
    if others := {str(message["role"]) for message in messages} - {"user", "assistant"}:
        raise ValueError(f"`{name}` holds messages of the role {', '.join(sorted(others))}; only the user's count.")
    return _texts([message.get("content") for message in messages if message["role"] == "user"], name)


def _column(row: Any) -> tuple[str, Any]:
    if isinstance(row, Mapping):
        for name in ("prompt", "messages", "turns"):
            if row.get(name) is not None:
                return name, row[name]
    got = f"the columns {', '.join(map(str, sorted(row)))}" if isinstance(row, Mapping) else type(row).__name__
    raise ValueError(f"Expected `prompt`, `messages` or `turns`, got {got}.")


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(m, Mapping) and "role" in m for m in value):
        raise ValueError(f"`{name}` must hold messages, each with `role` and `content`.")
    if not value:
        raise ValueError(f"`{name}` is empty.")
    return value


def _texts(value: Any, name: str = "turns") -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) and t.strip() for t in value):
        raise ValueError(f"`{name}` must hold texts that are not empty.")
    return value
