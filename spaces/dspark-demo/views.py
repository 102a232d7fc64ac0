"""What the page shows, as HTML. Every text from outside goes through `escaped`."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from pairs import Pair
    from replies import Lane
    from simulator import Load, Outcome

    from hf_dspark.generation.statistics import Speculation


# Gradio reads the finished page as a template too.
TEMPLATE_SIGNS = {ord(sign): f"&#{ord(sign)};" for sign in "{}$@`"}
ORIGINS = {
    "accepted": "guessed or copied, and accepted",
    "correction": "put right by the target",
    "bonus": "the target's own, on top",
}


def escaped(text: str) -> str:
    """Text that shows as it was written, whatever it is."""
    return html.escape(text).translate(TEMPLATE_SIGNS)


@dataclass
class Message:
    """
    One turn of a conversation.

    Args:
        role (`str`): `"user"` or `"assistant"`.
        pieces (`list[tuple[str, str]]`): Its text in pieces, each with its origin.
        note (`str`): A line below it.
        writing (`bool`): Whether it is still growing.
    """

    role: str
    pieces: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""
    writing: bool = False

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


# ---------------------------------------------------------------------- heading, legend, notices


def heading(title: str) -> str:
    return (
        f"<header class='masthead'><h1>{escaped(title)}</h1>"
        "<p>A small <em>drafter</em> guesses the next few tokens. The <em>target</em> model checks all of them in one "
        "forward pass and keeps what it would have written itself: the same text in fewer passes.</p></header>"
    )


def pair_line(pair: Pair) -> str:
    return (
        "<dl class='pair'>"
        f"<div><dt>Target</dt><dd><bdi>{escaped(pair.target_name)}</bdi></dd></div>"
        f"<div><dt>Drafter</dt><dd><bdi>{escaped(pair.drafter_name)}</bdi></dd></div>"
        f"<div><dt>Drafts</dt><dd>up to {pair.num_drafts} a round</dd></div>"
        f"<div><dt>Runs in</dt><dd>{pair.place}</dd></div></dl>"
    )


def legend() -> str:
    items = "".join(f"<li><span class='token {origin}'>{words}</span></li>" for origin, words in ORIGINS.items())
    return f"<ul class='legend' aria-label='How tokens are marked'>{items}</ul>"


def notice(text: str, kind: str = "info") -> str:
    """A line that stands out: `kind` is `"info"`, `"good"` or `"error"`."""
    role = " role='alert'" if kind == "error" else ""
    return f"<p class='notice {kind}'{role}><bdi>{escaped(text)}</bdi></p>" if text else ""


# ---------------------------------------------------------------------- texts


def conversation(messages: list[Message]) -> str:
    if not messages:
        return "<p class='empty'>Ask something, and watch which tokens were guessed.</p>"
    return f"<div class='conversation'>{''.join(map(_message, messages))}</div>"


def _message(message: Message) -> str:
    speaker = "You" if message.role == "user" else "Model"
    note = f"<p class='note'>{escaped(message.note)}</p>" if message.note else ""
    return (
        f"<article class='message {message.role}'><h2>{speaker}</h2>"
        f"<div class='text' dir='auto'>{marked(message.pieces)}{_caret(message.writing)}</div>{note}</article>"
    )


def marked(pieces: list[tuple[str, str]]) -> str:
    """Text with each run of tokens of one origin marked."""
    runs = []
    for origin, run in groupby(pieces, key=lambda piece: piece[1]):
        texts = [escaped(text) for text, _ in run]
        # A token's own mark has an edge, so that a run shows how many it holds.
        if origin in ORIGINS:
            runs.extend(f"<span class='token {origin}'>{text}</span>" for text in texts)
        else:
            runs.append("".join(texts))
    return "".join(runs)


def _caret(writing: bool) -> str:
    return "<span class='caret' aria-hidden='true'></span>" if writing else ""


def lane(title: str, run: Lane | None) -> str:
    """One half of the race."""
    text = marked(list(run.recorder.pieces)) + _caret(not run.done) if run else ""
    tokens = run.recorder.num_tokens if run else 0
    facts = {
        "Tokens": str(tokens) if run else "–",
        "Tokens per forward": f"{tokens / run.target_forwards:.2f}" if tokens else "–",
        "Tokens a second": f"{run.tokens_per_second:.1f}" if tokens and run.seconds else "–",
    }
    return (
        f"<section class='lane' aria-label='{title}'><h2>{title}</h2>{_facts(facts)}"
        f"<div class='text' dir='auto' tabindex='0' role='group' aria-label='Text: {title}'>{text}</div></section>"
    )


def race(plain: Lane | None, drafted: Lane | None, verdict: str = "") -> str:
    return (
        f"<div class='lanes'>{lane('Plain', plain)}{lane('With the drafter', drafted)}</div>"
        f"<div class='verdict'>{verdict}</div>"
    )


# ---------------------------------------------------------------------- numbers


def measures(speculation: Speculation | None, num_drafts: int) -> str:
    """The figures of a reply, and how each draft position fared."""
    return f"<div class='measures'>{_figures(speculation)}{positions(speculation, num_drafts)}</div>"


def _figures(run: Speculation | None) -> str:
    facts = {
        "Tokens per forward": run.tokens_per_forward if run else math.nan,
        "Accepted length": run.mean_accepted_length if run else math.nan,
        "Checked a round": run.mean_verified if run else math.nan,
    }
    return _facts({name: _number(value) for name, value in facts.items()})


def _facts(facts: dict[str, str]) -> str:
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f"<dl class='figures'>{cells}</dl>"


def positions(run: Speculation | None, num_drafts: int) -> str:
    """A column a draft position: in what share of the rounds it was checked, and in what share accepted."""
    rounds = run.rounds if run else 0
    columns = []
    for k in range(num_drafts):
        checked, kept = (counts[k] / rounds if rounds and k < len(counts) else 0.0 for counts in _counts(run))
        columns.append(
            f"<li><span class='sr'>Position {k + 1}: checked in {checked:.0%} of the rounds, accepted in {kept:.0%}."
            f"</span><span class='bar' aria-hidden='true'><i class='checked' style='height:{checked:.1%}'></i>"
            f"<i class='kept' style='height:{kept:.1%}'></i></span><span aria-hidden='true'>"
            f"<b>{kept * 100:.0f}</b><small>{k + 1}</small></span></li>"
        )
    return (
        "<figure class='positions'><figcaption>Share of the rounds, in percent, by draft position<br>"
        "<span class='key checked'>checked</span> <span class='key kept'>accepted</span></figcaption>"
        f"<ol>{''.join(columns)}</ol></figure>"
    )


def _counts(run: Speculation | None) -> tuple[list[int], list[int]]:
    return (run.verified, run.accepted) if run else ([], [])


def runs_table(runs: list[dict[str, str]]) -> str:
    """What earlier settings gave, the newest first."""
    if not runs:
        return "<p class='empty'>Each reply adds a line here, so that settings can be compared.</p>"
    head = "".join(f"<th scope='col'>{name}</th>" for name in runs[0])
    body = "".join("<tr>" + "".join(f"<td>{escaped(value)}</td>" for value in run.values()) + "</tr>" for run in runs)
    return (
        "<div class='scroll' tabindex='0' role='region' aria-label='Earlier replies and their settings'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


# ---------------------------------------------------------------------- the simulator


def simulation(load: Load, outcome: Outcome) -> str:
    """What the throughput schedule made of a load."""
    times = {
        "Scheduled": f"{outcome.scheduled / outcome.plain:.2f}×",
        "Every draft checked": f"{outcome.all_checked / outcome.plain:.2f}×",
        "Checked a request": f"{outcome.mean_length:.2f}",
    }
    return f"{_facts(times)}{_meaning(load, outcome)}{_curve(load, outcome)}{_lengths(load, outcome)}"


def _meaning(load: Load, outcome: Outcome) -> str:
    checked = outcome.mean_length / load.drafts
    if outcome.mean_length == 0:
        words = "Drafting does not pay at this load, so the schedule leaves it, and looks again from time to time."
    elif checked > 0.95:
        words = "There is room in a step, so nearly every draft is checked."
    else:
        words = "Room in a step is scarce, so only drafts that are likely enough are checked."
    return f"<p class='note'>Speeds are against decoding the same batch without drafts. {words}</p>"


def _curve(load: Load, outcome: Outcome) -> str:
    """Steps a second by tokens in a step, and where the three ways of decoding lie on it."""
    widest = max(load.rows * (load.drafts + 1), 2 * load.free_tokens) * 1.05
    points = [(tokens, 1 / load.step_cost(tokens)) for tokens in (widest * k / 60 for k in range(61))]
    line = " ".join(f"{100 * x / widest:.2f},{100 - 100 * y:.2f}" for x, y in points)
    places = {
        "plain": ("without drafts", load.rows),
        "scheduled": ("scheduled", load.rows * (1 + outcome.mean_length)),
        "all": ("every draft checked", load.rows * (1 + load.drafts)),
    }
    marks, keys = "", ""
    for kind, (words, tokens) in places.items():
        height = 100 / load.step_cost(tokens)
        marks += f"<span class='mark {kind}' style='left:{100 * tokens / widest:.2f}%;bottom:{height:.2f}%'></span>"
        keys += f"<li><span class='mark {kind}' aria-hidden='true'></span>{words}: {tokens:.0f} tokens</li>"
    return (
        "<figure class='chart'><figcaption>Steps a second, by the tokens that a step computes</figcaption>"
        f"<div class='plot' aria-hidden='true'><svg viewBox='0 0 100 100' preserveAspectRatio='none'>"
        f"<polyline points='{line}'/></svg>{marks}</div>"
        f"<div class='ticks' aria-hidden='true'><span>0</span><span>{widest:.0f} tokens</span></div>"
        f"<ul class='keys'>{keys}</ul></figure>"
    )


def _lengths(load: Load, outcome: Outcome) -> str:
    """A column a request: how many of its drafts the last drafting round checked."""
    columns = "".join(
        f"<li><span class='bar'><i class='checked' style='height:100%'></i>"
        f"<i class='kept' style='height:{length / load.drafts:.1%}'></i></span></li>"
        for length in outcome.lengths
    )
    words = ", ".join(map(str, outcome.lengths))
    return (
        "<figure class='chart'><figcaption>Drafts checked of each request in the last round that drafted, of "
        f"{load.drafts}</figcaption><ol class='requests' aria-hidden='true'>{columns}</ol>"
        f"<p class='sr'>By request: {words}.</p></figure>"
    )
