"""`Drafter`: the promises that every drafter keeps towards decoding, training and checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .adapters import Adapters
from .attachment import TargetParts, check_belongs, plain_weight, soft_cap, warn_about_types
from .backbones import build_layers, family_of
from .checkpointing import Checkpoints
from .configuration_drafter import DrafterConfig
from .loading import default_generation_config
from .rows import Layout, RowCache, RowLayer
from .vocabulary import check_vocabulary


# Where configs keep the cap of the LM head's logits, if they have one.
SOFTCAPPING = "final_logit_softcapping"
# scores over the target's vocabulary [R, V], tokens drafted before this slot [R, k] -> tokens [R], distribution [R, V]
Draw = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class DraftCache(RowCache):
    """
    What a drafter remembers of its rows between rounds. The caller owns it; the drafter itself has no state.

    Args:
        layers (`list[RowLayer]`): A layer for each of the draft's.
        context_window (`int`, *optional*): Positions before the anchor that the drafter looks at; all by default.

    Attributes:
        carried (`torch.Tensor` of shape `(rows, hidden_size)`, *optional*):
            Hidden state behind the newest committed position, for drafters that draft on from it (EAGLE-3).
    """

    def __init__(self, layers: list[RowLayer], context_window: int | None = None) -> None:
        super().__init__(layers)
        self.context_window = context_window
        self.carried: torch.Tensor | None = None

    def drop_row(self, row: int) -> None:
        super().drop_row(row)
        if self.carried is not None:
            self.carried[row] = self.carried[-1]
            self.carried = self.carried[:-1]

    @property
    def is_of_inference_mode(self) -> bool:
        """Whether it was filled in torch's inference mode, outside of which it can't be written."""
        return any(layer.is_initialized and layer.keys.is_inference() for layer in self.layers)

    @property
    def reach(self) -> int | None:
        """How many of its newest positions are ever looked at again, if there is a limit in every layer."""
        sizes = [layer.ring for layer in self.layers]
        return None if None in sizes else max(sizes)


@dataclass
class Proposal:
    """
    A drafted block.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, drafts)`): The drafted tokens, as target ids.
        probabilities (`torch.FloatTensor` of shape `(rows, drafts, vocab_size)`, *optional*):
            The distributions that the tokens were drawn from; `None` when they are the most likely ones.
        confidences (`torch.FloatTensor` of shape `(rows, drafts)`, *optional*):
            Predicted probability that a token is accepted, given that those before it were; from the confidence head,
            else [`largest_probability`]. It never depends on the token itself.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None
    confidences: torch.Tensor | None = None


@dataclass
class DrafterOutput(ModelOutput):
    """
    Output of a drafter's training forward.

    Args:
        loss (`torch.FloatTensor` of shape `()`): The training loss.
        terms (`dict[str, torch.Tensor]`): Its named terms, detached, and `acceptance`, the mean overlap of draft and
            target distributions.
    """

    loss: torch.FloatTensor | None = None
    terms: dict[str, torch.Tensor] | None = None


class Drafter(Adapters, Checkpoints, PreTrainedModel):
    """
    Base of [`DFlashDrafter`], [`DSparkDrafter`] and [`Eagle3Drafter`].

    A drafter keeps no state: the caller makes a [`DraftCache`] with `new_cache`, feeds it the target's features with
    `extend`, and asks for a block with `propose`. `forward` serves training. `attach` ties it to a target, whose
    embedding and LM head it then uses by reference: they are not among its own `parameters()`, and not saved.
    """

    config_class = DrafterConfig
    config: DrafterConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    # The format of the checkpoint that it was loaded from; `config.source_format` is where it first came from.
    stored_format = "hf-dspark"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        config.require_complete()
        text = config.text_config
        text._attn_implementation = config._attn_implementation
        self.family = family_of(text)
        features = config.num_features * config.target_hidden_size
        self.fc = nn.Linear(features, text.hidden_size, bias=False)
        self.layers = build_layers(text)
        self.norm = self.family.norm(text.hidden_size, eps=text.rms_norm_eps)
        self.rotary_emb = self.family.rotary(config=text)
        self.embed_tokens = self.family.embedding(text.vocab_size, text.hidden_size) if config.own_embedding else None
        self.lm_head = nn.Linear(text.hidden_size, config.output_size, bias=False) if config.own_head else None
        if config.draft_vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(text.vocab_size, dtype=torch.bool))
        self.generation_config = default_generation_config(config)
        # How it was trained, for its model card; `DraftTrainer` fills it in.
        self.training_record: dict[str, Any] | None = None
        # The same of each set of adapters on it, by name, and of what they sit on, under `None`.
        self.adapter_records: dict[str | None, dict[str, Any] | None] = {}
        # A plain attribute: nn.Module must not take the target's modules for the drafter's own.
        object.__setattr__(self, "_target", None)

    # ------------------------------------------------------------------ the target

    def attach(self, target: PreTrainedModel) -> "Drafter":
        """
        Ties the drafter to its target. Copies of the target's embedding and head in the checkpoint are dropped where
        equal to the target's (after casting to its dtype) and kept where not. `generate` and the trainer call it.

        Args:
            target (`PreTrainedModel`): A causal language model of transformers.

        Returns:
            `Drafter`: itself.

        Raises:
            ValueError: If the two don't belong together.
        """
        check_belongs(self.config, target)
        self.config.complete_from(target.config.get_text_config())
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if self._target is not None and self._target.serves(head, self):
            return self
        warn_about_types(self, target)
        self._drop_equal("embed_tokens", plain_weight(embedding))
        weight = plain_weight(head)
        if weight is not None and self.config.draft_vocab_size:
            weight = weight[self.draft_ids.to(weight.device)]
        self._drop_equal("lm_head", weight)
        softcapping = getattr(target.config.get_text_config(), SOFTCAPPING, None)
        parts = TargetParts(embedding, head, softcapping, device=target.device, dtype=target.dtype)
        if self.lm_head is None and self.config.draft_vocab_size:
            parts.draft_head = parts.head_of(self.draft_ids, self.device, self.dtype)
        object.__setattr__(self, "_target", parts)
        return self

    @property
    def is_attached(self) -> bool:
        return self._target is not None

    def _drop_equal(self, name: str, weight: torch.Tensor | None) -> None:
        own = getattr(self, name)
        if own is None or weight is None or own.weight.shape != weight.shape:
            return
        if torch.equal(own.weight.to(weight.device, weight.dtype), weight):
            setattr(self, name, None)
            setattr(self.config, "own_embedding" if name == "embed_tokens" else "own_head", False)

    def _require_target(self, part: str) -> TargetParts:
        if self._target is None:
            raise RuntimeError(
                f"This drafter borrows its {part} from its target and is not attached to one. Call "
                "`drafter.attach(target)`, or let `target.generate(..., assistant_model=drafter)` do it."
            )
        return self._target

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeds target ids of any shape, in the drafter's dtype and on its device."""
        embedding = self.embed_tokens or self._require_target("token embedding").embedding
        weight = plain_weight(embedding)
        token_ids = token_ids.to(self._target.device if weight is None else weight.device)
        # A norm that some targets put on their embedding is theirs alone: drafters embed without it, as transformers'
        # own DFlash does.
        plain = hasattr(embedding, "embed_norm")
        embedded = nn.Embedding.forward(embedding, token_ids) if plain else embedding(token_ids)
        return embedded.to(self.device, self.dtype)

    def head_weight(self) -> torch.Tensor:
        """The LM head over the draft vocabulary, `[output_size, hidden_size]`."""
        if self.lm_head is not None:
            return self.lm_head.weight
        parts = self._require_target("LM head")
        return parts.head_weight if parts.draft_head is None else parts.draft_head.weight

    def head_bias(self) -> torch.Tensor | None:
        """What the LM head adds to its logits, `[output_size]`, where the target's has a bias and is borrowed."""
        if self.lm_head is not None:
            return None
        bias = getattr(self.borrowed_head, "bias", None)
        return None if bias is None else bias.detach()

    @property
    def borrowed_head(self) -> nn.Module:
        """The target's LM head, or a copy of its rows for a reduced draft vocabulary."""
        parts = self._require_target("LM head")
        return parts.draft_head or parts.head

    def teacher_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits `[n, vocab_size]` for its last hidden states `[n, hidden_size]` (after its norm)."""
        bias = None
        if self._target is not None:
            weight, bias, softcapping = self._target.head_weight, self._target.head_bias, self._target.softcapping
        else:
            weight = self.lm_head.weight.detach() if self.lm_head is not None else None
            softcapping = self.softcapping
        if weight is None or weight.shape[0] != self.config.vocab_size:
            self._require_target("teacher's LM head")
        return soft_cap(F.linear(hidden.to(weight.device, weight.dtype), weight, bias), softcapping).to(self.device)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """LM head on hidden states `[..., hidden_size]`: float32 logits over the draft vocabulary."""
        head = self.lm_head or self.borrowed_head
        weight = plain_weight(head)
        # A quantised head can only be called, in the target's own type.
        place = (self._target.device, self._target.dtype) if weight is None else (weight.device, weight.dtype)
        return self.soft_cap(head(hidden.to(*place)).to(self.device).float())

    @property
    def softcapping(self) -> float | None:
        """What the head's logits are capped at, softly; `None` where the target has no such cap."""
        return getattr(self.config.text_config, SOFTCAPPING, None)

    def soft_cap(self, logits: torch.Tensor) -> torch.Tensor:
        """What the head's logits of any shape are as base logits."""
        return soft_cap(logits, self.softcapping)

    # ------------------------------------------------------------------ the draft vocabulary

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target id of every draft token `(draft_vocab_size,)`; `None` for a full vocabulary."""
        if not self.config.draft_vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target_ids(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Target ids of draft tokens of any shape."""
        return draft_tokens if not self.config.draft_vocab_size else draft_tokens + self.d2t[draft_tokens]

    def to_draft_ids(self, target_tokens: torch.Tensor) -> torch.Tensor:
        """Draft ids of target tokens of any shape; `-1` where a token can't be drafted."""
        if not self.config.draft_vocab_size:
            return target_tokens
        draft = torch.full_like(self.t2d, -1, dtype=torch.long)
        draft[self.draft_ids] = torch.arange(len(self.d2t), device=draft.device)
        return draft[target_tokens]

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., output_size]` over the target's vocabulary, `-inf` where nothing can be drafted."""
        if not self.config.draft_vocab_size:
            return logits
        scores = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        scores[..., self.draft_ids] = logits
        return scores

    def pick(
        self, logits: torch.Tensor, drafted: list[torch.Tensor], draw: Draw | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        One slot's token: the most likely one, or what `draw` makes of the scores.

        Args:
            logits (`torch.FloatTensor` of shape `(rows, output_size)`): The slot's logits.
            drafted (`list[torch.LongTensor]`): Tokens of the slots before, each of shape `(rows,)`.
            draw (`Callable`, *optional*): `draw(scores [R, V], drafted [R, k]) -> (tokens [R], distribution [R, V])`.

        Returns:
            Target ids `(rows,)` and the distribution they came from, if `draw` gave one.
        """
        if draw is None:
            return self.to_target_ids(logits.argmax(-1)), None
        before = torch.stack(drafted, dim=1) if drafted else logits.new_empty(logits.shape[0], 0, dtype=torch.long)
        return draw(self.spread(logits), before)

    # ------------------------------------------------------------------ decoding: what subclasses implement

    def new_cache(self, context_window: int | None = None) -> DraftCache:
        """
        A fresh cache for `extend` and `propose`.

        Args:
            context_window (`int`, *optional*):
                How many positions before the anchor the drafter looks at. Older ones leave the cache, so that a
                round's draft costs the same however long the sequence is. All positions by default.
        """
        windows = [self.layer_window(i, context_window) for i in range(self.config.num_hidden_layers)]
        # Room for what is written ahead of the newest committed position.
        ahead = self.num_drafts + 1
        layers = [RowLayer(None if window is None else window + ahead, window) for window in windows]
        return DraftCache(layers, context_window)

    def layer_window(self, layer: int, context_window: int | None) -> int | None:
        """How far back a layer looks; `None` for the whole sequence."""
        return context_window

    @property
    def num_drafts(self) -> int:
        """Most tokens that a round can propose."""
        return self.config.num_drafts

    def extend(
        self,
        cache: DraftCache,
        features: torch.Tensor,
        next_tokens: torch.Tensor | None,
        counts: list[int] | None = None,
    ) -> None:
        """
        Takes in newly committed positions; the cache grows by exactly those.

        Args:
            cache (`DraftCache`): The rows' cache.
            features (`torch.Tensor` of shape `(rows, n, layers * target_hidden_size)`):
                The target's features of the `n` positions, concatenated in the order of `config.target_layer_ids`.
                With `counts`, of shape `(1, sum(counts), ...)`: one row's positions after another's.
            next_tokens (`torch.LongTensor` of shape `(rows, n)` or `(1, sum(counts))`):
                For each position the token after it; a row's last is its anchor.
            counts (`list[int]`, *optional*): Positions of each row, at least one, if not the same for all.
        """
        if counts is None:
            counts = [features.shape[1]] * features.shape[0]
            features = features.flatten(0, 1)[None]
            next_tokens = None if next_tokens is None else next_tokens.flatten()[None]
        layout = cache.open(counts, self.device)
        # Positions that no layer will look at are not even projected.
        tail = None if cache.reach is None else layout.tail(cache.reach)
        if tail is not None:
            index, cache.layout = tail
            features = features.index_select(1, index.to(features.device))
            next_tokens = None if next_tokens is None else next_tokens.index_select(1, index.to(next_tokens.device))
        self.take_in(cache, features, next_tokens, cache.layout)
        cache.commit(counts)

    def take_in(self, cache: DraftCache, features: torch.Tensor, next_tokens: torch.Tensor, layout: Layout) -> None:
        """`extend` for packed features `[1, tokens, ...]` and tokens `[1, tokens]`, whose layout is open."""
        raise NotImplementedError

    def propose(
        self, cache: DraftCache, anchors: torch.Tensor, num_drafts: int | None = None, draw: Draw | None = None
    ) -> Proposal:
        """
        Drafts a block behind the anchors. The cache is as it was afterwards.

        Args:
            cache (`DraftCache`): Holds every position before the anchor.
            anchors (`torch.LongTensor` of shape `(rows,)`): The last committed tokens.
            num_drafts (`int`, *optional*): Tokens to draft; as many as the block has by default.
            draw (`Callable`, *optional*): See `pick`; greedy by default.

        Returns:
            `Proposal`: tokens, their distributions and confidences.
        """
        raise NotImplementedError

    def generate(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"A {type(self).__name__} only drafts: it can't generate alone. Call "
            "`target.generate(..., assistant_model=drafter)` on the model that it was trained for."
        )

    def rotary(self, start: int | torch.Tensor, length: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables of the positions `start .. start + length - 1`."""
        positions = torch.arange(length, device=like.device)[None] + start
        return self.rotary_emb(like, position_ids=positions)

    def check_weights(self) -> None:
        """
        Checks what the shapes of the weights can't tell.

        Raises:
            ValueError: If the map of the draft vocabulary is damaged.
        """
        if self.config.draft_vocab_size and self.d2t.device.type != "meta":
            check_vocabulary(self.d2t, self.t2d)


def largest_probability(logits: torch.Tensor) -> torch.Tensor:
    """
    The largest probability of each slot's draft distribution: what stands for a confidence in drafters that predict
    none. The drawn token's own probability would know what was drawn, and a schedule that listens to it would bias
    the output.

    Args:
        logits (`torch.FloatTensor` of shape `(..., output_size)`): The slots' logits.

    Returns:
        `torch.FloatTensor` of shape `(...)`.
    """
    return torch.exp(logits.amax(-1) - logits.logsumexp(-1))
