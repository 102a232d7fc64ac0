"""
The decoding loop. A round, a file a stage: a row copies from its own text (`lookup.py`), or the drafter takes in new
features (`features.py`) and proposes (`drafting.py`), the schedule picks how much to verify (`scheduling.py`), the
target checks it in one forward (`target.py`), which accepts some (`verification.py`), those are committed to their
rows (`sequences.py`), and the caches forget the rest (`cache.py`).
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ..models.adapters import underlying_drafter
from ..models.drafter import Drafter
from .cache import can_be_ragged, prompt_mask
from .cpu_linear import fast_linear_layers
from .drafting import Drafted, Drafting, committed_places
from .features import concatenate_features, hidden_state_indices
from .lookup import Lookup
from .scheduling import make_schedule
from .sequences import Sequences
from .settings import (
    SETTING_NAMES,
    DraftSettings,
    effective,
    refuse_for_rows,
    refuse_unsupported,
    resolve_settings,
)
from .statistics import Speculation, SpeculativeOutput
from .target import Checked, Target, TargetOfRows
from .verification import SCORE_PROCESSORS, Decision, for_row, verify_in_order, verify_rows


# What `generate` writes into a config that says nothing; nobody's wish.
FILLED_IN = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}


def speculative_decoding(
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | list[str] | None = None,
    **settings: Any,
) -> Callable:
    """
    A decoding loop for `generate(custom_generate=...)`, for those who don't want `generate` hooked.

    transformers hands a custom loop neither streamer nor tokenizer, so they are given here.

    Args:
        drafter ([`Drafter`]): The drafter, or a `PeftModel` around one.
        streamer (`BaseStreamer`, *optional*): Receives the tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed by `stop_strings`.
        stop_strings (`str` or `list[str]`, *optional*): Strings that end the generation.
        **settings: `num_assistant_tokens`, `assistant_confidence_threshold`, `verification_schedule`,
            `confidence_temperatures`, `draft_context_window`, `prompt_lookup_num_tokens`; the drafter's own by
            default.

    Returns:
        `Callable`: for `custom_generate`.

    Raises:
        TypeError: If `drafter` is no drafter.
        ValueError: If a setting can't be honoured.

    Example:

    ```python
    >>> from hf_dspark import AutoDrafter, speculative_decoding

    >>> drafter = AutoDrafter.from_pretrained("my-drafter")  # doctest: +SKIP
    >>> target.generate(**inputs, custom_generate=speculative_decoding(drafter))  # doctest: +SKIP
    ```
    """
    given, drafter = drafter, underlying_drafter(drafter)
    if drafter is None:
        raise TypeError(f"`drafter` must be a drafter, not a {type(given).__name__}; load it with `AutoDrafter`.")
    unknown = set(settings) - set(SETTING_NAMES)
    if unknown:
        raise ValueError(f"Unknown settings {sorted(unknown)}; known are {', '.join(SETTING_NAMES)}.")
    criteria = [] if stop_strings is None else [_stop_string_criteria(stop_strings, tokenizer)]
    resolved = resolve_settings(drafter, settings, None)

    def loop(
        target: PreTrainedModel, *args: Any, generation_config: GenerationConfig, **kwargs: Any
    ) -> SpeculativeOutput | torch.Tensor:
        # What the call or its config says there would come to nothing.
        values = {name: getattr(generation_config, name, None) for name in SETTING_NAMES}
        # Nobody's wish: what transformers fills in, and what the target's own config says to every call.
        usual = {name: (FILLED_IN.get(name), getattr(target.generation_config, name, None)) for name in SETTING_NAMES}
        elsewhere = [name for name, value in values.items() if value not in (None, *usual[name])]
        if elsewhere:
            raise ValueError(f"Give {', '.join(f'`{name}`' for name in elsewhere)} to `speculative_decoding` itself.")
        return decode(
            target,
            *args,
            generation_config=generation_config,
            drafter=drafter,
            settings=resolved,
            streamer=streamer,
            extra_criteria=criteria,
            **kwargs,
        )

    loop.hf_dspark_drafter = drafter  # by which the hook in `generate` knows our loops
    return loop


def generate_with_drafter(original: Callable, target: PreTrainedModel, **arguments: Any) -> Any:
    """What `target.generate(..., assistant_model=drafter)` does: `original` with our loop as `custom_generate`."""
    drafter = arguments.pop("assistant_model")
    streamer, tokenizer = arguments.pop("streamer", None), arguments.pop("tokenizer", None)
    for name in ("custom_generate", "use_mtp", "synced_gpus"):
        if arguments.pop(name, None):
            raise ValueError(f"Decoding with a drafter does not support `{name}`. Leave it out.")
    _check_tokenizer(arguments.pop("assistant_tokenizer", None), tokenizer)
    config = arguments.get("generation_config")
    if effective("cache_implementation", arguments, config, target) == "paged":
        # `generate` would hand the call on to continuous batching, without the drafter.
        raise ValueError('Decoding with a drafter does not support `cache_implementation="paged"`. Leave it out.')
    call = {name: arguments.pop(name) for name in SETTING_NAMES if name in arguments}
    settings = resolve_settings(drafter, call, config)
    if effective("token_healing", arguments, config, target):
        raise ValueError("Decoding with a drafter does not support `token_healing`. Leave it out.")
    stop_strings = effective("stop_strings", arguments, config, target)
    criteria = []
    if stop_strings is not None:
        criteria.append(_stop_string_criteria(stop_strings, tokenizer))
        arguments["stop_strings"] = None
    if call.get("prompt_lookup_num_tokens", getattr(config, "prompt_lookup_num_tokens", None)) is not None:
        # It is ours now. What `generate` still finds is the target's own, and its way to decode would be another.
        arguments["prompt_lookup_num_tokens"] = None
    drafter.attach(target)
    loop = functools.partial(decode, drafter=drafter, settings=settings, streamer=streamer, extra_criteria=criteria)
    return original(target, custom_generate=loop, **arguments)


def _check_tokenizer(
    assistant_tokenizer: PreTrainedTokenizerBase | None, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """A drafter speaks in its target's tokens. Pipelines pass a tokenizer for it all the same; not another one."""
    if assistant_tokenizer is None or assistant_tokenizer is tokenizer:
        return
    if tokenizer is None or assistant_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError("A drafter uses its target's tokenizer. Leave `assistant_tokenizer` out.")


