"""A streamer that knows where each token came from: a guess that was accepted, or the target's own choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from transformers.generation.streamers import BaseStreamer


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


Origin = Literal["accepted", "correction", "bonus", "plain"]


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
    Hands each piece of new text to `show(text, origin)`. The decoding loop calls `on_round` before the tokens of a
    round: its accepted drafts, then one token of the target's own (none where generation ends before it).

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Turns the tokens into text.
        show (`Callable[[str, str], None]`):
            Called with each piece of text and where its last token came from: `"accepted"`, a draft (or copy) that the
            target agreed with; `"correction"`, what the target put in place of a rejected draft; `"bonus"`, its token
            behind drafts that were all accepted; `"plain"`, a token decided without any draft, as in plain decoding.

    Example:

    ```python
    >>> from hf_dspark.generation.streaming import DraftStreamer

    >>> streamer = DraftStreamer(tokenizer, lambda text, origin: print(origin, repr(text)))  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter, streamer=streamer)  # doctest: +SKIP
    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str, Origin], None]):
        self._text = Detokenizer(tokenizer)
        self._show = show
        self._in_prompt = True
        self._accepted_left = 0
        self._own: Origin = "plain"

    def on_round(self, num_drafted: int, num_verified: int, num_accepted: int, is_copy: bool = False) -> None:
        """
        Note where the next tokens come from.

        Args:
            num_drafted (`int`): Drafts of the round.
            num_verified (`int`): How many of them the target checked.
            num_accepted (`int`): How many of those are among the next tokens.
            is_copy (`bool`, *optional*, defaults to `False`): Whether the drafts were copied from the text.
        """
        self._accepted_left = num_accepted
        self._own = "plain" if not num_verified else "bonus" if num_accepted == num_verified else "correction"

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (the first call, not shown) or newly decided tokens."""
        if self._in_prompt:
            self._in_prompt = False
            return
        for token in value.reshape(-1).tolist():
            origin = "accepted" if self._accepted_left else self._own
            self._accepted_left -= origin == "accepted"
            if text := self._text.push(token):
                self._show(text, origin)

    def end(self) -> None:
        """Show what was held back."""
        if text := self._text.flush():
            self._show(text, "plain")
