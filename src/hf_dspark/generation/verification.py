"""Which drafts are accepted, and the target's own token behind them."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as processors


@dataclass
class Decision:
    """
    What was decided about one position.

    Args:
        token (`int`): The token to commit.
        is_draft (`bool`): Whether it is an accepted draft rather than the target's own token.
        scores (`torch.FloatTensor` of shape `(1, vocab_size)`, *optional*): The processed scores behind it.
    """

    token: int
    is_draft: bool
    scores: torch.Tensor | None = None


def verify_rows(
    scores: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    probabilities: torch.Tensor | None,
    do_sample: bool,
    certain: Container[int] = (),
    keep_scores: bool = False,
) -> list[list[Decision]]:
    """
    Accepts drafts left to right, for all rows at once: speculative sampling (arXiv 2211.17192), or exact match when
    greedy.

    Args:
        scores (`torch.FloatTensor` of shape `(tokens, vocab_size)`):
            The target's processed scores, row after row: those of each draft, then those of the token behind them.
        drafts (`Sequence[Sequence[int]]`): The verified drafts of each row.
        probabilities (`torch.FloatTensor` of shape `(rows, drafts, vocab_size)`, *optional*):
            The distributions that the drafts were drawn from.
        do_sample (`bool`): Whether to sample.
        certain (`Container[int]`, *optional*): Rows whose drafts were not drawn, but had to be these.
        keep_scores (`bool`, *optional*, defaults to `False`): Whether decisions carry the scores behind them.

    Returns:
        `list[list[Decision]]`: per row its accepted drafts, then the target's own token.
    """
    chosen = _sample_rows(scores, drafts, probabilities, certain) if do_sample else _most_likely(scores, drafts)
    decisions, start = [], 0
    for row, (accepted, own) in zip(drafts, chosen):
        kept = scores[start : start + accepted + 1].split(1) if keep_scores else [None] * (accepted + 1)
        tokens = [*row[:accepted], own]
        decisions.append([Decision(token, k < accepted, kept[k]) for k, token in enumerate(tokens)])
        start += len(row) + 1
    return decisions


def _most_likely(scores: torch.Tensor, drafts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Per row how many drafts are accepted, and the token behind them."""
    best, start = scores.argmax(-1).tolist(), 0
    for row in drafts:
        accepted = 0
        while accepted < len(row) and row[accepted] == best[start + accepted]:
            accepted += 1
        yield accepted, best[start + accepted]
        start += len(row) + 1


