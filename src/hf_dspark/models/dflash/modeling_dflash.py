"""DFlash: a drafter that proposes a whole block in one forward over the target's features (arXiv 2602.06036)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..backbones import attend, project_keys_values, project_queries
from ..blocks import block_attention_mask, block_decoding_mask, block_positions, block_supervision
from ..drafter import DraftCache, Drafter, DrafterOutput, Draw, Proposal, largest_probability
from ..losses import LossWeights, block_loss_terms, chunked_loss, teacher_of_rows
from ..rows import Layout
from .configuration_dflash import DFlashConfig


class DFlashDrafter(Drafter):
    """
    Block drafter (DFlash paper). The target's features, projected once, serve every draft layer as context keys and
    values; the block itself is the anchor followed by mask tokens, and its slots see the context and each other.

    Args:
        config ([`DFlashConfig`]): The configuration.

    Example:

    ```python
    >>> from hf_dspark import DFlashDrafter

    >>> drafter = DFlashDrafter.from_pretrained("my-dflash-drafter")  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    ```
    """

    config_class = DFlashConfig
    config: DFlashConfig
    default_loss = LossWeights(cross_entropy=1.0, l1=0.0, confidence=0.0)

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.hidden_norm = self.family.norm(config.hidden_size, eps=config.text_config.rms_norm_eps)
        self._build_heads(config)
        self.post_init()

    def _build_heads(self, config: DFlashConfig) -> None:
        self.markov_head: nn.Module | None = None
        self.confidence_head: nn.Module | None = None

    @property
    def _first_slot(self) -> int:
        """The first slot that proposes."""
        return 0 if self.config.sample_from_anchor else 1

    def project_context(self, features: torch.Tensor) -> torch.Tensor:
        """Features `[R, n, layers * target_hidden_size]` -> context `[R, n, hidden_size]`."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.device, self.fc.weight.dtype)))

    def block_input(self, anchor_tokens: torch.Tensor) -> torch.Tensor:
        """Embedded blocks `[..., block_size, hidden_size]` for anchor tokens `[...]`."""
        masks = torch.full_like(anchor_tokens, self.config.mask_token_id)[..., None]
        tokens = torch.cat([anchor_tokens[..., None], masks.expand(*masks.shape[:-1], self.config.block_size - 1)], -1)
        return self.embed(tokens)

    # ------------------------------------------------------------------ decoding

    def layer_window(self, layer: int, context_window: int | None) -> int | None:
        own = self.config.window(layer)
        sizes = [size for size in (context_window, own.size if own else None) if size is not None]
        return min(sizes, default=None)

    def take_in(
        self, cache: DraftCache, features: torch.Tensor, next_tokens: torch.Tensor | None, layout: Layout
    ) -> None:
        context = self.project_context(features)
        rotary = self.rotary_emb(context, position_ids=layout.positions[None])
        for layer, stored in zip(self.layers, cache.layers, strict=True):
            stored.write(*project_keys_values(layer.self_attn, context, rotary, self.family), layout)

    def block_hidden(self, cache: DraftCache, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states `[R, block_size, hidden_size]` (after the final norm) of a block behind the anchors `[R]`."""
        return self.denoise(cache, self.block_input(anchors))

    def denoise(self, cache: DraftCache, hidden: torch.Tensor) -> torch.Tensor:
        """As `block_hidden`, of an embedded block `[R, block_size, hidden_size]`."""
        rows, size = hidden.shape[:2]
        layout = cache.open([size] * rows, hidden.device)
        rotary = self.rotary_emb(hidden, position_ids=layout.positions.view(rows, size))
        for i, layer in enumerate(self.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            queries = project_queries(attention, normed, rotary, self.family)
            # The block's keys and values go where its tokens' will go once they are committed.
            keys, values = cache.update(*project_keys_values(attention, normed, rotary, self.family), i)
            mask = self._block_mask(cache, i, layout, keys.shape[2])
            attended = attend(attention, queries, keys, values, mask, self.family)
            hidden = self.family.finish(layer, hidden, attended)
        return self.norm(hidden)

    def _block_mask(self, cache: DraftCache, layer: int, layout: Layout, slots: int) -> torch.Tensor | None:
        """Which of a layer's slots, context and block, the block's slots see; `None` if all."""
        window, ring = self.config.window(layer), cache.layers[layer].ring
        if window is None and ring is None and len(set(layout.starts)) == 1:
            return None

        def make() -> torch.Tensor:
            held = layout.slot_positions(slots, ring)
            return block_decoding_mask(held, layout.start_of_rows, layout.longest, window, cache.context_window)

        return layout.keep(("block", slots, ring, window), make)

    def propose(
        self, cache: DraftCache, anchors: torch.Tensor, num_drafts: int | None = None, draw: Draw | None = None
    ) -> Proposal:
        num_drafts = self.num_drafts if num_drafts is None else num_drafts
        hidden = self.block_hidden(cache, anchors)[:, self._first_slot : self._first_slot + num_drafts]
        return self.draft_tokens(hidden, self.base_logits(hidden), anchors, draw)

    def draft_tokens(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, draw: Draw | None
    ) -> Proposal:
        """Tokens from the slots' hidden states `[R, n, hidden_size]` and logits `[R, n, output_size]`."""
        confidences = largest_probability(logits)
        if draw is None:
            return Proposal(self.to_target_ids(logits.argmax(-1)), confidences=confidences)
        tokens, probabilities = [], []
        for k in range(logits.shape[1]):
            token, q = self.pick(logits[:, k], tokens, draw)
            tokens.append(token)
            probabilities.append(q)
        return stack_proposal(tokens, probabilities, confidences)

    # ------------------------------------------------------------------ training

    def forward(
        self,
        input_ids: torch.LongTensor,
        target_features: torch.Tensor,
        target_last_hidden: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        anchors: torch.LongTensor | None = None,
        anchor_mask: torch.BoolTensor | None = None,
        loss_weights: LossWeights | None = None,
        loss_decay: float | None = 4.0,
        normalizer: torch.Tensor | float | None = None,
        chunk_size: int = 512,
    ) -> DrafterOutput:
        """
        Training forward: all blocks of all sequences at once (DSpark paper, training; DFlash paper, training).

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Right-padded sequences.
            target_features (`torch.Tensor` of shape `(batch, length, layers * target_hidden_size)`):
                The frozen target's features.
            target_last_hidden (`torch.Tensor` of shape `(batch, length, target_hidden_size)`, *optional*):
                Its last hidden states after the final norm; needed by the L1 and confidence terms.
            loss_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Supervised tokens; all by default.
            anchors (`torch.LongTensor` of shape `(batch, blocks)`): Anchor positions, see `training.anchors`.
            anchor_mask (`torch.BoolTensor` of shape `(batch, blocks)`, *optional*): Which anchors are real.
            loss_weights (`LossWeights`, *optional*): Mix of the terms; the paper's for this drafter by default.
            loss_decay (`float`, *optional*, defaults to 4.0): Decay of a draft's weight along its block, in tokens.
            normalizer (`torch.Tensor` or `float`, *optional*):
                What the summed loss is divided by: the weights of the global batch. This batch's by default.
            chunk_size (`int`, *optional*, defaults to 512): Draft positions whose logits exist at once.

        Returns:
            `DrafterOutput`: `loss` and the term `cross_entropy`; also `l1`, `confidence` and `acceptance` where the
                mix compares with the target.
        """
        mix = loss_weights or self.default_loss
        if mix.needs_teacher and target_last_hidden is None:
            raise ValueError("The L1 and confidence terms compare with the target: pass `target_last_hidden`.")
        loss_mask = torch.ones_like(input_ids) if loss_mask is None else loss_mask
        anchor_mask = torch.ones_like(anchors, dtype=torch.bool) if anchor_mask is None else anchor_mask
        positions, labels, weights = block_supervision(
            input_ids, loss_mask, anchors, anchor_mask, self.num_drafts, loss_decay
        )
        hidden = self.training_hidden(input_ids, target_features, anchors)[..., self._first_slot :, :]
        rows = weights.flatten().nonzero().squeeze(-1)
        names = ("cross_entropy", "l1", "confidence", "acceptance") if mix.needs_teacher else ("cross_entropy",)
        if len(rows) == 0:
            # A zero that still reaches every parameter, as DDP expects.
            zero = sum(parameter.sum() for parameter in self.parameters() if parameter.requires_grad) * 0.0
            return DrafterOutput(loss=zero, terms=dict.fromkeys(names, zero.detach()))
        previous = torch.cat([input_ids.gather(1, anchors)[..., None], labels[..., :-1]], dim=-1)
        latents, confidence = self.serial_terms(hidden, previous)
        draft_labels = self.to_draft_ids(labels.flatten()[rows])
        scaled = weights.flatten()[rows] / ((weights.sum() if normalizer is None else normalizer) + 1e-6)
        teacher = self._teacher(target_last_hidden, positions, rows) if mix.needs_teacher else None

        bias = self.head_bias()

        def chunk_loss(part, hidden, latents, confidence, head, markov):
            logits = self.soft_cap(
                F.linear(hidden, head.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)).float()
            )
            if latents is not None:
                logits = logits + F.linear(latents, markov).float()
            inside, outside = (None, None) if teacher is None else teacher(part)
            return block_loss_terms(logits, confidence, draft_labels[part], scaled[part], inside, outside, mix)

        per_row = [None if x is None else x.flatten(0, 2)[rows] for x in (hidden, latents, confidence)]
        shared = [self.head_weight(), None if self.markov_head is None else self.markov_head.markov_w2.weight]
        loss, terms = chunked_loss(chunk_loss, per_row, shared, chunk_size)
        return DrafterOutput(loss=loss, terms=dict(zip(names, terms)))

    def _teacher(self, last_hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> Callable:
        """The target's distributions behind the positions before the labels of the supervised rows."""
        sequence = torch.arange(last_hidden.shape[0], device=positions.device)[:, None, None] * last_hidden.shape[1]
        states = (sequence + (positions - 1).clamp_min(0)).flatten()[rows]
        return teacher_of_rows(last_hidden.flatten(0, 1), states, self.teacher_logits, self.draft_ids)

    def training_hidden(
        self, input_ids: torch.Tensor, target_features: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states `[batch, blocks, block_size, hidden_size]` of the blocks at the anchors `[batch, blocks]`."""
        context = self.project_context(target_features)
        batch, length = input_ids.shape
        blocks, size = anchors.shape[1], self.config.block_size
        hidden = self.block_input(input_ids.gather(1, anchors)).flatten(1, 2)
        context_rotary = self.rotary(0, length, context)
        block_rotary = self.rotary_emb(hidden, position_ids=block_positions(anchors, size).flatten(1))
        masks = {}
        for i, layer in enumerate(self.layers):
            window = self.config.window(i)
            if window not in masks:
                masks[window] = block_attention_mask(anchors, size, length, window)
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            queries = project_queries(attention, normed, block_rotary, self.family)
            keys, values = project_keys_values(attention, normed, block_rotary, self.family)
            context_keys, context_values = project_keys_values(attention, context, context_rotary, self.family)
            keys, values = torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
            attended = attend(attention, queries, keys, values, masks[window], self.family)
            hidden = self.family.finish(layer, hidden, attended)
        return self.norm(hidden).view(batch, blocks, size, -1)

    def serial_terms(
        self, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Of the slots' hidden states `[..., n, hidden_size]` and previous tokens `[..., n]` (teacher forced): the serial
        head's latents `[..., n, rank]` and the confidence logits `[..., n]`, where the drafter has them.
        """
        return None, None


def stack_proposal(
    tokens: list[torch.Tensor], probabilities: list[torch.Tensor | None], confidences: torch.Tensor
) -> Proposal:
    """A [`Proposal`] from the slots' tokens `[R]` and distributions `[R, V]`, and their confidences `[R, slots]`."""
    return Proposal(
        torch.stack(tokens, dim=1),
        None if probabilities[0] is None else torch.stack(probabilities, dim=1),
        confidences,
    )
