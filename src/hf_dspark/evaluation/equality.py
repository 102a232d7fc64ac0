"""Whether an output is that of plain decoding: exactly, or up to what bfloat16 can't tell apart."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


EQUAL, TIE, DIFFERENT = "equal", "tie", "different"


def compare_outputs(
    target: PreTrainedModel, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> str:
    """
    Compares new tokens with those of plain greedy decoding. With a target in a type of 16 bits, a first mismatch is a
    tie if the target's logits of the two tokens, behind the tokens that plain decoding gave so far, differ by at most
    2 units in the last place of bfloat16.

    Args:
        target (`PreTrainedModel`): The target.
        prompt_ids (`Sequence[int]`): The prompt, without padding.
        plain, other (`Sequence[int]`): New tokens of plain decoding and of the other way.

    Returns:
        `str`: `"equal"`, `"tie"` or `"different"`.
    """
    position = first_mismatch(plain, other)
    if position is None:
        return EQUAL
    is_exact = target.dtype == torch.float32 or position >= min(len(plain), len(other))
    if is_exact or not is_tie(target, [*prompt_ids, *plain[:position]], plain[position], other[position]):
        return DIFFERENT
    return TIE


def first_mismatch(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences part, the end of the shorter one included; `None` if they are equal."""
    for i, (a, b) in enumerate(zip(plain, other)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


@torch.no_grad()
def is_tie(target: PreTrainedModel, prefix: Sequence[int], first: int, second: int) -> bool:
    """Whether the logits of two tokens behind a prefix are within 2 units in the last place of bfloat16."""
    ids = torch.tensor([list(prefix)], device=target.device)
    logits = target(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
    return within_two_units(float(logits[first]), float(logits[second]))


def within_two_units(first: float, second: float) -> bool:
    """Whether two numbers differ by at most 2 units in the last place of bfloat16, which has 8 significant bits."""
    exponent = int(torch.frexp(torch.tensor(max(abs(first), abs(second)))).exponent)
    return abs(first - second) <= 2 * 2.0 ** (exponent - 8)
