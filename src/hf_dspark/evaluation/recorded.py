"""What a run with the whole block recorded: the ground for calibration, for sweeps and for the cost model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .contenders import PLAIN
from .replay import RecordedRound


def is_whole_block(description: dict[str, Any]) -> bool:
    """Whether a contender verified all that its drafter can draft, so that no round is selected by confidence."""
    return (
        description["kind"] == "drafter"
        and description["verification_schedule"] == "fixed"
        and description["num_assistant_tokens"] == description["num_drafts"]
        and not description.get("prompt_lookup_num_tokens")
    )


@dataclass
class Turn:
    """
    One turn of a unit, as the whole block was run on it.

    Args:
        rows (`list[list[RecordedRound]]`): Recorded rounds of each row.
        prompt_tokens (`int`): Tokens of all rows' prompts, padding included.
        prefill_seconds (`float`): What the target's forward over them took.
    """

    rows: list[list[RecordedRound]]
    prompt_tokens: int
    prefill_seconds: float


@dataclass
class UnitRun:
    """
    A unit as plain decoding and the whole block ran it.

    Args:
        task (`str`): Its task.
        turns (`list[Turn]`): Its turns.
        plain_tokens (`int`), plain_seconds (`float`): Of plain decoding.
        draft_seconds, seconds (`float`): Of the whole block, drafting and in all.
        tokens (`int`): New tokens of the whole block; after a tie they may be others than plain decoding's.
        speedups (`dict[str, float]`): Of every contender, in tokens a second over plain decoding's.
    """

    task: str
    turns: list[Turn]
    plain_tokens: int
    plain_seconds: float
    draft_seconds: float
    seconds: float
    tokens: int = 0
    speedups: dict[str, float] = field(default_factory=dict)


def recorded_units(records: Iterable[dict[str, Any]], whole_block: str, rows: int, num_drafts: int) -> list[UnitRun]:
    """What the log says of the contender `whole_block`, of so many drafts a round, with that many rows."""
    units = []
    for record in records:
        if record["unit"][0] != rows or whole_block not in record["turns"][0]["contenders"]:
            continue
        runs = [turn["contenders"][whole_block] for turn in record["turns"]]
        names = record["turns"][0]["contenders"]
        tokens = {
            name: _total(record, name, lambda run: sum(row["new_tokens"] for row in run["rows"])) for name in names
        }
        seconds = {name: _total(record, name, lambda run: run["seconds"]) for name in names}
        rates = {name: tokens[name] / seconds[name] for name in names}
        units.append(
            UnitRun(
                record["unit"][1],
                [_turn(turn, run, num_drafts) for turn, run in zip(record["turns"], runs)],
                tokens[PLAIN],
                seconds[PLAIN],
                sum(run["draft_seconds"] for run in runs),
                seconds[whole_block],
                tokens[whole_block],
                {name: rate / rates[PLAIN] for name, rate in rates.items()},
            )
        )
    return units


def _total(record: dict[str, Any], name: str, count: Callable[[dict[str, Any]], float]) -> float:
    return sum(count(turn["contenders"][name]) for turn in record["turns"])


def _turn(turn: dict[str, Any], run: dict[str, Any], num_drafts: int) -> Turn:
    rows = []
    for row in run["rows"]:
        confidences = row.get("confidences") or [()] * len(row["rounds"])
        rows.append(
            [
                # A row takes one token more than its drafts: where fewer were verified, there was no room for others.
                RecordedRound(
                    committed, accepted, verified, tuple(each), None if verified == num_drafts else verified + 1
                )
                for (_, verified, accepted, committed), each in zip(row["rounds"], confidences)
            ]
        )
    return Turn(rows, len(rows) * max(turn["prompt_tokens"]), run["prefill_seconds"])
