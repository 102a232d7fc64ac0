"""One way to decode one batch of conversations, timed and counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..generation.cpu_linear import fast_linear_layers
from ..generation.statistics import Speculation, row_record
from ..machine import now
from .contenders import Contender, counted_forwards


@dataclass
class Decoded:
    """
    One batch.

    Args:
        new_ids (`list[list[int]]`): New tokens of each row, up to and with its end of text.
        seconds (`float`): Wall-clock time of the `generate` call.
        target_forwards (`int`): The target's forwards.
        prefill_seconds (`float`): What the first of them took, that over the prompts.
        speculation ([`Speculation`], *optional*): Statistics, where a drafter of ours drafted.
    """

    new_ids: list[list[int]]
    seconds: float
    target_forwards: int
    prefill_seconds: float
    speculation: Speculation | None

    def record(self) -> dict[str, Any]:
        """What is logged of it; without the tokens."""
        record: dict[str, Any] = {
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "target_forwards": self.target_forwards,
        }
        if stats := self.speculation:
            record |= {
                "draft_seconds": stats.draft_seconds,
                "target_seconds": stats.target_seconds,
                "total_seconds": stats.total_seconds,
            }
        return record | {"rows": [self._row(i) for i in range(len(self.new_ids))]}

    def _row(self, i: int) -> dict[str, Any]:
        row: dict[str, Any] = {"new_tokens": len(self.new_ids[i])}
        if self.speculation:
            row |= row_record(self.speculation, i)
        return row


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], enable_thinking: bool | None = None
) -> list[int]:
    """Ids of a conversation that the model is to answer; of its bare text where the tokenizer knows no chat."""
    if tokenizer.chat_template is None:
        return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True, **thinking)
    return list(encoded["input_ids"])


def decode(
    target: PreTrainedModel, contender: Contender, prompts: list[list[int]], pad_token_id: int, **settings: Any
) -> Decoded:
    """
    Decodes prompts as the rows of one batch.

    Args:
        target (`PreTrainedModel`): The target.
        contender ([`Contender`]): How.
        prompts (`list[list[int]]`): Ids of each row; shorter ones are padded on the left.
        pad_token_id (`int`): What with.
        **settings: Further arguments of `generate`.
    """
    inputs = _padded(prompts, pad_token_id, target.device)
    with counted_forwards(target) as forwards, fast_linear_layers(target if contender.fast_layers else None):
        start = now(target.device)
        output = target.generate(
            **inputs,
            pad_token_id=pad_token_id,
            return_dict_in_generate=True,
            **settings,
            **contender.arguments,
        )
        seconds = now(target.device) - start
    ends = end_tokens(target)
    new = [until_end(row, ends) for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist()]
    return Decoded(new, seconds, forwards.count, forwards.prefill_seconds, getattr(output, "speculation", None))


def plain_scores(
    target: PreTrainedModel,
    prompts: list[list[int]],
    pad_token_id: int,
    wanted: Iterable[tuple[int, int]],
    **settings: Any,
) -> dict[tuple[int, int], torch.Tensor]:
    """
    Scores that plain greedy decoding chose from. It is run again: another way to compute them, such as one forward
    over all tokens, rounds otherwise.

    Args:
        target, prompts, pad_token_id, **settings: As for [`decode`], of which it must be a repetition.
        wanted (`Iterable[tuple[int, int]]`): Rows and positions among their new tokens.

    Returns:
        `dict`: by row and position, the scores of shape `(vocab_size,)` in float32.
    """
    recorder = _Recorder(set(wanted))
    if recorder.wanted:
        settings["max_new_tokens"] = max(position for _, position in recorder.wanted) + 1
        inputs = _padded(prompts, pad_token_id, target.device)
        target.generate(**inputs, pad_token_id=pad_token_id, logits_processor=[recorder], **settings)
    return recorder.kept


class _Recorder(LogitsProcessor):
    """Keeps the scores of the wanted rows and steps."""

    def __init__(self, wanted: set[tuple[int, int]]) -> None:
        self.wanted, self.step = wanted, 0
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, step in self.wanted:
            if step == self.step:
                self.kept[row, step] = scores[row].float().cpu()
        self.step += 1
        return scores


def _padded(prompts: list[list[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts as the rows of one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = [[pad_token_id] * (width - len(row)) + row for row in prompts]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def end_tokens(target: PreTrainedModel) -> set[int]:
    """Tokens that end a text of the target's."""
    ends = target.generation_config.eos_token_id
    return set() if ends is None else set(ends if isinstance(ends, list | tuple) else [ends])


def until_end(ids: list[int], ends: set[int]) -> list[int]:
    """The ids up to and with the first that ends the text; what follows is padding."""
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids
