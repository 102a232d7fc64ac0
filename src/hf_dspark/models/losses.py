"""
Training losses over the supervised draft positions, chunk by chunk: the logits of a chunk exist only while its loss
and its gradients are computed, so that no tensor of the size `[positions, vocabulary]` ever does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class LossWeights:
    """Weights of the three terms of the block losses: cross-entropy, L1 distance, confidence."""

    cross_entropy: float = 1.0
    l1: float = 0.0
    confidence: float = 0.0

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the target's distributions."""
        return self.l1 > 0 or self.confidence > 0


class _ChunkedLoss(torch.autograd.Function):
    """
    Sums `chunk_loss` over chunks of rows and computes its gradients in the same pass. This is possible because the
    loss is a plain sum over rows: whatever scales it afterwards scales the stored gradients.
    """

    @staticmethod
    def forward(ctx, chunk_loss: Callable, chunk_size: int, num_row_inputs: int, *tensors):
        rows, shared = tensors[:num_row_inputs], tensors[num_row_inputs:]
        needed = [t is not None and t.requires_grad for t in tensors]
        grads = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needed)]
        shared = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in shared]
        terms = None
        for start in range(0, rows[0].shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            chunk = [None if t is None else t[part].detach().requires_grad_(t.requires_grad) for t in rows]
            inputs = [*chunk, *shared]
            with torch.set_grad_enabled(any(needed)):
                total, chunk_terms = chunk_loss(part, *inputs)
            if any(needed):
                wanted = [t for t, need in zip(inputs, needed) if need]
                found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
                for i, need in enumerate(needed):
                    gradient = next(found) if need else None
                    if gradient is not None:
                        (grads[i][part] if i < num_row_inputs else grads[i]).add_(gradient)
            chunk_terms = torch.stack([total.detach(), *(t.detach() for t in chunk_terms)])
            terms = chunk_terms if terms is None else terms + chunk_terms
        ctx.save_for_backward(*(g for g in grads if g is not None))
        ctx.present = [g is not None for g in grads]
        ctx.mark_non_differentiable(terms)
        return terms[0].clone(), terms

    @staticmethod
    def backward(ctx, grad_total, _):
        saved = iter(ctx.saved_tensors)
        return None, None, None, *(next(saved) * grad_total if present else None for present in ctx.present)


def chunked_loss(
    chunk_loss: Callable,
    rows: list[torch.Tensor | None],
    shared: list[torch.Tensor | None],
    chunk_size: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """
    Sum of a per-row loss, never holding more than `chunk_size` rows of logits.

    Args:
        chunk_loss (`Callable`):
            `chunk_loss(part, *rows_of_the_chunk, *shared) -> (total, terms)` for the slice `part` of the rows.
        rows (`list[torch.Tensor | None]`): Tensors with one entry per row; gradients flow to those that need them.
        shared (`list[torch.Tensor | None]`): Tensors that every chunk reads as a whole (weights).
        chunk_size (`int`): Rows at once.

    Returns:
        `tuple[torch.Tensor, list[torch.Tensor]]`: The total (differentiable) and the detached terms.
    """
    if not torch.is_grad_enabled():
        # Inside the function autograd is off in any case; it goes by what its inputs need.
        rows, shared = ([None if t is None else t.detach() for t in part] for part in (rows, shared))
    total, terms = _ChunkedLoss.apply(chunk_loss, chunk_size, len(rows), *rows, *shared)
    return total, list(terms[1:])


def teacher_probabilities(
    hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], draft_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    The target's distribution at some positions, seen through the draft vocabulary.

    Args:
        hidden (`torch.Tensor` of shape `(positions, hidden_size)`): The target's last hidden states, after its norm.
        head (`Callable`): The target's LM head.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*): Target ids that can be drafted.

    Returns:
        The probabilities `(positions, output_size)` and the mass outside the draft vocabulary `(positions,)`, which
        no draft can match (`None` for a full vocabulary).
    """
    probabilities = torch.softmax(head(hidden).float(), dim=-1)
    if draft_ids is None:
        return probabilities, None
    inside = probabilities[:, draft_ids]
    return inside, (1 - inside.sum(-1)).clamp_min(0)


def teacher_of_rows(
    last_hidden: torch.Tensor,
    states: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    draft_ids: torch.Tensor | None,
) -> Callable[[slice], tuple[torch.Tensor, torch.Tensor | None]]:
    """
    [`teacher_probabilities`] for a chunk of the supervised rows. Rows of one chunk often share a position of the
    target, which is computed once.

    Args:
        last_hidden (`torch.Tensor` of shape `(positions, hidden_size)`): The target's last hidden states.
        states (`torch.LongTensor` of shape `(rows,)`): For each row the position whose distribution it has to match.
        head, draft_ids: See [`teacher_probabilities`].
    """

    @torch.no_grad()
    def distributions(part: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        unique, place = torch.unique(states[part], return_inverse=True)
        inside, outside = teacher_probabilities(last_hidden[unique], head, draft_ids)
        return inside[place], None if outside is None else outside[place]

    return distributions


def block_loss_terms(
    logits: torch.Tensor,
    confidence: torch.Tensor | None,
    labels: torch.Tensor,
    weights: torch.Tensor,
    teacher: torch.Tensor | None,
    outside: torch.Tensor | None,
    mix: LossWeights,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """
    DSpark's loss (paper, training objective) over rows: weighted cross-entropy, L1 distance and confidence.

    Args:
        logits (`torch.FloatTensor` of shape `(rows, output_size)`): Draft logits, float32.
        confidence (`torch.FloatTensor` of shape `(rows,)`, *optional*): Confidence logits.
        labels (`torch.LongTensor` of shape `(rows,)`): Draft ids of the next tokens; `-1` outside the vocabulary,
            which carries no cross-entropy.
        weights (`torch.FloatTensor` of shape `(rows,)`): Weight of each row, normalised over the batch.
        teacher, outside: See [`teacher_probabilities`]; `None` if no term needs them.
        mix (`LossWeights`): Weights of the terms.

    Returns:
        The total and `[cross_entropy, l1, confidence, acceptance]`, each a weighted sum over rows.
    """
    zero = logits.new_zeros(())
    cross_entropy = l1 = confidence_loss = acceptance = zero
    if mix.cross_entropy:
        inside = labels >= 0
        per_row = F.cross_entropy(logits, labels.clamp_min(0), reduction="none")
        cross_entropy = (weights * torch.where(inside, per_row, 0.0)).sum()
    if teacher is not None:
        distance = (torch.softmax(logits, dim=-1) - teacher).abs().sum(-1)
        if outside is not None:
            distance = distance + outside
        l1 = (weights * distance).sum()
        # The label must not pull the backbone, or the confidence loss makes it spike.
        accepted = (1 - 0.5 * distance.detach()).clamp(0, 1)
        acceptance = (weights * accepted).sum()
        if confidence is not None:
            per_row = F.binary_cross_entropy_with_logits(confidence.float(), accepted, reduction="none")
            confidence_loss = (weights * per_row).sum()
    total = mix.cross_entropy * cross_entropy + mix.l1 * l1 + mix.confidence * confidence_loss
    return total, [cross_entropy, l1, confidence_loss, acceptance]


def soft_cross_entropy_rows(
    logits: torch.Tensor, teacher: torch.Tensor, outside: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    EAGLE-3's loss `(rows,)`: cross-entropy to the target's distribution; and the overlap of the two `(rows,)`,
    detached. Mass outside a reduced vocabulary has no logit and carries no loss.
    """
    log_probabilities = torch.log_softmax(logits, dim=-1)
    loss = -(teacher * log_probabilities).sum(-1)
    distance = (log_probabilities.detach().exp() - teacher).abs().sum(-1) + (0 if outside is None else outside)
    return loss, (1 - 0.5 * distance).clamp(0, 1)
