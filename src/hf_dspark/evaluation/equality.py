"""Whether an output is that of plain decoding: exactly, or up to what bfloat16 can't tell apart."""

from collections.abc import Mapping, Sequence

import torch


EQUAL, TIE, DIFFERENT = "equal", "tie", "different"


def compare_outputs(
    plain: Sequence[int], other: Sequence[int], scores: Mapping[int, torch.Tensor] | None = None
) -> str:
    """
    Compares new tokens with those of plain greedy decoding. A first mismatch is a tie if plain decoding's own scores
    of the two tokens there differ by at most 2 units in the last place of bfloat16.

    Args:
        plain, other (`Sequence[int]`): New tokens of plain decoding and of the other way.
        scores (`Mapping[int, torch.Tensor]`, *optional*): Plain decoding's scores `(vocab_size,)` by position, where a
            tie is possible, see [`~hf_dspark.evaluation.decoding.plain_scores`]. Elsewhere only equal counts as equal.

    Returns:
        `str`: `"equal"`, `"tie"` or `"different"`.
    """
    position = first_mismatch(plain, other)
    if position is None:
        return EQUAL
    if scores is None or position not in scores or position >= min(len(plain), len(other)):
        return DIFFERENT
    two = scores[position][[plain[position], other[position]]].tolist()
    return TIE if within_two_units(*two) else DIFFERENT


def first_mismatch(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences part, the end of the shorter one included; `None` if they are equal."""
    for i, (a, b) in enumerate(zip(plain, other)):
        if a != b:
            return i
    return None if len(plain) == len(other) else min(len(plain), len(other))


def within_two_units(first: float, second: float) -> bool:
    """Whether two numbers differ by at most 2 units in the last place of bfloat16, which has 8 significant bits."""
    exponent = int(torch.frexp(torch.tensor(max(abs(first), abs(second)))).exponent)
    return abs(first - second) <= 2 * 2.0 ** (exponent - 8)
