"""How a call wants to speculate: where settings come from, and what can't be honoured."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from ..models.drafter import Drafter
from .verification import ROW_PROCESSORS


SCHEDULES = ("fixed", "confidence", "throughput")
SETTING_NAMES = (
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "verification_schedule",
    "confidence_temperatures",
    "draft_context_window",
    "prompt_lookup_num_tokens",
)


@dataclass(frozen=True)
class DraftSettings:
    """
    Decoding settings of one call.

    Args:
        num_drafts (`int`): Tokens drafted a round, at most.
        schedule (`str`, *optional*): `"fixed"` verifies all drafts; `"confidence"` the leading ones with enough
            confidence; `"throughput"` as many as pay on this machine. `None`, the default, is `"throughput"` where
            this machine has been measured with this pair, else `"fixed"`. A [`Schedule`] is used as it is.
        threshold (`float`): The least confidence of a draft that is verified.
        temperatures (`tuple[float, ...]`, *optional*): What the confidences are calibrated with, one a draft position.
        context_window (`int`, *optional*): Positions before the anchor that the drafter looks at; all by default.
        most_drafts (`int`, *optional*): Tokens drafted a round at most by the throughput schedule, which decides by
            what drafts cost: the length that a checkpoint records is meant for a fixed schedule and does not bind it.
            `num_drafts` by default.
        num_copied (`int`): Tokens copied from a row's own text where its last tokens stood before, see [`Lookup`]; at
            most. 0 copies none.
    """

    num_drafts: int
    schedule: Any = None
    threshold: float = 0.0
    temperatures: tuple[float, ...] | None = None
    context_window: int | None = None
    most_drafts: int | None = None
    num_copied: int = 0


def resolve_settings(
    drafter: Drafter, call: dict[str, Any], generation_config: GenerationConfig | None
) -> DraftSettings:
    """
    Settings by precedence: arguments of the call, then a `generation_config` passed to it, then the drafter's own.

    Args:
        drafter ([`Drafter`]): The drafter.
        call (`dict`): The call's own arguments.
        generation_config (`GenerationConfig`, *optional*): The one passed to the call.

    Raises:
        ValueError: Naming the setting that can't be honoured.
    """

    def given(name: str) -> Any:
        return call[name] if call.get(name) is not None else getattr(generation_config, name, None)

    def setting(name: str) -> Any:
        return given(name) if given(name) is not None else getattr(drafter.generation_config, name, None)

    num_drafts, threshold = setting("num_assistant_tokens"), setting("assistant_confidence_threshold")
    num_drafts = drafter.num_drafts if num_drafts is None else num_drafts
    if not (_is_number(num_drafts, int) and 1 <= num_drafts <= drafter.num_drafts):
        raise ValueError(
            f"`num_assistant_tokens` {num_drafts!r} is out of reach: this drafter drafts 1 to {drafter.num_drafts} "
            "tokens a round."
        )
    schedule = setting("verification_schedule")
    if given("verification_schedule") is None and given("assistant_confidence_threshold") is not None:
        # Naming a threshold asks for it.
        schedule = "confidence"
    if schedule not in (None, *SCHEDULES):
        raise ValueError(
            f"`verification_schedule` {schedule!r} is not available; choose one of {', '.join(SCHEDULES)}."
        )
    temperatures = _checked_temperatures(drafter, setting("confidence_temperatures"))
    if schedule == "confidence" and not (_is_number(threshold, int | float) and 0 <= threshold <= 1):
        raise ValueError(
            f"The confidence schedule needs `assistant_confidence_threshold` between 0 and 1, got {threshold!r}."
        )
    window = setting("draft_context_window")
    if window is not None and not (_is_number(window, int) and window >= 1):
        raise ValueError(f"`draft_context_window` must be at least 1, got {window!r}; leave it out for no limit.")
    num_copied = setting("prompt_lookup_num_tokens") or 0
    if not (_is_number(num_copied, int) and num_copied >= 0):
        raise ValueError(
            f"`prompt_lookup_num_tokens` must be a whole number from 1, or 0 to copy nothing; got {num_copied!r}."
        )
    most_drafts = num_drafts if given("num_assistant_tokens") is not None else drafter.num_drafts
    return DraftSettings(num_drafts, schedule, float(threshold or 0.0), temperatures, window, most_drafts, num_copied)


def effective(name: str, call: dict[str, Any], config: GenerationConfig | None, target: PreTrainedModel) -> Any:
    """A generation option as `generate` will see it: the call's, then the passed config's, then the target's."""
    for value in (call.get(name), getattr(config, name, None), getattr(target.generation_config, name, None)):
        if value is not None:
            return value
    return None


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _checked_temperatures(drafter: Drafter, temperatures: Any) -> tuple[float, ...] | None:
    if temperatures is None:
        return None
    try:
        values = tuple(map(float, temperatures))
    except (TypeError, ValueError):
        values = ()
    if len(values) < drafter.num_drafts or not all(0 < value < math.inf for value in values):
        raise ValueError(
            f"`confidence_temperatures` must be {drafter.num_drafts} positive numbers, one a draft position, got "
            f"{temperatures!r}. `hf-dspark calibrate` fits them."
        )
    return values


