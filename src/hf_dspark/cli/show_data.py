"""`hf-dspark show-data`: what a drafter would learn from, token by token."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from typer import Argument, BadParameter, Option

from .regenerate import parse_json_object


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def show_data(
    source: Annotated[str, Argument(metavar="DATA", help="A file, a folder or a Hub id.")],
    tokenizer: Annotated[
        str | None,
        Option(help="The target, or its tokenizer: a folder or Hub id.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    n: Annotated[int, Option("--n", "-n", min=1, help="How many examples.")] = 3,
    start: Annotated[int, Option(min=0, help="The first one.")] = 0,
    split: Annotated[str, Option(help="Split of the dataset.")] = "train",
    name: Annotated[str | None, Option(help="Configuration, of datasets with several.")] = None,
    max_length: Annotated[int, Option(min=2, help="Cut here, in tokens, as in training.")] = 2048,
    chat_template_kwargs: Annotated[
        str | None, Option(help='Arguments of the chat template, as JSON: {"enable_thinking": false}.')
    ] = None,
    plain: Annotated[
        bool, Option("--plain", help="No colours or frames: supervised text stands between ‹ and ›, for pipes.")
    ] = False,
) -> None:
    """
    Show which tokens of DATA are supervised: those that a drafter trained on it learns to draft.

    They are green on a terminal, and stand between ‹ and › where there are no colours. The chat template of the
    tokenizer decides; a chat whose answers it doesn't leave as they were is an error that says what to do.
    """
    from datasets import disable_progress_bars

    from ..training.data import tokenize_example
    from ..training.sources import load_examples

    disable_progress_bars()
    loaded = _load_tokenizer(tokenizer)
    rows = load_examples(source, split, name)
    if start >= len(rows):
        raise BadParameter(f"{source} has {len(rows)} examples; --start is {start}.")
    console = Console(highlight=False, soft_wrap=plain, no_color=plain or None)
    brackets = plain or console.no_color or console.color_system is None
    counts = []
    for i in range(start, min(start + n, len(rows))):
        row = rows[i]
        if chat_template_kwargs is not None:
            row["chat_template_kwargs"] = parse_json_object(chat_template_kwargs, "--chat-template-kwargs")
        try:
            ids, mask = tokenize_example(row, loaded)
        except ValueError as error:
            raise ValueError(f"Example {i}: {error}") from error
        cut = len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        counts.append((len(ids), sum(mask)))
        _print(console, _title(i, ids, mask, cut, row), marked_text(ids, mask, loaded, brackets), plain)
    tokens, supervised = map(sum, zip(*counts))
    console.print(f"{supervised} of {tokens} tokens supervised; {len(counts)} of {len(rows)} examples shown.")
    if not supervised:
        raise ValueError(
            "Nothing of what was shown is supervised: check that there are assistant turns or completions."
        )


def _load_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    from ..hub.pairs import load_tokenizer, target_folder

    return load_tokenizer(target_folder(name))


def _title(i: int, ids: list[int], mask: list[int], cut: bool, row: dict[str, Any]) -> str:
    parts = [f"example {i}", f"{len(ids)} tokens{' (cut)' if cut else ''}", f"{sum(mask)} supervised"]
    return ", ".join(parts + ["cut off at the length limit"] * (row.get("finished") is False))


def _print(console: Console, title: str, text: Text, plain: bool) -> None:
    if plain:
        console.print(Text(f"--- {title}"))
        console.print(text)
    else:
        console.print(Panel(text, title=Text(title), title_align="left", border_style="dim"))


def marked_text(ids: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase, brackets: bool) -> Text:
    """The tokens as text, special ones included, with the supervised ones marked."""
    from .display import MarkedText

    text, marked, shown = Text(), MarkedText(brackets), 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and mask[end] == mask[end - 1]:
            continue
        # Decoded from the start: some tokenizers drop a space at the beginning of what they are given.
        decoded = tokenizer.decode(ids[:end])
        for piece, style in marked.push(harmless(decoded[shown:]), bool(mask[end - 1])):
            text.append(piece, style)
        shown = len(decoded)
    for piece, style in marked.close():
        text.append(piece, style)
    return text


def harmless(text: str) -> str:
    """The text with everything spelled out that a terminal would obey instead of showing it."""
    return "".join(c if c in "\n\u200c\u200d" or c.isprintable() else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    if character == "\t":
        return "    "
    if unicodedata.category(character) == "Zs":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
