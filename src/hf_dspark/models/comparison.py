"""Whether a checkpoint, read back, is the drafter that was written."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .attachment import TargetParts
from .configuration_drafter import LAYER_FIELDS


if TYPE_CHECKING:
    from .drafter import Drafter, Proposal


# Fields that change what is drafted; no drafter has all of them.
FIELDS = (
    "target_layer_ids",
    "target_hidden_size",
    "draft_vocab_size",
    "block_size",
    "num_drafts",
    "sample_from_anchor",
    "mask_token_id",
    "markov_head_type",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
)
WINDOW_FIELDS = ("window_from_anchor", "sliding_causal")
TRANSFORMER_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
    "hidden_activation",
    "attention_k_eq_v",
    *LAYER_FIELDS,
)
LENGTH = 12


def require_same(drafter: "Drafter", folder: str | os.PathLike) -> None:
    """
    Reads a checkpoint and compares it with the drafter that it was written from: the fields of the config that change
    what is drafted, all tensors, and the proposals on random features.

    Raises:
        ValueError: Naming what differs.
    """
    again = type(drafter).from_pretrained(folder)
    changed = [*_changed_fields(drafter.config, again.config), *_changed_tensors(drafter, again)]
    if changed:
        raise ValueError(f"The export, read back, is another drafter: {', '.join(changed)} changed. Nothing was kept.")
    if not _same_proposals(drafter, again):
        raise ValueError("The export, read back, proposes other tokens than the drafter. Nothing was kept.")


def _changed_fields(before: Any, after: Any) -> list[str]:
    names = [*FIELDS]
    if any(map(before.is_sliding, range(before.num_hidden_layers))):
        names += WINDOW_FIELDS
    changed = [name for name in names if _field(before, name) != _field(after, name)]
    texts = before.text_config, after.text_config
    return changed + [name for name in TRANSFORMER_FIELDS if _field(texts[0], name) != _field(texts[1], name)]


def _field(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if name == "rope_parameters":
        # Tables of several rotary types aside, the default is often left out.
        return {"rope_type": "default"} | dict(value or {})
    return value or None


def _changed_tensors(drafter: "Drafter", again: "Drafter") -> list[str]:
    """Tensors that differ; copies of the target's, which the drafter only borrows, may have been added."""
    before, after = drafter.state_dict(), again.state_dict()
    if drafter.is_attached:
        before.setdefault("embed_tokens.weight", drafter._target.embedding.weight.to(drafter.dtype))
        before.setdefault("lm_head.weight", drafter.head_weight().to(drafter.dtype))
        added = {"embed_tokens.weight", "lm_head.weight"} - after.keys()
        before = {key: tensor for key, tensor in before.items() if key not in added}
    changed = before.keys() ^ after.keys()
    return sorted(changed | {key for key in before.keys() & after.keys() if not _equal(before[key], after[key])})


def _equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.dtype == after.dtype and torch.equal(before.detach().to(after.device), after)


@torch.no_grad()
def _same_proposals(drafter: "Drafter", again: "Drafter") -> bool:
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    width = config.num_features * config.target_hidden_size
    features = torch.randn(1, LENGTH, width, generator=generator)
    tokens = torch.randint(_vocabulary(config), (1, LENGTH), generator=generator)
    parts = drafter._target or _stand_in(drafter)
    second = _propose(again.to(drafter.device), parts, features, tokens)
    # `drafter.to(torch.bfloat16)` rounds the rotary frequencies too; no checkpoint holds them, the config gives them.
    rotary, drafter.rotary_emb = drafter.rotary_emb, again.rotary_emb
    try:
        first = _propose(drafter, parts, features, tokens)
    finally:
        drafter.rotary_emb = rotary
    if not torch.equal(first.tokens, second.tokens):
        return False
    return torch.allclose(first.confidences, second.confidences)


def _vocabulary(config: Any) -> int:
    # Some formats leave it to the target; then any will do that has the mask token.
    return config.vocab_size or config.mask_token_id + 1


def _propose(drafter: "Drafter", parts: TargetParts, features: torch.Tensor, tokens: torch.Tensor) -> "Proposal":
    """A proposal with these parts of a target, whatever the drafter is attached to."""
    attached, was_training = drafter._target, drafter.training
    object.__setattr__(drafter, "_target", parts)
    drafter.eval()
    try:
        cache = drafter.new_cache()
        tokens = tokens.to(drafter.device)
        drafter.extend(cache, features.to(drafter.device, drafter.dtype), tokens)
        return drafter.propose(cache, tokens[:, -1])
    finally:
        object.__setattr__(drafter, "_target", attached)
        drafter.train(was_training)


def _stand_in(drafter: "Drafter") -> TargetParts:
    """Random parts in the place of those that an unattached drafter borrows."""
    config, generator = drafter.config, torch.Generator().manual_seed(1)
    size = _vocabulary(config)

    def weight(rows: int) -> torch.Tensor:
        return torch.randn(rows, config.hidden_size, generator=generator).to(drafter.device, drafter.dtype)

    embedding = nn.Embedding.from_pretrained(weight(size if drafter.embed_tokens is None else 1))
    head = nn.Linear(1, 1, bias=False)
    head.weight.data = weight((config.output_size or size) if drafter.lm_head is None else 1)
    return TargetParts(embedding, head)
