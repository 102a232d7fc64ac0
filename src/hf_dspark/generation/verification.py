"""Which drafts are accepted, and the target's own token behind them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors


@dataclass
class Decision:
    """
    What was decided about one position.

    Args:
        token (`torch.LongTensor` of shape `()`): The token to commit.
        is_draft (`bool`): Whether it is an accepted draft rather than the target's own token.
        scores (`torch.FloatTensor` of shape `(1, vocab_size)`, *optional*): The processed scores behind it.
    """

    token: torch.Tensor
    is_draft: bool
    scores: torch.Tensor | None = None


def verify_greedy(logits: torch.Tensor, drafts: torch.Tensor) -> Iterator[Decision]:
    """
    Accepts drafts while they are the target's most likely tokens.

    Args:
        logits (`torch.FloatTensor` of shape `(drafts + 1, vocab_size)`): The target's logits.
        drafts (`torch.LongTensor` of shape `(drafts,)`): Drafted tokens.
    """
    best = logits.argmax(-1)
    accepted = int((best[:-1] == drafts).long().cumprod(0).sum())
    for k in range(accepted + 1):
        yield Decision(best[k], k < accepted)


def verify_in_order(
    logits: torch.Tensor,
    candidates: torch.Tensor,
    num_drafts: int,
    logits_processor: LogitsProcessorList,
    probabilities: torch.Tensor | None,
    do_sample: bool,
) -> Iterator[Decision]:
    """
    Accepts drafts left to right (speculative sampling, arXiv 2211.17192; exact match when greedy), processing the
    logits of a position only once its decision is asked for. So every processor is called exactly as in plain
    decoding: once per committed token, with that token's own prefix, and never past a stop.

    Args:
        logits (`torch.FloatTensor` of shape `(drafts + 1, vocab_size)`): The target's logits.
        candidates (`torch.LongTensor` of shape `(1, length + drafts)`): Committed tokens, then the drafts.
        num_drafts (`int`): Drafts to verify.
        logits_processor (`LogitsProcessorList`): The call's processors.
        probabilities (`torch.FloatTensor` of shape `(drafts, vocab_size)`, *optional*):
            The distributions that the drafts were drawn from.
        do_sample (`bool`): Whether to sample.
    """
    length = candidates.shape[1] - num_drafts
    for k in range(num_drafts + 1):
        # A copy, because processors may write into it.
        processed = logits_processor(candidates[:, : length + k], logits[k : k + 1].clone())
        draft = candidates[0, length + k] if k < num_drafts else None
        if do_sample:
            q = probabilities[k] if draft is not None else None
            token, accepted = sample_token(torch.softmax(processed[0], dim=-1), draft, q)
        else:
            token = processed[0].argmax(-1)
            accepted = draft is not None and bool(token == draft)
        yield Decision(token, accepted, processed)
        if not accepted:
            return


def sample_token(p: torch.Tensor, draft: torch.Tensor | None, q: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """
    One position of speculative sampling: the draft with probability `min(1, p / q)`, else a draw from what `p` has
    more than `q`. Either way the token is distributed as `p`.
    """
    if draft is None:
        return torch.multinomial(p, 1)[0], False
    if float(torch.rand((), device=p.device) * q[draft]) < float(p[draft]):
        return draft, True
    residual = (p - q).clamp_min(0)
    # Equal distributions can differ by rounding alone; then nothing is left, and p itself is right.
    return torch.multinomial(residual if float(residual.sum()) > 0 else p, 1)[0], False


# Processors that are functions of prefix and scores alone, so that drafts may be drawn through them too. Others (those
# with a memory, and the user's own) shape the target's side only: acceptance falls, the output stays right.
PURE_PROCESSORS = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
)


class DraftDraw:
    """
    Draws drafts as the call draws tokens, see [`Drafter.pick`].

    Args:
        logits_processor (`LogitsProcessorList`): The call's processors; the pure ones are used.
        do_sample (`bool`): Whether to sample.

    Attributes:
        prefix (`torch.LongTensor` of shape `(1, length)`): The committed tokens.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool) -> None:
        self.processors = LogitsProcessorList(p for p in logits_processor if type(p) in PURE_PROCESSORS)
        self.do_sample = do_sample
        self.prefix: torch.Tensor | None = None

    @property
    def is_needed(self) -> bool:
        """Whether drawing differs from taking the most likely token."""
        return self.do_sample or len(self.processors) > 0

    def __call__(self, scores: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        prefix = torch.cat([self.prefix, drafted.to(self.prefix.device)], dim=1)
        processed = self.processors(prefix, scores.clone()).float()
        # A drafter in float16 may overflow; what it drafts then is poor, but there must be something to draw from.
        largest = torch.finfo(processed.dtype).max
        processed = processed.nan_to_num(nan=float("-inf"), posinf=largest, neginf=float("-inf"))
        if not bool(torch.isfinite(processed).any()):
            # Everything that can be drafted is ruled out; any draft will do, it will be rejected.
            processed = torch.zeros_like(processed)
        if not self.do_sample:
            return processed.argmax(-1), None
        q = torch.softmax(processed, dim=-1)
        return torch.multinomial(q, 1)[:, 0], q