def _sample_rows(
    scores: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    probabilities: torch.Tensor | None,
    certain: Container[int],
) -> list[tuple[int, int]]:
    p = torch.softmax(scores, dim=-1)
    # Place of every draft among the scores, its row, its slot and its token.
    flat, starts, start = [], [], 0
    for row, tokens in enumerate(drafts):
        starts.append(start)
        flat += [(start + k, row, k, token) for k, token in enumerate(tokens)]
        start += len(tokens) + 1
    hits: list[bool] = []
    if flat:
        place, row, slot, token = torch.tensor(flat, device=p.device).unbind(1)
        chance = torch.rand(len(flat), device=p.device)
        drawn = [i for i, (_, r, _, _) in enumerate(flat) if r not in certain]
        if drawn:
            chance[drawn] *= probabilities[row[drawn], slot[drawn], token[drawn]]
        hits = (chance < p[place, token]).tolist()
    accepted, first = [], 0
    for tokens in drafts:
        mine = [*hits[first : first + len(tokens)], False]
        accepted.append(mine.index(False))
        first += len(tokens)
    last = p[[start + n for start, n in zip(starts, accepted)]]
    rejected = [r for r, tokens in enumerate(drafts) if accepted[r] < len(tokens)]
    if rejected:
        rest = last.clone()
        if copied := [r for r in rejected if r in certain]:
            rest[copied, [drafts[r][accepted[r]] for r in copied]] = 0.0
        if drawn := [r for r in rejected if r not in certain]:
            rest[drawn] = (last[drawn] - probabilities[drawn, [accepted[r] for r in drawn]]).clamp_min(0)
        # Equal distributions can differ by rounding alone; then nothing is left, and p itself is right.
        last = torch.where(rest.sum(-1, keepdim=True) > 0, rest, last)
    return list(zip(accepted, torch.multinomial(last, 1)[:, 0].tolist()))


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
            The distributions that the drafts were drawn from; `None` if they were not drawn, but had to be these.
        do_sample (`bool`): Whether to sample.
    """
    length = candidates.shape[1] - num_drafts
    for k in range(num_drafts + 1):
        # A copy, because processors may write into it.
        processed = logits_processor(candidates[:, : length + k], logits[k : k + 1].clone())
        draft = candidates[0, length + k] if k < num_drafts else None
        if do_sample:
            q = None if draft is None or probabilities is None else probabilities[k]
            token, accepted = sample_token(torch.softmax(processed[0], dim=-1), draft, q)
        else:
            token = processed[0].argmax(-1)
            accepted = draft is not None and bool(token == draft)
        yield Decision(int(token), accepted, processed)
        if not accepted:
            return


def sample_token(p: torch.Tensor, draft: torch.Tensor | None, q: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """
    One position of speculative sampling: the draft with probability `min(1, p / q)`, else a draw from what `p` has
    more than `q`. Either way the token is distributed as `p`. Without `q`, the draft was certain.
    """
    if draft is None:
        return torch.multinomial(p, 1)[0], False
    if q is None:
        q = torch.zeros_like(p)
        q[draft] = 1.0
    if float(torch.rand((), device=p.device) * q[draft]) < float(p[draft]):
        return draft, True
    residual = (p - q).clamp_min(0)
    # Equal distributions can differ by rounding alone; then nothing is left, and p itself is right.
    return torch.multinomial(residual if float(residual.sum()) > 0 else p, 1)[0], False


# Processors that are functions of a row's scores alone, so that they may process any scores at once.
SCORE_PROCESSORS = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TopHLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
)
# Functions of prefix and scores alone, so that drafts may be drawn through them too. Others (those with a memory, and
# the user's own) shape the target's side only: acceptance falls, the output stays right.
PURE_PROCESSORS = (
    *SCORE_PROCESSORS,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
)
# What can be asked about one row at a time, whatever the other rows are.
ROW_PROCESSORS = (
    *PURE_PROCESSORS,
    processors.PrefixConstrainedLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.WatermarkLogitsProcessor,
)


def for_row(logits_processor: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors as one row meets them, when they are called with that row alone."""
    return LogitsProcessorList(_for_row(processor, row) for processor in logits_processor)


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Some count the rows that they are called with, or know the padding of each."""
    if type(processor) is processors.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return processors.PrefixConstrainedLogitsProcessor(lambda _, prefix: allowed(row, prefix), num_beams=1)
    padding = getattr(processor, "prompt_ignore_length", None)
    if type(processor) is processors.RepetitionPenaltyLogitsProcessor and isinstance(padding, torch.Tensor):
        return processors.RepetitionPenaltyLogitsProcessor(processor.penalty, padding[row : row + 1])
    return processor


class DraftDraw:
    """
    Draws drafts as the call draws tokens, see [`Drafter.pick`].

    Args:
        row_processors (`list[LogitsProcessorList]`): The call's processors, as each row meets them; the pure ones are
            used.
        do_sample (`bool`): Whether to sample.

    Attributes:
        prefixes (`list[torch.LongTensor]`): The committed tokens of every live row, each `(1, length)`; needed if
            `reads_prefix`.
        rows (`list[int]`): The live rows.
    """

    def __init__(self, row_processors: list[LogitsProcessorList], do_sample: bool) -> None:
        self.processors = [LogitsProcessorList(p for p in row if type(p) in PURE_PROCESSORS) for row in row_processors]
        self.reads_prefix = any(type(p) not in SCORE_PROCESSORS for p in self.processors[0])
        # Whether drawing differs from taking the most likely token.
        self.is_needed = do_sample or len(self.processors[0]) > 0
        self.do_sample = do_sample
        self.prefixes: list[torch.Tensor] = []
        self.rows: list[int] = []

    def _process(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        # A copy, because processors may write into it.
        scores = scores.clone()
        if not self.reads_prefix:
            return self.processors[0](drafted, scores)
        drafted = drafted.to(self.prefixes[0].device)
        processed = [
            self.processors[row](torch.cat([prefix, drafted[r : r + 1]], dim=1), scores[r : r + 1])
            for r, (row, prefix) in enumerate(zip(self.rows, self.prefixes))
        ]
        return torch.cat(processed)

    def __call__(self, scores: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        processed = self._process(scores, drafted).float()
        # A drafter in float16 may overflow; what it drafts then is poor, but there must be something to draw from.
        largest = torch.finfo(processed.dtype).max
        processed = processed.nan_to_num(nan=float("-inf"), posinf=largest, neginf=float("-inf"))
        # Where everything that can be drafted is ruled out, any draft will do: it will be rejected.
        possible = torch.isfinite(processed).any(-1, keepdim=True)
        processed = torch.where(possible, processed, torch.zeros_like(processed))
        if not self.do_sample:
            return processed.argmax(-1), None
        q = torch.softmax(processed, dim=-1)
        return torch.multinomial(q, 1)[:, 0], q
