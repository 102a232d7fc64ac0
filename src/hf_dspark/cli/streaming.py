"""A streamer that knows which tokens were accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers.generation.streamers import BaseStreamer


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Turns tokens into text one by one, at a cost that does not grow with the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # of the tokens last given out: a decoder may join a token to the one before it
        self._given = 0

    def push(self, token: int) -> str:
        """Take one token; return the text that is certain now (empty in the middle of a multi-byte character)."""
        self._ids.append(token)
        before, after = self._decode(self._start, self._given), self._decode(self._start, len(self._ids))
        if after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """Return what was held back: half a character where generation stopped in the middle of one."""
        before, after = self._decode(self._start, self._given), self._decode(self._start, len(self._ids))
        self._start = self._given = len(self._ids)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True)


class DraftStreamer(BaseStreamer):
    """
    Hands each piece of new text to `show(text, accepted)`, `accepted` telling whether it was a drafter's guess.

    Under plain decoding nothing is ever accepted. Under speculative decoding, `on_round` comes before the tokens of
    each round: its accepted guesses first, then one token of the target's own.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Turns the tokens into text.
        show (`Callable[[str, bool], None]`):
            Called with each piece of text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str, bool], None]):
        self._text = Detokenizer(tokenizer)
        self._show = show
        self._in_prompt = True
        self._accepted_left = 0

    def on_round(self, num_drafted: int, num_accepted: int) -> None:
        """Note how many of the next tokens are accepted drafts."""
        self._accepted_left = num_accepted

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (the first call, not shown) or newly decided tokens."""
        if self._in_prompt:
            self._in_prompt = False
            return
        for token in value.reshape(-1).tolist():
            accepted = self._accepted_left > 0
            self._accepted_left -= accepted
            if text := self._text.push(token):
                self._show(text, accepted)

    def end(self) -> None:
        """Show what was held back."""
        if text := self._text.flush():
            self._show(text, False)
