"""How a call wants to speculate: where settings come from, and what can't be honoured."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..models.drafter import Drafter


SCHEDULES = ("fixed", "confidence")
SETTING_NAMES = ("num_assistant_tokens", "assistant_confidence_threshold", "verification_schedule")


@dataclass(frozen=True)
class DraftSettings:
    """
    Decoding settings of one call.

    Args:
        num_drafts (`int`): Tokens drafted a round, at most.
        schedule (`str`): `"fixed"` verifies all drafts; `"confidence"` the leading ones with enough confidence.
        threshold (`float`): The least confidence of a draft that is verified.
    """

    num_drafts: int
    schedule: str = "fixed"
    threshold: float = 0.0


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
    if not 1 <= num_drafts <= drafter.num_drafts:
        raise ValueError(
            f"`num_assistant_tokens` {num_drafts} is out of reach: this drafter drafts 1 to {drafter.num_drafts} "
            "tokens a round."
        )
    schedule = setting("verification_schedule") or "fixed"
    if given("verification_schedule") is None and given("assistant_confidence_threshold") is not None:
        # Naming a threshold asks for it.
        schedule = "confidence"
    if schedule not in SCHEDULES:
        raise ValueError(
            f"`verification_schedule` {schedule!r} is not available; choose one of {', '.join(SCHEDULES)}."
        )
    if schedule == "fixed":
        return DraftSettings(num_drafts)
    return DraftSettings(num_drafts, schedule, _checked_threshold(drafter, threshold))


def _checked_threshold(drafter: Drafter, threshold: float | None) -> float:
    if not getattr(drafter.config, "enable_confidence_head", False):
        raise ValueError(
            "The confidence schedule needs a drafter with a confidence head, and this one has none. Use "
            '`verification_schedule="fixed"` with `num_assistant_tokens`.'
        )
    if threshold is None or not 0 <= threshold <= 1:
        raise ValueError(
            f"The confidence schedule needs `assistant_confidence_threshold` between 0 and 1, got {threshold}."
        )
    return float(threshold)


def refuse_unsupported(
    target: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """
    Refuses by name what decoding with a drafter can't honour, before any forward.

    Raises:
        ValueError: Naming the option and what to do.
    """
    cache = model_kwargs.get("cache")
    # A cache of recurrent states alone has no length; it is refused after the prefill, when it is known.
    has_length = cache is not None and not all(cache.is_linear)
    refusals = {
        "num_beams > 1": (config.num_beams or 1) > 1,
        "num_return_sequences > 1": (config.num_return_sequences or 1) > 1,
        "a batch of more than one row": input_ids.shape[0] > 1,
        "constrained beam search": getattr(config, "constraints", None) or getattr(config, "force_words_ids", None),
        "`penalty_alpha` (contrastive search)": config.penalty_alpha,
        "`dola_layers`": getattr(config, "dola_layers", None),
        "`prompt_lookup_num_tokens` beside a drafter": config.prompt_lookup_num_tokens,
        "`assistant_early_exit` beside a drafter": config.assistant_early_exit,
        "`assistant_ensemble_weight` (it changes the distribution)": config.assistant_ensemble_weight,
        "`use_cache=False`": not model_kwargs.get("use_cache", True) or cache is None,
        "`prefill_chunk_size`": config.prefill_chunk_size,
        "`output_attentions`": config.output_attentions,
        "`output_hidden_states`": config.output_hidden_states,
        '`cache_implementation="quantized"`': config.cache_implementation == "quantized",
        "`inputs_embeds`": model_kwargs.get("inputs_embeds") is not None,
        "a cache that already holds tokens": has_length and cache.get_seq_length() > 0,
        f"an encoder-decoder target ({type(target).__name__})": target.config.is_encoder_decoder,
    }
    for what, present in refusals.items():
        if present:
            raise ValueError(
                f"Decoding with a drafter does not support {what}. Leave it out, or call `generate` without "
                "`assistant_model`."
            )