def _stop_string_criteria(
    stop_strings: str | list[str], tokenizer: PreTrainedTokenizerBase | None
) -> StopStringCriteria:
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the tokenizer: pass `tokenizer=` beside it.")
    return StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)


def decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    settings: DraftSettings,
    streamer: BaseStreamer | None = None,
    extra_criteria: list[Any] | tuple = (),
    **model_kwargs: Any,
) -> SpeculativeOutput | torch.Tensor:
    """The loop that transformers' `generate` calls in place of its own, with inputs prepared."""
    criteria = StoppingCriteriaList([*stopping_criteria, *extra_criteria])
    refuse_unsupported(target, generation_config, settings, model_kwargs)
    refuse_for_rows(input_ids, logits_processor, criteria, generation_config, model_kwargs, streamer)
    drafter.attach(target)
    run = _Run(target, drafter, settings, input_ids, logits_processor, criteria, generation_config, streamer)
    rows = list(range(input_ids.shape[0]))
    # Rows that can't have their own lengths in one forward are decoded one after another.
    together = len(rows) == 1 or can_be_ragged(target, input_ids, model_kwargs)
    training = drafter.training
    drafter.eval()
    try:
        with torch.no_grad(), run.speculation.timed("total", target.device), contextlib.ExitStack() as layers:
            with run.speculation.timed("preparation", target.device):
                layers.enter_context(fast_linear_layers(target, drafter, drafter.borrowed_head))
            for group in [rows] if together else [[row] for row in rows]:
                kwargs = model_kwargs if together else _of_row(group[0], len(rows), model_kwargs)
                run.prefill(group, input_ids[group], kwargs)
                with target._optimize_model_for_decode():
                    while not run.sequences.is_done:
                        run.round()
    finally:
        drafter.train(training)
    if streamer is not None:
        streamer.end()
    return run.output()


