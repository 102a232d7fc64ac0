"""
The drafter's side of a round: it takes in the features of what was committed since its last draft, and drafts. What it
knew when a call ended is kept for a next call that goes on from the same cache.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import Cache, LogitsProcessorList

from ..models.drafter import Drafter, Proposal
from .features import Pending
from .sequences import Sequences
from .settings import DraftSettings
from .verification import DraftDraw


# Positions, over all rows, whose features may wait for the drafter while it pauses.
MOST_PENDING = 8192
# What a drafter knew when a call ended, by the target's cache that a next call may go on from.
_memories: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Drafting:
    """
    A drafter in one generation.

    Args:
        drafter ([`Drafter`]): The drafter.
        settings ([`DraftSettings`]): The call's settings.
        row_processors (`list[LogitsProcessorList]`): The call's processors, as each row meets them.
        do_sample (`bool`): Whether the call samples.
    """

    def __init__(
        self, drafter: Drafter, settings: DraftSettings, row_processors: list[LogitsProcessorList], do_sample: bool
    ) -> None:
        self.drafter, self.context_window = drafter, settings.context_window
        self.draw = DraftDraw(row_processors, do_sample)

    def start(self) -> None:
        """Begins with rows that nothing is known of."""
        self.cache, self.pending = self.drafter.new_cache(self.context_window), Pending()

    def add_prompts(
        self, features: torch.Tensor, prompts: torch.Tensor, real: torch.Tensor, sequences: Sequences
    ) -> None:
        """
        Lets the prompts of the live rows wait for the drafter, without their padding: it counts positions from a
        row's first token.

        Args:
            features (`torch.Tensor` of shape `(rows, length, width)`): The target's features of the prompts.
            prompts (`torch.LongTensor` of shape `(rows, length)`): Their tokens.
            real (`torch.BoolTensor` of shape `(rows, length)`): What is no padding.
            sequences ([`Sequences`]): The rows, each with its first anchor.
        """
        # A prompt of padding alone is better than none.
        real = (real | ~real.any(1, keepdim=True)).cpu()
        features = features.flatten(0, 1)[None] if bool(real.all()) else features[real.to(features.device)][None]
        tokens = {
            row: [*prompts[place].cpu()[real[place]][1:].tolist(), sequences.anchor(place)]
            for place, row in enumerate(sequences.live)
        }
        self.pending.add(features, tokens)

    def take_in(self, sequences: Sequences) -> None:
        """Lets the drafter take in all that waits: one round's positions, or those of a pause at once."""
        features, tokens, counts = self.pending.take(sequences.live)
        device = self.drafter.device
        self.drafter.extend(self.cache, features.to(device), tokens.to(device), counts)

    def propose(self, sequences: Sequences, num_drafts: int) -> Proposal | None:
        """Takes in what waits, and drafts behind every live row's anchor; `None` if no draft is wanted."""
        if num_drafts < 1:
            if len(self.pending) > MOST_PENDING:
                self.take_in(sequences)
            return None
        self.take_in(sequences)
        device, places = self.drafter.device, range(len(sequences.live))
        anchors = torch.tensor([sequences.anchor(place) for place in places], device=device)
        draw = None
        if self.draw.is_needed:
            draw = self.draw
            draw.rows = list(sequences.live)
            draw.prefixes = [sequences.prefix(place) for place in places] if draw.reads_prefix else []
        return self.drafter.propose(self.cache, anchors, num_drafts, draw)

    def drop_row(self, place: int) -> None:
        """Takes a finished row out; a single one stays, because a next call may go on from it."""
        # Before the first draft, only waiting features know of a row.
        if len(self.cache.lengths) > 1:
            self.cache.drop_row(place)

    # ------------------------------------------------------------------ from one call to the next

    def remember(self, cache: Cache) -> None:
        """Keeps what is known of a single row for as long as the target's cache of it lives."""
        _memories[cache] = (weakref.ref(self.drafter), self.cache, self.pending)

    def recall(self, cache: Cache) -> bool:
        """Goes on from what `remember` kept, if it is this drafter's and of as many positions as the cache holds."""
        owner, draft_cache, pending = _memories.pop(cache, (lambda: None, None, None))
        if owner() is not self.drafter or draft_cache.context_window != self.context_window:
            return False
        if draft_cache.get_seq_length() + len(pending) != int(cache.get_seq_length()):
            return False
        if draft_cache.is_of_inference_mode and not torch.is_inference_mode_enabled():
            return False  # its buffers can't be written here
        self.cache, self.pending = draft_cache, pending
        return True


@dataclass
class Drafted:
    """
    What a round sends through the target behind the anchors.

    Args:
        copies (`dict[int, list[int]]`): By place, what rows copied from their own text.
        proposal ([`Proposal`], *optional*): The drafter's, of all rows; those of the others are used.
        tokens (`list[list[int]]`): By place, what is verified.
        scheduled (`list[int]`): By place, how much the schedule chose; a row may have room for less.
        confidences (`torch.FloatTensor` of shape `(drafting rows, drafts)`, *optional*): The drafter's; on the CPU.
    """

    copies: dict[int, list[int]]
    proposal: Proposal | None = None
    tokens: list[list[int]] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    confidences: torch.Tensor | None = None

    def proposed(self, place: int) -> int:
        """How many tokens a row copied or the drafter drafted for it."""
        if place in self.copies:
            return len(self.copies[place])
        return 0 if self.proposal is None else self.proposal.tokens.shape[1]


def committed_places(
    rows: Sequence[int], verified: Sequence[int], committed: Sequence[list[int]], finished: Sequence[int]
) -> tuple[list[int], dict[int, list[int]]]:
    """
    Which tokens of a forward are now part of their rows: their places among all of it, and by row the tokens that
    follow them. Rows that have ended need none, except a single one, which a next call may go on from.
    """
    places: list[int] = []
    tokens: dict[int, list[int]] = {}
    start = 0
    for place, row in enumerate(rows):
        if place not in finished or len(rows) == 1:
            places += range(start, start + len(committed[place]))
            tokens[row] = committed[place]
        start += verified[place] + 1
    return places, tokens
