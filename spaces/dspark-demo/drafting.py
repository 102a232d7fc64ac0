"""The visitor's choices as arguments of `generate`."""

from __future__ import annotations

from typing import Any

from pairs import Pair


SCHEDULES = {
    "fixed": "Check every draft",
    "confidence": "Check while confident",
    "throughput": "Check what pays here",
}


def schedules(pair: Pair) -> list[tuple[str, str]]:
    """What a pair can do, as choices of a radio group: words and value."""
    return [(words, name) for name, words in SCHEDULES.items() if name != "throughput" or pair.is_measured]


def drafting(pair: Pair, schedule: str, threshold: float, drafts: int) -> dict[str, Any]:
    """
    Args:
        pair (`Pair`): Who decodes.
        schedule (`str`): Which drafts are checked.
        threshold (`float`): Least confidence; the confidence schedule's only.
        drafts (`int`): Drafts a round, at most.
    """
    arguments = {"verification_schedule": schedule, "num_assistant_tokens": min(int(drafts), pair.num_drafts)}
    if schedule == "confidence":
        arguments["assistant_confidence_threshold"] = float(threshold)
    return arguments


def sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
