"""EAGLE-3: an autoregressive drafter over the target's features (arXiv 2503.01840)."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ..backbones import attend, project_keys_values, project_queries
from ..dflash.modeling_dflash import stack_proposal
from ..drafter import DraftCache, Drafter, DrafterOutput, Draw, Proposal, largest_probability
from ..losses import chunked_loss, soft_cross_entropy_rows, teacher_of_rows
from ..rows import Layout
from .configuration_eagle3 import Eagle3Config


class Eagle3Drafter(Drafter):
    """
    Autoregressive drafter (EAGLE-3 paper). The feature of position `t` is paired with the embedding of token `t + 1`;
    the layer's output is fed back as the next position's feature, one token at a time.

    Args:
        config ([`Eagle3Config`]): The configuration. `text_config.num_hidden_layers` must be 1.
    """

    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        text = config.text_config
        if text.num_hidden_layers != 1:
            raise ValueError(f"EAGLE-3 drafters have one layer, this config has {text.num_hidden_layers}.")
        for layer in self.layers:
            layer.hidden_norm = self.family.norm(text.hidden_size, eps=text.rms_norm_eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(layer.self_attn, name)
                if narrow is None:  # values are the keys'
                    continue
                wide = nn.Linear(2 * text.hidden_size, narrow.out_features, bias=narrow.bias is not None)
                setattr(layer.self_attn, name, wide)
        self.fc_norm = self.input_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                self.family.norm(config.target_hidden_size, eps=text.rms_norm_eps) for _ in range(config.num_features)
            )
        if config.norm_before_fc:
            self.input_norm = self.family.norm(self.fc.in_features, eps=text.rms_norm_eps)
        self.post_init()

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        """Features `[R, n, layers * target_hidden_size]` -> `[R, n, hidden_size]`."""
        features = features.to(self.fc.weight.device, self.fc.weight.dtype)
        if self.fc_norm is not None:
            taps = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps)], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features)

    def _layer_input(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention reads, and the residual that its output is added to."""
        layer = self.layers[0]
        normed = layer.hidden_norm(hidden)
        joined = torch.cat([layer.input_layernorm(self.embed(tokens)), normed], dim=-1)
        return joined, normed if self.config.norm_before_residual else hidden

    def _recycled(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer's output `hidden` becomes as the next position's feature."""
        return self.norm(hidden) if self.config.norm_output else hidden

    # ------------------------------------------------------------------ decoding

    def _attend_last(
        self, cache: DraftCache, joined: torch.Tensor, residual: torch.Tensor, layout: Layout
    ) -> torch.Tensor:
        """
        The layer's output `[R, hidden_size]` at each row's last token, from the packed inputs of all tokens. Keys and
        values are functions of the inputs alone, so no other token's output is needed.
        """
        layer = self.layers[0]
        rotary = self.rotary_emb(joined, position_ids=layout.positions[None])
        keys, values = cache.update(*project_keys_values(layer.self_attn, joined, rotary, self.family), 0)
        if layout.longest > 1:
            last = layout.last_tokens()
            joined, residual = joined.index_select(1, last), residual.index_select(1, last)
            rotary = self.rotary_emb(joined, position_ids=layout.positions[None, last])
        queries = project_queries(layer.self_attn, joined, rotary, self.family)
        # The rows come one after another; attention wants them side by side.
        queries = queries[0].transpose(0, 1)[:, :, None]
        attended = attend(layer.self_attn, queries, keys, values, self._last_mask(cache, layout), self.family)
        return self.family.finish(layer, residual[0], attended[:, 0])

    def _last_mask(self, cache: DraftCache, layout: Layout) -> torch.Tensor | None:
        """Which slots a row's last token sees, `[R, 1, 1, slots]`; `None` if all."""
        stored, ends = cache.layers[0], [start + n for start, n in zip(layout.starts, layout.counts)]
        if stored.ring is None and len(set(ends)) == 1:
            return None
        held = layout.slot_positions(stored.num_slots(layout), stored.ring)
        ends = torch.tensor(ends, device=held.device)[:, None]
        seen = (held >= 0) & (held < ends)
        if stored.window is not None:
            seen = seen & (held >= ends - stored.window)
        return seen[:, None, None]

    def take_in(self, cache: DraftCache, features: torch.Tensor, next_tokens: torch.Tensor, layout: Layout) -> None:
        joined, residual = self._layer_input(next_tokens, self.project_features(features))
        cache.carried = self._attend_last(cache, joined, residual, layout)

    def propose(
        self, cache: DraftCache, anchors: torch.Tensor, num_drafts: int | None = None, draw: Draw | None = None
    ) -> Proposal:
        num_drafts = self.num_drafts if num_drafts is None else num_drafts
        tokens, probabilities, confidences, hidden = [], [], [], cache.carried
        for k in range(num_drafts):
            logits = self.base_logits(self.norm(hidden))
            confidences.append(largest_probability(logits))
            token, q = self.pick(logits, tokens, draw)
            tokens.append(token)
            probabilities.append(q)
            if k < num_drafts - 1:
                layout = cache.open([1] * len(token), self.device, ahead=k)
                joined, residual = self._layer_input(token[None], self._recycled(hidden)[None])
                hidden = self._attend_last(cache, joined, residual, layout)
        return stack_proposal(tokens, probabilities, torch.stack(confidences, dim=1))

    # ------------------------------------------------------------------ training

    def forward(
        self,
        input_ids: torch.LongTensor,
        target_features: torch.Tensor,
        target_last_hidden: torch.Tensor,
        loss_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        normalizer: torch.Tensor | float | None = None,
        chunk_size: int = 512,
    ) -> DrafterOutput:
        """
        Training forward: `config.num_drafts` unrolled steps, each fed with the one before (training-time test).

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Right-padded sequences.
            target_features (`torch.Tensor` of shape `(batch, length, layers * target_hidden_size)`): The frozen
                target's features.
            target_last_hidden (`torch.Tensor` of shape `(batch, length, target_hidden_size)`): Its last hidden
                states after the final norm.
            loss_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): Supervised tokens; all by default.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 on padding; none by default.
            normalizer (`torch.Tensor` or `float`, *optional*): What each step's summed loss is divided by; the number
                of positions of this batch, padding included, by default.
            chunk_size (`int`, *optional*, defaults to 512): Positions whose logits exist at once.

        Returns:
            `DrafterOutput`: `loss` and the terms `soft_cross_entropy`, `acceptance` (first step), `step_losses`.
        """
        loss_mask = torch.ones_like(input_ids) if loss_mask is None else loss_mask
        normalizer = input_ids.numel() if normalizer is None else normalizer
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # A row's last token has no successor, so the target says nothing about its continuation.
        first = loss_mask.bool() & shift_left(attention_mask, 1).bool()
        columns = self._supervised_columns(first)
        positions = (columns + first.shape[1] * torch.arange(first.shape[0], device=first.device)[:, None]).flatten()
        normed, places = [], []
        for k, hidden in enumerate(self.unroll(input_ids, target_features, columns)):
            rows = shift_left(first, k).gather(1, columns).flatten().nonzero().squeeze(-1)
            normed.append(self.norm(hidden.flatten(0, 1)[rows]))
            places.append(positions[rows])
        steps = torch.cat([torch.full_like(rows, k) for k, rows in enumerate(places)])
        if len(steps) == 0:
            # A zero that still reaches every parameter, as DDP expects.
            zero = torch.cat(normed).sum() * 0.0
            return DrafterOutput(loss=zero, terms=self._terms(zero.detach().expand(self.num_drafts + 2)))
        # Step `k` at a position predicts what the target does `1 + k` later: by that place, so that a chunk's rows
        # share their target's distributions.
        states = torch.cat(places) + 1 + steps
        states, order = torch.sort(states, stable=True)
        steps = steps[order]
        teacher = teacher_of_rows(target_last_hidden.flatten(0, 1), states, self.teacher_logits, self.draft_ids)
        decay = self.config.step_loss_decay ** torch.arange(self.num_drafts, device=steps.device)

        bias = self.head_bias()

        def chunk_loss(part, hidden, head):
            logits = self.soft_cap(
                F.linear(hidden, head.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)).float()
            )
            losses, acceptance = soft_cross_entropy_rows(logits, *teacher(part))
            step_losses = losses.new_zeros(self.num_drafts).index_add(0, steps[part], losses) / normalizer
            acceptance = (acceptance * (steps[part] == 0)).sum() / normalizer
            return (decay * step_losses).sum(), [acceptance, *step_losses]

        loss, terms = chunked_loss(chunk_loss, [torch.cat(normed)[order]], [self.head_weight()], chunk_size)
        return DrafterOutput(loss=loss, terms=self._terms(torch.stack([loss.detach(), *terms])))

    @staticmethod
    def _terms(values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"soft_cross_entropy": values[0], "acceptance": values[1], "step_losses": values[2:]}

    def _supervised_columns(self, first: torch.Tensor) -> torch.Tensor:
        """
        The positions that any step is supervised at, `(batch, most of a row)`, from those of the first step `(batch,
        length)`. Shorter rows are filled with others, which are supervised at no step.
        """
        needed = torch.stack([shift_left(first, k) for k in range(self.num_drafts)]).any(0)
        most = max(int(needed.sum(-1).max()), 1)
        return needed.int().argsort(dim=-1, descending=True, stable=True)[:, :most]

    def unroll(
        self, input_ids: torch.Tensor, target_features: torch.Tensor, columns: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """
        Yields the pre-norm hidden states `[batch, columns, hidden_size]` of every unrolled step, at some columns of
        each row (all by default). Of other columns the first step's keys and values are all that is needed.
        """
        attention, layer = self.layers[0].self_attn, self.layers[0]
        batch, length = input_ids.shape
        every = torch.arange(length, device=input_ids.device)
        columns = every.expand(batch, -1) if columns is None else columns
        seen = every <= columns[:, None, :, None]
        joined, residual = self._layer_input(shift_left(input_ids, 1), self.project_features(target_features))
        base = project_keys_values(attention, joined, self.rotary(0, length, joined), self.family)
        joined, residual = (x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1])) for x in (joined, residual))
        later = []
        for k in range(self.config.num_drafts):
            # Of all positions first: with some kinds of rotary embeddings the tables depend on the longest.
            rotary = tuple(table[0][columns] for table in self.rotary(k, length, joined))
            if k > 0:
                later.append(project_keys_values(attention, joined, rotary, self.family))
            queries = project_queries(attention, joined, rotary, self.family)
            attended = attention.o_proj(unrolled_attention(attention, queries, base, later, seen))
            hidden = self.family.finish(layer, residual, attended)
            yield hidden
            if k < self.config.num_drafts - 1:
                tokens = shift_left(input_ids, k + 2).gather(1, columns)
                joined, residual = self._layer_input(tokens, self._recycled(hidden))


