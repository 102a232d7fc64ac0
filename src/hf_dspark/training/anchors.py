"""Which positions of a sequence a drafter is trained to draft from."""

import zlib

import torch


def draw_anchors(input_ids: torch.Tensor, loss_mask: torch.Tensor, num_anchors: int, seed: int) -> torch.Tensor:
    """
    Draws anchors without replacement among the supervised positions whose next token is supervised too.

    The draw depends on the example and `seed` alone, so that splitting a batch into micro-batches or processes trains
    the same thing.

    Args:
        input_ids, loss_mask (`torch.Tensor` of shape `(length,)`): Tokens of one example; which are supervised.
        num_anchors (`int`): Anchors at most.
        seed (`int`): Seed of the run and epoch.

    Returns:
        `torch.LongTensor` of shape `(anchors,)`, ascending; empty if nothing qualifies.
    """
    supervised = loss_mask.bool()
    candidates = (supervised[:-1] & supervised[1:]).nonzero().squeeze(-1)
    if len(candidates) <= num_anchors:
        return candidates
    # The CPU's generator reads the lower 32 bits of its seed only: both must go into those.
    both = zlib.crc32(input_ids.to(torch.int64).numpy().tobytes(), zlib.crc32(str(seed).encode()))
    generator = torch.Generator().manual_seed(both)
    return candidates[torch.randperm(len(candidates), generator=generator)[:num_anchors]].sort().values
