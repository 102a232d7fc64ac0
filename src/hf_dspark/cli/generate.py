"""`hf-dspark generate`: one prompt, one answer, and what the drafter was good for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, BadParameter, Option

from .display import schedule_text
from .options import DrafterOption, DtypeOption, TargetOption


if TYPE_CHECKING:
    from ..generation.statistics import Speculation
    from ..generation.streaming import Origin
    from .decoding import Decoded


def generate(
    prompt: Annotated[str, Argument(help="What to ask the model.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, Option(min=1, help="How long the answer may be, in tokens.")] = 256,
    temperature: Annotated[
        float, Option(min=0.0, help="0 always takes the likeliest token; higher is more random.")
    ] = 0.0,
    num_assistant_tokens: Annotated[
        int | None,
        Option(
            min=1,
            help="Tokens guessed a round.",
            show_default="the drafter's own; as pays, where this machine was profiled",
        ),
    ] = None,
    confidence_threshold: Annotated[
        float | None,
        Option(
            min=0.0,
            max=1.0,
            help="Have only those guesses checked that the drafter is at least this sure of.",
            show_default="the drafter's own",
        ),
    ] = None,
    schedule: Annotated[
        Literal["fixed", "confidence", "throughput"] | None,
        Option(
            help="How many guesses are checked; throughput needs `hf-dspark profile` once.",
            show_default="the drafter's own; throughput where this machine was profiled",
        ),
    ] = None,
    prompt_lookup: Annotated[
        int | None,
        Option(
            min=0,
            help="Where the text repeats itself, copy so many tokens from it in place of a guess; 0 never copies.",
            show_default="the drafter's own",
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    plain: Annotated[bool, Option("--plain", help="Decode without a drafter, to compare.")] = False,
    raw: Annotated[bool, Option("--raw", help="Continue PROMPT as it stands, without the chat template.")] = False,
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.", show_default="random")] = None,
) -> None:
    """
    Answer PROMPT, faster with a drafter.

    The answer is what the target alone would have written (or, with a temperature, follows the same distribution).
    It goes to standard output; in a terminal, tokens that were guessed or copied right are green. The statistics go to
    standard error.

    Without --target and --drafter, a small pair that runs on a laptop's CPU is used.
    """

    import torch

    from .decoding import decode, encode, find_target, load_drafter, load_target

    drafting = _drafting(num_assistant_tokens, confidence_threshold, schedule, prompt_lookup)
    if plain and drafting:
        raise BadParameter("--plain decodes without a drafter: leave out what says how to draft.")
    if drafter or not plain:
        target = find_target(target, [drafter] if drafter else [])
    model, tokenizer = load_target(target, dtype)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, **_sampling(temperature)}
    if not plain:
        settings |= {"drafter": load_drafter(drafter, model), **drafting}
    if seed is not None:
        torch.manual_seed(seed)
    answer = decode(model, encode(tokenizer, prompt, raw), streamer=_streamer(tokenizer), **settings)
    Console().print()
    Console(file=sys.stderr).print(_statistics(answer))


def _sampling(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}


def _drafting(
    num_assistant_tokens: int | None,
    confidence_threshold: float | None,
    schedule: str | None,
    prompt_lookup: int | None,
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if num_assistant_tokens is not None:
        settings["num_assistant_tokens"] = num_assistant_tokens
    if confidence_threshold is not None:
        settings |= {"assistant_confidence_threshold": confidence_threshold, "verification_schedule": "confidence"}
    if schedule is not None:
        settings["verification_schedule"] = schedule
    if prompt_lookup is not None:
        settings["prompt_lookup_num_tokens"] = prompt_lookup
    return settings


def _streamer(tokenizer: Any) -> Any:
    from ..generation.streaming import DraftStreamer
    from .display import MarkedText

    console = Console(highlight=False, soft_wrap=True)
    marked = MarkedText(brackets=False)  # a pipe or a file gets the answer and nothing else

    def show(text: str, origin: Origin) -> None:
        for piece, style in marked.push(text, origin == "accepted"):
            console.print(Text(piece, style), end="")

    return DraftStreamer(tokenizer, show)


def _statistics(answer: Decoded) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "new tokens", f"{len(answer.ids)} in {answer.seconds:.2f} s, {answer.tokens_per_second:.1f} a second"
    )
    table.add_row("target forwards", str(answer.target_forwards))
    if stats := answer.speculation:
        proposed, verified, accepted = (sum(counts) for counts in (stats.proposed, stats.verified, stats.accepted))
        table.add_row("tokens per target forward", f"{stats.tokens_per_forward:.2f}")
        table.add_row("schedule", schedule_text(stats))
        if any(stats.accepted_lengths):  # a single token needs no round
            length = f"{stats.mean_accepted_length:.2f} tokens a round, the target's own included"
            table.add_row("accepted length", length)
        table.add_row("guesses", f"{proposed} made, {verified} checked, {accepted} accepted")
        if stats.copied:
            table.add_row("copies", f"{stats.copied} tokens checked, {stats.copied_accepted} accepted")
        table.add_row("time", _shares(stats))
    return table


def _shares(stats: Speculation) -> str:
    seconds = {
        "target": stats.target_seconds,
        "drafter": stats.draft_seconds,
        "preparing the layers (once)": stats.preparation_seconds,
    }
    shares = {what: spent / stats.total_seconds for what, spent in seconds.items()}
    shares["everything else"] = 1 - sum(shares.values())
    # Where layers need no preparation, nothing is said of it.
    return ", ".join(f"{share:.0%} {what}" for what, share in shares.items() if share >= 0.005 or "once" not in what)
