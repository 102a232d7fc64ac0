"""Blocks: what each slot of a block must predict, and what a block may look at."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Window:
    """
    How far the slots of a block see in a sliding layer.

    Args:
        size (`int`): A slot sees positions less than `size` before and after its own.
        from_anchor (`bool`): Instead, all slots of a block see the `size` positions before its anchor, and each other.
        causal (`bool`): Inside its block a slot sees none of the later slots.
    """

    size: int
    from_anchor: bool = False
    causal: bool = False


def block_attention_mask(
    anchors: torch.Tensor, block_size: int, context_length: int, window: Window | None = None
) -> torch.Tensor:
    """
    Queries of a block see the context strictly before its anchor and their own block, as far as the window reaches;
    without one all of both, in both directions.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, blocks * block_size, context_length + blocks * block_size)`.
    """
    batch, blocks = anchors.shape
    positions = torch.arange(context_length, device=anchors.device)
    context = (positions < anchors[..., None])[:, :, None].expand(-1, -1, block_size, -1)
    inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if window is not None:
        last_unseen = block_positions(anchors, block_size) - window.size
        if window.from_anchor:
            last_unseen = (anchors - window.size - 1)[..., None].expand_as(last_unseen)
        else:
            inside = inside.triu(1 - window.size).tril(window.size - 1)
        context = context & (positions > last_unseen[..., None])
        inside = inside.tril() if window.causal else inside
    own = torch.block_diag(*[inside] * blocks).bool()
    return torch.cat([context.flatten(1, 2), own.expand(batch, -1, -1)], dim=-1)[:, None]


def block_decoding_mask(
    held: torch.Tensor, starts: torch.Tensor, block_size: int, window: Window | None, context_window: int | None
) -> torch.Tensor:
    """
    What `block_attention_mask` says, for one block a row behind a cache.

    Args:
        held (`torch.LongTensor` of shape `(rows or 1, slots)`):
            The position that each cache slot holds, the block's own included; negative or past the block for none.
        starts (`torch.LongTensor` of shape `(rows,)`): Positions of the anchors.
        block_size (`int`): Slots of a block.
        window (`Window`, *optional*): How far the layer sees; to the beginning by default.
        context_window (`int`, *optional*): How many positions before the anchor the drafter looks at, in any layer.

    Returns:
        `torch.BoolTensor` of shape `(rows, 1, block_size, slots)`.
    """
    starts = starts[:, None, None]
    queries, held = block_positions(starts[..., 0], block_size).transpose(1, 2), held[:, None]
    context, own = (held >= 0) & (held < starts), (held >= starts) & (held < starts + block_size)
    if context_window is not None:
        context = context & (held >= starts - context_window)
    if window is not None and window.from_anchor:
        context = context & (held >= starts - window.size)
    elif window is not None:
        context = context & (held > queries - window.size)
        own = own & ((held - queries).abs() < window.size)
    if window is not None and window.causal:
        own = own & (held <= queries)
    return (context | own)[:, None]
