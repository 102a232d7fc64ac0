"""A reduced draft vocabulary: which target tokens a drafter can propose, and how ids translate."""

import torch


def draft_vocabulary(token_counts: torch.Tensor, draft_vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The most frequent tokens, as the map that checkpoints store.

    Args:
        token_counts (`torch.Tensor` of shape `(vocab_size,)`):
            How often each target token occurred in text like that to be drafted.
        draft_vocab_size (`int`):
            Number of tokens to keep. Ties go to the smaller id.

    Returns:
        `tuple[torch.LongTensor, torch.BoolTensor]`: `d2t` of shape `(draft_vocab_size,)`, the offset from a draft id
        to its target id, and `t2d` of shape `(vocab_size,)`, `True` for every target token that can be drafted.

    Raises:
        ValueError: If there are fewer tokens than `draft_vocab_size`.
    """
    counts = torch.as_tensor(token_counts)
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= len(counts):
        raise ValueError(f"`draft_vocab_size` {draft_vocab_size} must be between 1 and {len(counts)}, the vocabulary.")
    kept = torch.sort(counts, descending=True, stable=True).indices[:draft_vocab_size].sort().values
    t2d = torch.zeros(len(counts), dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(draft_vocab_size), t2d


def check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """
    Checks that a stored map is one: in range, without repetition, and the same in both directions.

    Raises:
        ValueError: Naming what is wrong.
    """
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= len(t2d):
        raise ValueError(
            f"`d2t` names target tokens outside 0..{len(t2d) - 1} (it must hold offsets: target id - draft id). "
            "The checkpoint is damaged or belongs to another target."
        )
    seen = torch.zeros_like(t2d)
    seen[ids] = True
    if int(seen.sum()) != len(d2t):
        raise ValueError("`d2t` maps two draft tokens to one target token. The checkpoint is damaged.")
    if not torch.equal(seen, t2d):
        raise ValueError("`d2t` and `t2d` disagree about which tokens can be drafted. The checkpoint is damaged.")
