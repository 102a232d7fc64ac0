"""`hf-dspark demo`: the embedded pair decodes a few prompts, plain and with the drafter, side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from .display import SideBySide, schedule_text


if TYPE_CHECKING:
    from .decoding import Decoded

    Decoder = Callable[..., Decoded]


PROMPTS = (
    "A baker makes 24 rolls in the morning and twice as many in the afternoon. She sells 50. How many are left?",
    "Write a Python function that tells whether a word is a palindrome, and explain how it works.",
    "Explain to a ten-year-old why the sky is blue.",
    "Solve 3x + 7 = 22 step by step.",
    "List five tips for learning a new language.",
)
COLUMNS = ("Tokens", "Plain\ntokens/s", "Drafted\ntokens/s", "Speed\nratio", "Tokens per\nforward", "Same\ntext")


def demo(
    prompts: Annotated[int, Option(min=1, max=len(PROMPTS), help="How many prompts to decode.")] = 3,
    max_new_tokens: Annotated[int, Option(min=2, help="How long each answer may be, in tokens.")] = 96,
    repeats: Annotated[int, Option(min=1, help="Timed runs of each kind a prompt; their median counts.")] = 3,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Option(help="Number type of the weights; auto is float32 on a CPU and bfloat16 on a GPU."),
    ] = "auto",
) -> None:
    """
    Watch a small model decode, plain and with its drafter.

    A drafter guesses several tokens ahead; the target model checks them in one forward pass and keeps those that it
    would have written itself. Both columns therefore show the same text, but the right one needs fewer passes.

    Runs on a laptop's CPU. The first run fetches the target, SmolLM2-135M-Instruct, once.
    """
    from .decoding import decode, device, load_drafter, load_target

    console = Console(highlight=False)
    dtype = _resolve(dtype, device())
    target, tokenizer = load_target(None, dtype)
    plain = partial(
        decode, target, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    drafted = partial(plain, drafter=load_drafter(None, target))
    _introduce(console, dtype, device())
    results = [_try(console, tokenizer, prompt, plain, drafted, repeats) for prompt in PROMPTS[:prompts]]
    console.print(_table(results))
    console.print(_summary(results, dtype))
    # float32 leaves rounding no room, so a difference there is a fault that a caller should see.
    if dtype == "float32" and not all(result.equal for result in results):
        raise Exit(1)


@dataclass
class Result:
    """What came of one prompt; `plain` and `drafted` hold the timed runs, pair by pair."""

    prompt: str
    plain: list[Decoded]
    drafted: list[Decoded]

    @property
    def ratio(self) -> float:
        pairs = zip(self.plain, self.drafted, strict=True)
        return median(drafted.tokens_per_second / plain.tokens_per_second for plain, drafted in pairs)

    @property
    def tokens_per_forward(self) -> float:
        return self.drafted[0].speculation.tokens_per_forward

    @property
    def equal(self) -> bool:
        return all(run.ids == self.plain[0].ids for run in self.plain + self.drafted)


def _resolve(dtype: str, device: str) -> str:
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def _introduce(console: Console, dtype: str, device: str) -> None:
    sign = ("‹between these›", "bold") if _brackets(console) else ("green", SideBySide.ACCEPTED)
    text = Text.assemble(
        f"SmolLM2-135M-Instruct and its drafter, {dtype}, on the {device.upper()}, greedy, one prompt at a time.\n"
        "Both columns come from the same model. On the right, a drafter guesses ahead, and where the text repeats "
        "itself it is copied; text ",
        sign,
        " was guessed or copied, and accepted.",
    )
    console.print(text)


def _brackets(console: Console) -> bool:
    return console.no_color or console.color_system is None


def _try(console: Console, tokenizer: Any, prompt: str, plain: Decoder, drafted: Decoder, repeats: int) -> Result:
    from .decoding import encode

    inputs = encode(tokenizer, prompt)
    console.print(Text.assemble(("\nPrompt: ", "bold"), prompt))
    _perform(console, tokenizer, inputs, plain, drafted)
    return _measure(prompt, inputs, plain, drafted, repeats)


def _perform(console: Console, tokenizer: Any, inputs: dict[str, Any], plain: Decoder, drafted: Decoder) -> None:
    """Show both answers as they stream. Not timed: printing takes time, and these runs warm everything up."""
    from ..generation.streaming import DraftStreamer

    view = SideBySide(_brackets(console))
    # Into a file or a pipe, the finished view is enough.
    with Live(view, console=console, refresh_per_second=12) if console.is_terminal else nullcontext():
        first = plain(inputs, streamer=DraftStreamer(tokenizer, view.show_plain))
        view.note(first)
        view.note(first, drafted(inputs, streamer=DraftStreamer(tokenizer, view.show_drafted)))
    if not console.is_terminal:
        console.print(view)


def _measure(prompt: str, inputs: dict[str, Any], plain: Decoder, drafted: Decoder, repeats: int) -> Result:
    """Time silent runs in pairs; which of the two goes first alternates, so that no drift favours either."""
    result = Result(prompt, [], [])
    for turn in range(repeats):
        order = [(plain, result.plain), (drafted, result.drafted)]
        for decoder, runs in order if turn % 2 == 0 else reversed(order):
            runs.append(decoder(inputs))
    return result


def _table(results: list[Result]) -> Table:
    caption = "Medians of silent runs, plain and drafted by turns; of the ratio, over their pairs."
    table = Table(caption=caption, box=SIMPLE_HEAD, pad_edge=False)  # fits 80 columns
    table.add_column("Prompt", max_width=18, no_wrap=True, overflow="ellipsis")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.prompt,
            str(len(result.plain[0].ids)),
            f"{_speed(result.plain):.1f}",
            f"{_speed(result.drafted):.1f}",
            f"{result.ratio:.2f}x",
            f"{result.tokens_per_forward:.2f}",
            "yes" if result.equal else "NO",
        )
    return table


def _speed(runs: list[Decoded]) -> float:
    return median(run.tokens_per_second for run in runs)


def _summary(results: list[Result], dtype: str) -> Text:
    equal = sum(result.equal for result in results)
    stats = results[0].drafted[0].speculation
    ratio = median(result.ratio for result in results)
    per_forward = median(result.tokens_per_forward for result in results)
    text = Text.assemble(
        "With the drafter: ",
        (f"{ratio:.2f} times the speed", "bold"),
        f" of plain decoding, {per_forward:.2f} tokens per target forward (medians), ",
        (f"same text in {equal} of {len(results)}", "bold"),
        f". Schedule: {schedule_text(stats)}.",
    )
    if ratio < 1:
        text.append(
            " Not faster on this processor, where a forward over several tokens costs much more than one over a "
            "single token."
        )
    if equal < len(results):
        text.append(f" {_difference(dtype)}")
    return text


def _difference(dtype: str) -> str:
    if dtype == "float32":
        return "In float32 the texts must be the same: please report this."
    return f"{dtype} rounds, so two nearly equal tokens can change places; --dtype float32 shows exact equality."