def shift_left(x: torch.Tensor, places: int) -> torch.Tensor:
    """Moves `[batch, length, ...]` left by `places` along the length, filling with zeros."""
    return x if places == 0 else torch.cat([x[:, places:], torch.zeros_like(x[:, :places])], dim=1)


def unrolled_attention(
    attention: nn.Module,
    queries: torch.Tensor,
    base: tuple[torch.Tensor, torch.Tensor],
    later: list[tuple[torch.Tensor, torch.Tensor]],
    seen: torch.Tensor,
) -> torch.Tensor:
    """
    Attention of an unrolled step: a position sees the first step's keys up to itself (`seen`, `[batch, 1, columns,
    length]`), and of each later step only its own. Returns `[batch, columns, heads * head_dim]`.
    """
    groups = attention.num_key_value_groups
    spread = lambda x: x.repeat_interleave(groups, dim=1)  # noqa: E731
    scores = queries @ spread(base[0]).transpose(2, 3) * attention.scaling
    scores = scores.float().masked_fill(~seen, float("-inf"))
    own = [(queries * spread(keys)).sum(-1, keepdim=True).float() * attention.scaling for keys, _ in later]
    shares = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(queries.dtype)
    length = scores.shape[-1]
    output = shares[..., :length] @ spread(base[1])
    for j, (_, values) in enumerate(later):
        output = output + shares[..., length + j : length + j + 1] * spread(values)
    return output.transpose(1, 2).flatten(2)