def _of_row(row: int, rows: int, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `generate` prepared for a batch of `rows`, for one of them, with a cache of its own."""
    kwargs = {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) and value.shape[:1] == (rows,) else value
        for name, value in model_kwargs.items()
    }
    return {**kwargs, "cache": copy.deepcopy(model_kwargs["cache"])}


class _Run:
    """One generation: its rows, both models' caches, and what is counted and recorded."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter,
        settings: DraftSettings,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.model, self.drafter, self.config = target, drafter, config
        self.schedule = make_schedule(settings, drafter, target)
        self.layers = drafter.config.target_layer_ids
        self.processor = logits_processor
        # What depends on scores alone is done for all rows and positions at once.
        self.at_once = all(type(processor) in SCORE_PROCESSORS for processor in logits_processor)
        rows = range(input_ids.shape[0])
        self.row_processors = [for_row(logits_processor, row) if len(rows) > 1 else logits_processor for row in rows]
        self.drafting = Drafting(drafter, settings, self.row_processors, config.do_sample)
        self.sequences = Sequences(input_ids, criteria, config, streamer)
        self.lookup = Lookup(self.sequences) if settings.num_copied else None
        self.most_copied = min(settings.num_copied, self.sequences.max_length - self.sequences.prompt_length)
        self.speculation = Speculation([[] for _ in rows], schedule=self.schedule.name)
        self.prompt_hidden: list[tuple[torch.Tensor, ...]] = []

    # ------------------------------------------------------------------ stages

    def prefill(self, rows: list[int], input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """The target's forward over the prompts of `rows`; its tokens are their first anchors."""
        self.sequences.live = list(rows)
        self.drafting.start()
        real = prompt_mask(input_ids, model_kwargs)
        wanted = True if self.sequences.keeps_hidden else hidden_state_indices(self.layers)
        arguments = (self.model, model_kwargs, wanted, self.speculation)
        if len(rows) == 1:
            self.target = Target(*arguments)
            earlier = self._earlier_features(input_ids, model_kwargs)
        else:
            self.target = TargetOfRows(
                *arguments, real=real, longest_forward=1 + max(self.drafter.num_drafts, self.most_copied)
            )
            earlier = []
        outputs = self.target.prefill(input_ids, self.config)
        if self.sequences.keeps_hidden:
            self.prompt_hidden.append(outputs.hidden_states)
        logits = outputs.logits[:, -1].to(self.sequences.device)
        decisions = self._decide(logits, Drafted({}, tokens=[[] for _ in rows]))
        finished = [
            place
            for place in range(len(rows))
            if self.sequences.commit(place, decisions[place], logits[place : place + 1], ())[2]
        ]
        features = torch.cat([*earlier, concatenate_features(outputs.hidden_states, self.layers)], dim=1)
        length = features.shape[1]
        self.drafting.add_prompts(features, input_ids[:, -length:], real[:, -length:], self.sequences)
        self._drop(finished)

    def round(self) -> None:
        """Copy or draft, schedule, verify, commit."""
        rows = list(self.sequences.live)
        drafted = self._draft()
        checked = self.target.check(self.sequences, drafted.tokens)
        before = len(self.sequences.tokens[0])
        try:
            accepted, committed, finished = self._commit(drafted, checked)
        except BaseException:
            # A streamer, criterion or processor failed in the middle of a run. A cache of the caller's own, which only
            # a single row can have, ends right before the last token that was shown, as in plain decoding.
            if len(self.sequences.tokens) == 1:
                self.target.commit(drafted.tokens, [len(self.sequences.tokens[0]) - before])
            raise
        verified, lengths = [len(drafts) for drafts in drafted.tokens], [len(tokens) for tokens in committed]
        self._learn(rows, drafted, accepted, lengths)
        self.target.commit(drafted.tokens, lengths)
        places, tokens = committed_places(rows, verified, committed, finished)
        if places:
            self.drafting.pending.add(checked.features(self.layers, places), tokens)
        self._drop(finished)

    def _commit(self, drafted: Drafted, checked: Checked) -> tuple[list[int], list[list[int]], list[int]]:
        """Of each live row how many drafts were accepted and which tokens it got, and which rows have ended."""
        sequences = self.sequences
        logits = checked.logits.to(sequences.device)
        decisions = self._decide(logits, drafted)
        accepted, committed, finished, start = [], [], [], 0
        for place, drafts in enumerate(drafted.tokens):
            part = slice(start, start + len(drafts) + 1)
            hidden = [layer[:, part] for layer in checked.hidden_states] if sequences.keeps_hidden else ()
            counts = drafted.proposed(place), len(drafts), place in drafted.copies
            tokens, num_accepted, has_ended = sequences.commit(place, decisions[place], logits[part], hidden, counts)
            accepted.append(num_accepted)
            committed.append(tokens)
            finished += [place] * has_ended
            start = part.stop
        return accepted, committed, finished

    # ------------------------------------------------------------------ helpers

    def _draft(self) -> Drafted:
        """Copies for the rows that have something to copy, and drafts for the others, as far as they are scheduled."""
        rows, budgets, copies = len(self.sequences.live), self.sequences.budgets(), {}
        room = max(budgets) - 1
        if self.lookup is not None and (found := self.lookup.find()):
            length = self.schedule.num_copied(rows, len(found), self.lookup.acceptance)
            length = min(length, self.most_copied, room)
            copies = {place: self.lookup.copy(place, start, length) for place, start in found.items() if length}
        # Where every row copies there is nothing to draft, and what waits for the drafter goes on waiting.
        num_drafts = self.schedule.num_drafts(rows) if len(copies) < rows else 0
        with self.speculation.timed("draft", self.drafter.device):
            proposal = self.drafting.propose(self.sequences, min(num_drafts, room))
        drafted = self._scheduled(Drafted(copies, proposal))
        # A row takes one token more than its accepted drafts.
        drafted.tokens = [tokens[: budget - 1] for tokens, budget in zip(drafted.tokens, budgets)]
        return drafted

    def _scheduled(self, drafted: Drafted) -> Drafted:
        """Cuts what the drafter proposed to what the schedule wants verified."""
        rows, proposal = self.sequences.live, drafted.proposal
        drafted.tokens = [drafted.copies.get(place, []) for place in range(len(rows))]
        drafted.scheduled = list(map(len, drafted.tokens))
        if proposal is not None:
            places = [place for place in range(len(rows)) if place not in drafted.copies]
            if proposal.confidences is not None:
                drafted.confidences = proposal.confidences.float().cpu()[places]
            lengths = self.schedule.lengths(drafted.confidences, [rows[place] for place in places])
            tokens = proposal.tokens.tolist()
            for place, length in zip(places, lengths.clamp_max(proposal.tokens.shape[1]).tolist()):
                drafted.tokens[place], drafted.scheduled[place] = tokens[place][:length], length
        return drafted

    def _decide(self, logits: torch.Tensor, drafted: Drafted) -> list[Iterable[Decision]]:
        """What is committed behind each row's anchor."""
        sequences, do_sample = self.sequences, self.config.do_sample
        probabilities = None if drafted.proposal is None else drafted.proposal.probabilities
        q = None if probabilities is None else probabilities.to(logits.device)
        if self.at_once:
            scores = logits
            if self.processor or do_sample or sequences.keeps_scores:
                # A copy, because processors may write into it.
                scores = self.processor(sequences.prefix(0), logits.to(torch.float32, copy=True))
            return verify_rows(scores, drafted.tokens, q, do_sample, drafted.copies, sequences.keeps_scores)
        decisions, start = [], 0
        for place, (row, tokens) in enumerate(zip(sequences.live, drafted.tokens)):
            part = logits[start : start + len(tokens) + 1].float()
            candidates = sequences.with_drafts(place, tokens)
            row_q = None if q is None or place in drafted.copies else q[place]
            decisions.append(
                verify_in_order(part, candidates, len(tokens), self.row_processors[row], row_q, do_sample)
            )
            start += len(tokens) + 1
        return decisions

    def _learn(self, rows: list[int], drafted: Drafted, accepted: list[int], committed: list[int]) -> None:
        """Counts the round, and lets the schedule and the lookup learn from it."""
        verified = [len(tokens) for tokens in drafted.tokens]
        copying = sorted(drafted.copies)
        drafting = [place for place in range(len(rows)) if place not in drafted.copies]
        for places, is_copy in ((drafting, False), (copying, True)):
            if places:
                counts = [[count[p] for p in places] for count in (drafted.scheduled, verified, accepted, committed)]
                self.speculation.record_round(
                    [rows[place] for place in places],
                    drafted.proposed(places[0]),
                    *counts,
                    confidences=None if is_copy else drafted.confidences,
                    is_copy=is_copy,
                )
        if drafting:
            self.schedule.observe(*([count[p] for p in drafting] for count in (rows, verified, accepted)))
        if self.lookup is not None:
            self.lookup.observe([verified[p] for p in copying], [accepted[p] for p in copying])

    def _earlier_features(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """
        Features of what a cache from an earlier call holds: none if the drafter still knows that text, or if only the
        text behind it was passed, which it then starts from; else from a forward over it.
        """
        cache, mask = model_kwargs["cache"], model_kwargs.get("attention_mask")
        past = 0 if all(cache.is_linear) else int(cache.get_seq_length())
        # `generate` leaves a mask without padding out, and keeps its length.
        length = getattr(self.config, "_mask_length", -1) if mask is None else mask.shape[1]
        if past == 0 or self.drafting.recall(cache) or length != input_ids.shape[1]:
            return []
        with self.speculation.timed("target", self.model.device):
            outputs = self.model(
                input_ids=input_ids[:, :past],
                attention_mask=None if mask is None else mask[:, :past],
                use_cache=False,
                output_hidden_states=hidden_state_indices(self.layers),
                **{name: 1 for name in ("logits_to_keep",) if name in model_kwargs},
            )
        return [concatenate_features(outputs.hidden_states, self.layers)]

    def _drop(self, finished: list[int]) -> None:
        """Takes rows that have ended out of everything that is still to be computed."""
        for place in sorted(finished, reverse=True):
            self.drafting.drop_row(place)
            self.target.drop_row(place)
            self.sequences.drop_row(place)

    def output(self) -> SpeculativeOutput | torch.Tensor:
        """What `generate` returns. Rows of different lengths leave no cache that another call could go on from."""
        self.speculation.generated_tokens = sum(map(len, self.sequences.tokens))
        cache = self.target.cache if len(self.sequences.tokens) == 1 else None
        if cache is not None:
            self.drafting.remember(cache)
        if not self.config.return_dict_in_generate:
            return self.sequences.ids()
        hidden = tuple(torch.cat(layer) for layer in zip(*self.prompt_hidden))
        return SpeculativeOutput(
            sequences=self.sequences.ids(),
            **self.sequences.outputs(hidden),
            cache=cache,
            speculation=self.speculation,
        )
