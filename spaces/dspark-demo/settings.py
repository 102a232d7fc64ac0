"""What the owner of the Space can set, by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields


PREFIX = "DSPARK_"
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """
    One field a variable: `max_new_tokens` is read from `DSPARK_MAX_NEW_TOKENS`. An empty variable counts as not set.

    Args:
        target, drafter (`str`): Hub ids or folders; the small pair that comes with hf-dspark if both are empty, and
            the target that the drafter names if only `target` is.
        title (`str`): Heading of the page.
        dtype (`str`): Type of the weights, one of `DTYPES`; `auto` is float32 on a CPU and what they were saved
            in on a GPU.
        max_new_tokens (`int`): Longest reply, in tokens.
        max_prompt_tokens (`int`): Longest prompt, earlier turns included.
        time_limit (`float`): Seconds after which a reply is cut off.
        concurrency (`int`): Replies and races written at the same time.
        queue_size (`int`): Visitors who may wait for their turn.
        download_limit_gb (`float`): Largest target or drafter that a visitor may have loaded; 0 lets nobody load any.
    """

    target: str = ""
    drafter: str = ""
    title: str = "Speculative decoding, token by token"
    dtype: str = "auto"
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    time_limit: float = 60.0
    concurrency: int = 2
    queue_size: int = 16
    download_limit_gb: float = 3.0

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The variables, and the field that each sets."""
        return {PREFIX + field.name.upper(): field.name for field in fields(cls)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables, and refuse by name what makes no sense."""
        known = cls.variables()
        if unknown := sorted(name for name in environment if name.startswith(PREFIX) and name not in known):
            raise ValueError(f"Unknown variables {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
        given = {}
        for variable, name in known.items():
            if text := environment.get(variable, "").strip():
                given[name] = _read(variable, text, type(getattr(cls, name)))
        settings = cls(**given)
        if settings.target and not settings.drafter:
            raise ValueError(f"{PREFIX}TARGET is set without {PREFIX}DRAFTER. Name the target's drafter too.")
        if settings.dtype not in DTYPES:
            raise ValueError(f"{PREFIX}DTYPE must be one of {', '.join(DTYPES)}, not {settings.dtype!r}.")
        return settings


def _read(variable: str, text: str, kind: type) -> str | int | float:
    if kind is str:
        return text
    try:
        value = kind(text)
    except ValueError:
        value = None
    least = 0 if kind is float else 1
    if value is None or not least <= value < float("inf"):
        what = "a whole number, 1 or more" if kind is int else "a number, 0 or more"
        raise ValueError(f"{variable} must be {what}, not {text!r}.")
    return value
