"""`Drafter`: the promises that every drafter keeps towards decoding, training and checkpoints."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput, logging

from .backbones import build_layers, family_of
from .configuration_drafter import DrafterConfig
from .loading import default_generation_config, load_generation_config, refuse_incomplete
from .vocabulary import check_vocabulary


logger = logging.get_logger(__name__)

# Where configs keep the cap of the LM head's logits, if they have one.
SOFTCAPPING = "final_logit_softcapping"
# scores over the target's vocabulary [R, V], tokens drafted before this slot [R, k] -> tokens [R], distribution [R, V]
Draw = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class DraftCache(DynamicCache):
    """
    What a drafter remembers of a sequence between rounds. The caller owns it; the drafter itself has no state.

    Attributes:
        carried (`torch.Tensor` of shape `(rows, hidden_size)`, *optional*):
            Hidden state behind the newest committed position, for drafters that draft on from it (EAGLE-3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.carried: torch.Tensor | None = None


@dataclass
class Proposal:
    """
    A drafted block.

    Args:
        tokens (`torch.LongTensor` of shape `(rows, drafts)`): The drafted tokens, as target ids.
        probabilities (`torch.FloatTensor` of shape `(rows, drafts, vocab_size)`, *optional*):
            The distributions that the tokens were drawn from; `None` when they are the most likely ones.
        confidences (`torch.FloatTensor` of shape `(rows, drafts)`, *optional*):
            Predicted probability that a token is accepted, given that those before it were.
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


@dataclass
class TargetParts:
    """What a drafter uses of its target, by reference; of the head, a reduced vocabulary's rows are copied once."""

    embedding: nn.Module
    head: nn.Module
    softcapping: float | None = None
    draft_head: torch.Tensor | None = None

    def serves(self, head: nn.Module, drafter: "Drafter") -> bool:
        """Whether these are a target's parts, in the drafter's place and type as it is now."""
        rows = self.draft_head
        return self.head is head and (rows is None or (rows.device == drafter.device and rows.dtype == drafter.dtype))


class Drafter(PreTrainedModel):
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
        self._drop_equal("embed_tokens", embedding.weight)
        self._drop_equal("lm_head", head.weight if not self.config.draft_vocab_size else head.weight[self.draft_ids])
        parts = TargetParts(embedding, head, getattr(target.config.get_text_config(), SOFTCAPPING, None))
        if self.lm_head is None and self.config.draft_vocab_size:
            parts.draft_head = head.weight.detach()[self.draft_ids.to(head.weight.device)].to(self.device, self.dtype)
        object.__setattr__(self, "_target", parts)
        return self

    @property
    def is_attached(self) -> bool:
        return self._target is not None

    def _drop_equal(self, name: str, weight: torch.Tensor) -> None:
        own = getattr(self, name)
        if own is None or own.weight.shape != weight.shape:
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
        return embedding(token_ids.to(embedding.weight.device)).to(self.device, self.dtype)

    def head_weight(self) -> torch.Tensor:
        """The LM head over the draft vocabulary, `[output_size, hidden_size]`."""
        if self.lm_head is not None:
            return self.lm_head.weight
        parts = self._require_target("LM head")
        return parts.head.weight.detach() if parts.draft_head is None else parts.draft_head

    def teacher_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits `[n, vocab_size]` for its last hidden states `[n, hidden_size]` (after its norm)."""
        if self._target is not None:
            weight, softcapping = self._target.head.weight.detach(), self._target.softcapping
        else:
            weight = self.lm_head.weight.detach() if self.lm_head is not None else None
            softcapping = self.softcapping
        if weight is None or weight.shape[0] != self.config.vocab_size:
            self._require_target("teacher's LM head")
        return soft_cap(F.linear(hidden.to(weight.device, weight.dtype), weight), softcapping).to(self.device)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """LM head on hidden states `[..., hidden_size]`: float32 logits over the draft vocabulary."""
        weight = self.head_weight()
        return self.soft_cap(F.linear(hidden.to(weight.device, weight.dtype), weight).to(self.device).float())

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

    def new_cache(self) -> DraftCache:
        """A fresh cache for `extend` and `propose`."""
        return DraftCache()

    @property
    def num_drafts(self) -> int:
        """Most tokens that a round can propose."""
        return self.config.num_drafts

    def extend(self, cache: DraftCache, features: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """
        Takes in newly committed positions; the cache grows by exactly those.

        Args:
            cache (`DraftCache`): The sequence's cache.
            features (`torch.Tensor` of shape `(rows, n, layers * target_hidden_size)`):
                The target's features of the `n` positions, concatenated in the order of `config.target_layer_ids`.
            next_tokens (`torch.LongTensor` of shape `(rows, n)`):
                For each position the token after it; the last is the anchor.
        """
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

    # ------------------------------------------------------------------ making, loading, saving

    @classmethod
    def from_target(cls, target: PreTrainedModel | str, tokenizer: Any = None, **overrides: Any) -> "Drafter":
        """
        A fresh drafter for a target, with the paper's settings scaled to it.

        Args:
            target (`PreTrainedModel` or `str`): The target, or its Hub id or folder.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Lets an unused or reserved token be found for the masked slots of a block (DFlash, DSpark).
            **overrides: Fields of the config that differ from the default, and

                - `num_hidden_layers` (`int`): depth of the draft, 5 for DFlash and DSpark and 1 for EAGLE-3, or
                  less on small targets;
                - `token_counts` (`torch.Tensor` of shape `(vocab_size,)`): needed with `draft_vocab_size`;
                - `init_from_target` (`bool`, defaults to `True`): begin as the target's own last layers where the
                  shapes allow, with `fc` passing on the deepest feature. It learns much faster from there.

        Returns:
            `Drafter`: attached to the target, with float32 parameters.

        Example:

        ```python
        >>> from hf_dspark import DSparkDrafter

        >>> drafter = DSparkDrafter.from_target(target, mask_token_id=3, num_hidden_layers=2)  # doctest: +SKIP
        >>> drafter.save_pretrained("my-drafter")  # doctest: +SKIP
        ```
        """
        from .fresh import fresh_drafter

        if isinstance(target, str | os.PathLike):
            target = AutoModelForCausalLM.from_pretrained(target)
        return fresh_drafter(cls, target, tokenizer, **overrides)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> "Drafter":
        """
        Loads a drafter from a folder or Hub id, in our format or another project's that we know.

        Args:
            pretrained_model_name_or_path (`str`): Folder or Hub id.
            *args, **kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            ValueError: If weights are missing or unknown, or the checkpoint is of another kind of drafter.
            OSError: If there are no weights.
        """
        from ..checkpoints import naming, read_checkpoint

        want_info = kwargs.pop("output_loading_info", False)
        # Refused below, by name.
        kwargs["ignore_mismatched_sizes"] = True
        foreign = None
        if pretrained_model_name_or_path is not None and kwargs.get("state_dict") is None:
            foreign = read_checkpoint(pretrained_model_name_or_path, cls, kwargs)
        if foreign is not None:
            config, state_dict = foreign
            kwargs.pop("config", None)
            model, info = super().from_pretrained(
                None, *args, config=config, state_dict=state_dict, output_loading_info=True, **kwargs
            )
            model.config.name_or_path = str(pretrained_model_name_or_path)
        else:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        refuse_incomplete(str(pretrained_model_name_or_path), info)
        with naming(pretrained_model_name_or_path, "weights"):
            model.check_weights()
        if pretrained_model_name_or_path is not None:
            model.generation_config = load_generation_config(pretrained_model_name_or_path, model.config, kwargs)
        return (model, info) if want_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves config, weights (without what is borrowed from the target) and decoding settings."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.generation_config.save_pretrained(save_directory)

    def export(self, folder: str | os.PathLike, format: str = "hf-dspark", force: bool = False) -> Path:
        """
        Writes the drafter in another project's format, reads it back and compares, and only then puts it in place.

        Args:
            folder (`str`): Where to.
            format (`str`, *optional*, defaults to `"hf-dspark"`):
                `"hf-dspark"`, `"deepspec"`, `"speculators"` (vLLM), `"sglang"` or `"zlab"`. Not every format can carry
                every drafter; those that store copies of the target's embedding or LM head need `attach(target)`.
            force (`bool`, *optional*, defaults to `False`): Whether a checkpoint that is there already is replaced.

        Returns:
            `Path`: the folder.

        Raises:
            FileExistsError: If the folder is not empty and not to be replaced.
            ValueError: If the format can't carry this drafter, naming why.

        Example:

        ```python
        >>> drafter.attach(target).export("my-drafter-vllm", format="speculators")  # doctest: +SKIP
        ```
        """
        from ..hub.export import export

        return export(self, folder, format, force)

    def check_weights(self) -> None:
        """
        Checks what the shapes of the weights can't tell.

        Raises:
            ValueError: If the map of the draft vocabulary is damaged.
        """
        if self.config.draft_vocab_size and self.d2t.device.type != "meta":
            check_vocabulary(self.d2t, self.t2d)


def soft_cap(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Bends logits so that none passes the cap, if there is one."""
    return torch.tanh(logits / cap) * cap if cap else logits


def check_belongs(config: DrafterConfig, target: PreTrainedModel) -> None:
    """
    Checks that a drafter and a target belong together, before any forward.

    Raises:
        TypeError: If the target is no causal language model.
        ValueError: Naming what differs.
    """
    if isinstance(target, Drafter):
        raise TypeError("The target is itself a drafter. Pass the full model as target, the drafter as assistant.")
    if getattr(target.config, "is_encoder_decoder", False) or target.get_output_embeddings() is None:
        raise TypeError(
            f"{type(target).__name__} is no decoder-only language model with an LM head; drafters need one."
        )
    text = target.config.get_text_config()
    for what, ours, theirs in (
        ("hidden size", config.target_hidden_size, text.hidden_size),
        ("vocabulary size", config.vocab_size or None, text.vocab_size),
        ("number of layers", config.num_target_layers, text.num_hidden_layers),
    ):
        if ours is not None and ours != theirs:
            made_for = f" (made for {config.target_name_or_path})" if config.target_name_or_path else ""
            raise ValueError(
                f"Drafter and target don't belong together: the drafter{made_for} expects a target with {what} "
                f"{ours}, this one has {theirs}. Use the target that the drafter was trained for."
            )
    # Borrowed embeddings enter the draft directly.
    if config.hidden_size != text.hidden_size and not (config.own_embedding and config.own_head):
        raise ValueError(
            f"The drafter's hidden size {config.hidden_size} differs from the target's {text.hidden_size}, so it "
            "can't borrow the target's embedding and LM head, and it has none of its own."
        )


def warn_about_types(drafter: Drafter, target: PreTrainedModel) -> None:
    """Different types work, cast at the boundary; some are a bad idea."""
    if torch.float16 in (drafter.dtype, target.dtype):
        logger.warning_once(
            "float16 overflows on the hidden states of some targets, and then few drafts are accepted. bfloat16 or "
            "float32 are safer."
        )
    if drafter.dtype != target.dtype:
        logger.warning_once(
            f"The drafter is in {drafter.dtype}, its target in {target.dtype}; features are cast between them."
        )
