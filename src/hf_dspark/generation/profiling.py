"""Measures what decoding costs on this machine: the decoding loop itself, told how much to draft and verify."""

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import tqdm

from ..models.dflash.modeling_dflash import DFlashDrafter
from ..models.drafter import Drafter
from .decoding import decode
from .profile import ThroughputProfile, pair_conditions, profile_path
from .scheduling import Schedule
from .settings import DraftSettings


ROWS = (1, 2, 4, 8, 16, 32)
# Tokens of a row in a step, as far as the block goes; curves are interpolated between them.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Passes over all lengths that count, the first of them apart; at most, if there is time for so many.
FEWEST_PASSES, MOST_PASSES = 3, 15


def profile_throughput(
    target: PreTrainedModel,
    drafter: Drafter | None = None,
    rows: Sequence[int] = ROWS,
    context: int = 32,
    seconds: float = 5.0,
    progress: bool = True,
    store: bool = True,
) -> ThroughputProfile:
    """
    Measures the target's step by the tokens in it, and drafting by rows and drafts, and keeps the result in the user's
    cache, where `generate` finds it for `verification_schedule="throughput"` (DSpark paper, the curve `SPS(B)`).

    The decoding loop itself is timed, so tokens are laid out as in decoding and nothing is left out. Sizes take turns
    and medians count, for machines that are never quiet.

    Args:
        target (`PreTrainedModel`): The target, in the type and on the device that it will decode with.
        drafter ([`Drafter`], *optional*): Its drafter. Without it only the target's curve is measured, to look at.
        rows (`Sequence[int]`, *optional*, defaults to 1, 2, 4, 8, 16, 32): Numbers of rows; others are interpolated.
        context (`int`, *optional*, defaults to 32): Tokens of each row's prompt.
        seconds (`float`, *optional*, defaults to 5.0): How long each number of rows is measured, prompts apart; longer
            where three passes over all sizes take longer.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.
        store (`bool`, *optional*, defaults to `True`): Whether to keep the profile for `generate`.

    Returns:
        [`ThroughputProfile`]: seconds by rows, tokens and drafts.

    Raises:
        ValueError: If `rows` or `context` make no sense.

    Example:

    ```python
    >>> from hf_dspark import AutoDrafter, profile_throughput
    >>> from hf_dspark.hub import embedded_drafter, load_embedded_target

    >>> target, tokenizer = load_embedded_target("bfloat16")
    >>> drafter = AutoDrafter.from_pretrained(embedded_drafter(), dtype=target.dtype)
    >>> profile = profile_throughput(target, drafter, rows=(1, 2), seconds=1)
    >>> seconds_of_a_plain_step = profile.step_costs(rows=1, drafts=7)[0]
    ```
    """
    rows = sorted(set(rows))
    if not rows or rows[0] < 1 or context < 1:
        raise ValueError(f"`rows` and `context` must be positive, got {rows} and {context}.")
    if drafter is not None:
        drafter.attach(target)
    conditions = pair_conditions(target, drafter)
    stand_in = drafter or _stand_in(target)
    step_seconds, draft_seconds = {}, {}
    bar = tqdm(total=len(rows), desc="Profiling", unit="batch", disable=not progress)
    for number in rows:
        bar.set_postfix_str(f"{number} {'row' if number == 1 else 'rows'}")
        step_seconds[number], draft_seconds[number] = _measure(target, stand_in, number, context, seconds)
        bar.update()
    bar.close()
    profile = ThroughputProfile(step_seconds, draft_seconds if drafter is not None else {}, conditions)
    if store:
        profile.save(profile_path(conditions))
    return profile


def _stand_in(target: PreTrainedModel) -> Drafter:
    """The loop needs a drafter, and the target's steps don't care how good it is."""
    drafter = DFlashDrafter.from_target(target, mask_token_id=0, block_size=7, num_hidden_layers=1)
    return drafter.to(target.device, target.dtype).eval()


def _measure(
    target: PreTrainedModel, drafter: Drafter, rows: int, context: int, seconds: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Medians at one number of rows: of steps by tokens in all rows, and of drafting by drafts."""
    schedule = _Script(drafter.num_drafts, target.device, seconds)
    vocabulary = target.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (rows, context), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=(MOST_PASSES + 2) * sum(length + 1 for length in schedule.turns),
        # Nothing may end before the script does.
        eos_token_id=vocabulary,
        pad_token_id=0,
    )
    loop = functools.partial(decode, drafter=drafter, settings=DraftSettings(drafter.num_drafts, schedule))
    with contextlib.suppress(_EnoughSeenError):
        target.generate(
            prompts.to(target.device),
            attention_mask=torch.ones_like(prompts).to(target.device),
            generation_config=config,
            custom_generate=loop,
        )
    steps = {rows * (length + 1): statistics.median(times) for length, times in sorted(schedule.steps.items())}
    return steps, {number: statistics.median(times) for number, times in sorted(schedule.drafts.items())}


class _Script(Schedule):
    """Drafts and verifies each number of tokens in turn, and notes how long rounds take."""

    name = "script"

    def __init__(self, num_drafts: int, device: torch.device, seconds: float) -> None:
        super().__init__(DraftSettings(num_drafts))
        self.turns = sorted({length - 1 for length in LENGTHS if length <= num_drafts + 1} | {num_drafts})
        self.device, self.seconds = device, seconds
        self.steps: dict[int, list[float]] = defaultdict(list)
        self.drafts: dict[int, list[float]] = defaultdict(list)
        self.round, self.began = 0, time.perf_counter()
        self.start: float | None = None
        self.drafting = 0.0

    @property
    def turn(self) -> int:
        return self.turns[self.round % len(self.turns)]

    @property
    def passes(self) -> int:
        """Whole passes that count; the first one warms up."""
        return self.round // len(self.turns) - 1

    @property
    def is_done(self) -> bool:
        enough = self.passes >= FEWEST_PASSES and time.perf_counter() - self.began > self.seconds
        return enough or self.passes >= MOST_PASSES

    def num_drafts(self, rows: int) -> int:
        now = self._now()
        if self.start is not None:
            self._end_round(now)
        else:
            self.began = now
        if self.is_done:
            raise _EnoughSeenError
        self.start, self.drafting = now, 0.0
        return self.turn

    def lengths(self, confidences: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
        self.drafting = self._now() - self.start
        return torch.full((len(rows),), self.turn)

    def _end_round(self, now: float) -> None:
        if self.passes >= 0:
            self.steps[self.turn].append(now - self.start - self.drafting)
            if self.turn:
                self.drafts[self.turn].append(self.drafting)
        self.round += 1

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _EnoughSeenError(Exception):
    """Ends the generation when the script does."""
