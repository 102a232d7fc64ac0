"""Training on blocks: what each slot of a block must predict, and what a block may look at."""

import torch


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sequence positions of the blocks' slots, `[B, N, block_size]`, for anchors `[B, N]`."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def block_supervision(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    anchors: torch.Tensor,
    anchor_mask: torch.Tensor,
    num_drafts: int,
    decay: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Labels and weights of the drafts of every block. A block's supervision stops at its first unsupervised token.

    Args:
        input_ids, loss_mask (`torch.Tensor` of shape `(batch, length)`): Tokens, and which are supervised.
        anchors (`torch.LongTensor` of shape `(batch, blocks)`): Positions of the anchors.
        anchor_mask (`torch.BoolTensor` of shape `(batch, blocks)`): Which anchors are real.
        num_drafts (`int`): Drafts per block.
        decay (`float`, *optional*): Weight of draft `k` (from 0) is `exp(-k / decay)`; equal weights if `None` or 0.

    Returns:
        `positions`, `labels` (both int64) and `weights` (float32), each `(batch, blocks, num_drafts)`. `positions` are
        those of the labels; weights are 0 where nothing is supervised and not normalised.
    """
    batch, length = input_ids.shape
    offsets = torch.arange(1, num_drafts + 1, device=anchors.device)
    positions = anchors[..., None] + offsets
    inside = positions < length
    positions = positions.clamp_max(length - 1)
    flat = positions.reshape(batch, -1)
    labels = input_ids.gather(1, flat).view_as(positions)
    supervised = loss_mask.bool().gather(1, flat).view_as(positions) & inside & anchor_mask[..., None]
    supervised = supervised.long().cumprod(-1).float()
    if decay:
        supervised = supervised * torch.exp(-(offsets - 1).float() / decay)
    return positions, labels, supervised


def block_attention_mask(anchors: torch.Tensor, block_size: int, context_length: int) -> torch.Tensor:
    """
    Queries of a block see the context strictly before its anchor, and their own block in both directions.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, blocks * block_size, context_length + blocks * block_size)`.
    """
    batch, blocks = anchors.shape
    context = torch.arange(context_length, device=anchors.device) < anchors[..., None]
    own = torch.eye(blocks, dtype=torch.bool, device=anchors.device).expand(batch, -1, -1)
    mask = torch.cat([context, own.repeat_interleave(block_size, dim=-1)], dim=-1)
    return mask.repeat_interleave(block_size, dim=1)[:, None]