def refuse_unsupported(
    target: PreTrainedModel,
    config: GenerationConfig,
    settings: DraftSettings,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Refuses by name what decoding with a drafter can't honour, before any forward.

    Raises:
        ValueError: Naming the option and what to do.
    """
    cache = model_kwargs.get("cache")
    refusals = {
        "num_beams > 1": (config.num_beams or 1) > 1,
        "constrained beam search": getattr(config, "constraints", None) or getattr(config, "force_words_ids", None),
        "`penalty_alpha` (contrastive search)": config.penalty_alpha,
        "`dola_layers`": getattr(config, "dola_layers", None),
        "`prompt_lookup_num_tokens` of the target's own `generation_config`; give it to the call": (
            config.prompt_lookup_num_tokens
        ),
        "`max_matching_ngram_size`": settings.num_copied and config.max_matching_ngram_size,
        "`assistant_early_exit` beside a drafter": config.assistant_early_exit,
        "`assistant_ensemble_weight` (it changes the distribution)": config.assistant_ensemble_weight,
        "`use_cache=False`": not model_kwargs.get("use_cache", True) or cache is None,
        "`prefill_chunk_size`": config.prefill_chunk_size,
        "`output_attentions`": config.output_attentions,
        '`cache_implementation="quantized"`': config.cache_implementation == "quantized",
        "a static cache whose sliding window is shorter than the text (rejected drafts couldn't be forgotten); take a "
        "dynamic one": any(
            type(e) is StaticSlidingWindowLayer and not e.is_croppable for e in getattr(cache, "layers", ())
        ),
        "`inputs_embeds`": model_kwargs.get("inputs_embeds") is not None,
        f"an encoder-decoder target ({type(target).__name__})": target.config.is_encoder_decoder,
    }
    for what, present in refusals.items():
        if present:
            raise ValueError(
                f"Decoding with a drafter does not support {what}. Leave it out, or call `generate` without "
                "`assistant_model`."
            )


# What ends a row by that row alone.
ROW_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)


def refuse_for_rows(
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: BaseStreamer | None,
) -> None:
    """
    Refuses by name what can't be honoured for several rows, since each goes on at its own pace.

    Raises:
        ValueError: Naming the option and what to do.
    """
    if input_ids.shape[0] == 1:
        return

    def sees_rows(watchers: Any, known: tuple[type, ...]) -> list[str]:
        return [type(w).__name__ for w in watchers if type(w) not in known and not getattr(w, "row_wise", False)]

    refusals = {
        "a streamer": streamer is not None,
        "a cache of your own": getattr(model_kwargs.get("cache"), "_is_user_defined", False),
        "rows that end at different places without a `pad_token_id`": config._pad_token_tensor is None
        and any(type(criterion) is not MaxLengthCriteria for criterion in criteria),
    }
    for name in [*sees_rows(logits_processor, ROW_PROCESSORS), *sees_rows(criteria, ROW_CRITERIA)]:
        refusals[
            f"{name}, which would be called with one row at a time; if it looks at each row alone and keeps nothing "
            "between its calls, say so with an attribute `row_wise = True`"
        ] = True
    for what, present in refusals.items():
        if present:
            raise ValueError(
                f"Decoding several rows with a drafter does not support {what}. Otherwise decode the rows one by one, "
                "or without `assistant_model`."
            )
