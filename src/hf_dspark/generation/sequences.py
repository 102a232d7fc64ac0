"""The rows of a call: their tokens, when they end, and what the caller wants to know of each token."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .verification import Decision


class Sequences:
    """
    The rows of a call. A place is a row's index among those that are still being written (`live`), which go through
    target and drafter in this order; a row is its index in the batch.

    Args:
        input_ids (`torch.LongTensor` of shape `(rows, length)`): The prompts, padding included.
        criteria (`StoppingCriteriaList`): What ends a row.
        config (`GenerationConfig`): The call's.
        streamer (`BaseStreamer`, *optional*): Receives the tokens of a single row.

    Attributes:
        live (`list[int]`): The rows still being written.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.criteria, self.config, self.streamer = criteria, config, streamer
        self.live = list(range(input_ids.shape[0]))
        self.prompt_length = input_ids.shape[1]
        self.tokens: list[list[int]] = [[] for _ in self.live]
        self.max_length = min(
            [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria],
            default=config.max_length,
        )
        self.eos = {
            int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()
        }
        # Length and EOS can be told from the numbers. Everything else looks at the text, token after token.
        self.is_watched = streamer is not None or any(
            type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria
        )
        pad = config._pad_token_tensor
        self.pad_token_id = 0 if pad is None else int(pad)
        self._ids = input_ids.to(torch.long, copy=True)
        self._make_room(self.prompt_length + 64)
        wants = bool(config.return_dict_in_generate)
        self.keeps_scores = wants and bool(config.output_scores)
        self.keeps_logits = wants and bool(config.output_logits)
        self.keeps_hidden = wants and bool(config.output_hidden_states)
        self._scores, self._logits, self._hidden = ([[] for _ in self.live] for _ in range(3))
        if streamer is not None:
            streamer.put(input_ids.cpu())

    # ------------------------------------------------------------------ what a round asks

    @property
    def is_done(self) -> bool:
        return not self.live

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def length(self, row: int) -> int:
        return self.prompt_length + len(self.tokens[row])

    def budgets(self) -> list[int]:
        """How many tokens each live row has room for."""
        return [self.max_length - self.length(row) for row in self.live]

    def anchor(self, place: int) -> int:
        """The last token of a live row."""
        return self.tokens[self.live[place]][-1]

    def prefix(self, place: int) -> torch.Tensor:
        """The text of a live row `(1, length)`, as plain decoding shows it: its padding included."""
        row = self.live[place]
        return self._ids[row : row + 1, : self.length(row)]

    def with_drafts(self, place: int, drafts: Sequence[int]) -> torch.Tensor:
        """The text of a live row with drafts behind it, `(1, length + drafts)`."""
        prefix = self.prefix(place)
        return torch.cat([prefix, prefix.new_tensor([drafts])], dim=1) if drafts else prefix

    # ------------------------------------------------------------------ committing

    def commit(
        self,
        place: int,
        decisions: Iterable[Decision],
        logits: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        drafts: tuple[int, int, bool] | None = None,
    ) -> tuple[list[int], int, bool]:
        """
        Appends the decided tokens one by one, until a criterion stops: everyone who watches (processors, criteria,
        streamer, scores) sees what plain decoding would have shown, in that order.

        Args:
            place (`int`): The live row.
            decisions (`Iterable[Decision]`): What was decided, from the first draft on.
            logits (`torch.FloatTensor` of shape `(n, vocab_size)`): The target's logits of the same positions.
            hidden (`Sequence[torch.Tensor]`): The target's hidden states of them, each `(1, n, hidden_size)`.
            drafts (`tuple[int, int, bool]`, *optional*): How many tokens were drafted, how many of them verified, and
                whether they were copied; `None` for the prefill's token.

        Returns:
            The appended tokens, how many of them were drafts, and whether the row has ended.
        """
        row = self.live[place]
        # Only a streamer that wants to know of a round before its tokens gets them when the round is over.
        waits = drafts is not None and hasattr(self.streamer, "on_round")
        start, num_accepted, appended, is_done = self.length(row), 0, [], False
        for k, decision in enumerate(decisions):
            self._record(row, k, decision, logits, hidden)
            appended.append(decision.token)
            self.tokens[row].append(decision.token)
            num_accepted += decision.is_draft
            if self.is_watched:
                self._write(row, start + k, [decision.token])
                is_done = bool(self.criteria(self.prefix(place), tuple(self._scores[row]) or None))
                if self.streamer is not None and not waits:
                    self._stream([decision.token])
            else:
                is_done = decision.token in self.eos or self.length(row) >= self.max_length
            if is_done:
                break
        if not self.is_watched:
            self._write(row, start, appended)
        if waits:
            num_drafted, num_verified, is_copy = drafts
            self.streamer.on_round(num_drafted, num_verified, num_accepted, is_copy)
            self._stream(appended)
        return appended, num_accepted, is_done

    def drop_row(self, place: int) -> None:
        """Takes a live row that has ended out; the last one takes its place."""
        self.live[place] = self.live[-1]
        self.live.pop()

    def _stream(self, tokens: list[int]) -> None:
        for token in tokens:
            self.streamer.put(torch.tensor([token]))

    def _record(
        self, row: int, k: int, decision: Decision, logits: torch.Tensor, hidden: Sequence[torch.Tensor]
    ) -> None:
        if self.keeps_scores:
            self._scores[row].append(decision.scores)
        if self.keeps_logits:
            self._logits[row].append(logits[k : k + 1].float())
        # The prefill's are those of the whole prompt, kept apart.
        if self.keeps_hidden and len(self.tokens[row]) > 0:
            self._hidden[row].append(tuple(layer[:, k : k + 1] for layer in hidden))

    def _write(self, row: int, start: int, tokens: list[int]) -> None:
        self._make_room(start + len(tokens))
        self._ids[row, start : start + len(tokens)] = torch.tensor(tokens, device=self._ids.device)

    def _make_room(self, length: int) -> None:
        rows, have = self._ids.shape
        if length > have:
            grown = self._ids.new_full((rows, max(length, have + have // 2)), self.pad_token_id)
            grown[:, :have] = self._ids
            self._ids = grown

    # ------------------------------------------------------------------ what `generate` returns

    def ids(self) -> torch.Tensor:
        """All rows `(rows, longest)`, shorter ones padded on the right."""
        return self._ids[:, : max(map(self.length, range(len(self.tokens))))].clone()

    def outputs(self, prompt_hidden: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        """The recorded scores, logits and hidden states, by token and with a row each; zeros where a row has ended."""
        outputs = {"scores": None, "logits": None, "hidden_states": None}
        if self.keeps_scores:
            outputs["scores"] = tuple(torch.cat(step) for step in _side_by_side(self._scores))
        if self.keeps_logits:
            outputs["logits"] = tuple(torch.cat(step) for step in _side_by_side(self._logits))
        if self.keeps_hidden:
            layers = (
                _side_by_side([[step[i] for step in row] for row in self._hidden]) for i in range(len(prompt_hidden))
            )
            steps = zip(*([torch.cat(step) for step in layer] for layer in layers))
            outputs["hidden_states"] = (prompt_hidden, *steps)
        return outputs


def _side_by_side(rows: Sequence[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Per step what every row has, or zeros."""
    longest = max(rows, key=len)
    return [[row[t] if t < len(row) else torch.zeros_like(longest[t]) for row in rows] for t in range(len(longest))]
