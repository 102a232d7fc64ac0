"""One way to decode one batch of conversations, timed and counted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation.cpu_linear import fast_linear_layers
from ..generation.statistics import Speculation, row_record
from .contenders import Contender, counted_forwards


@dataclass
class Decoded:
    """
    One batch.

    Args:
        new_ids (`list[list[int]]`): New tokens of each row, up to and with its end of text.
        seconds (`float`): Wall-clock time of the `generate` call.
        target_forwards (`int`): The target's forwards.
        speculation ([`Speculation`], *optional*): Statistics, where a drafter of ours drafted.
    """

    new_ids: list[list[int]]
    seconds: float
    target_forwards: int
    speculation: Speculation | None

    def record(self) -> dict[str, Any]:
        """What is logged of it; without the tokens."""
        record: dict[str, Any] = {"seconds": self.seconds, "target_forwards": self.target_forwards}
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
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=target.device)
    with counted_forwards(target) as forwards, fast_linear_layers(target if contender.fast_layers else None):
        start = _now(target.device)
        output = target.generate(
            input_ids=ids,
            attention_mask=mask,
            pad_token_id=pad_token_id,
            return_dict_in_generate=True,
            **settings,
            **contender.arguments,
        )
        seconds = _now(target.device) - start
    ends = end_tokens(target)
    new = [until_end(row, ends) for row in output.sequences[:, width:].tolist()]
    return Decoded(new, seconds, forwards[0], getattr(output, "speculation", None))


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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
