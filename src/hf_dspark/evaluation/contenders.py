"""What an evaluation compares: plain decoding, drafters under several schedules, and what transformers has anyway."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..auto import AutoDrafter
from ..generation.profile import stored_profile
from ..generation.scheduling import make_schedule
from ..generation.settings import SCHEDULES, DraftSettings, resolve_settings
from ..machine import now
from ..models.drafter import Drafter
from ..models.fingerprint import weights_fingerprint


PLAIN = "plain"
BASELINES = ("prompt_lookup", "fast_layers")
PROMPT_LOOKUP_TOKENS = 10


@dataclass
class Contender:
    """
    A way to decode.

    Args:
        name (`str`): Its name in results.
        description (`dict[str, Any]`): Its entry in `results.json`.
        arguments (`dict[str, Any]`): What it adds to the `generate` call.
        one_row_only (`bool`): Whether `generate` refuses batches this way.
        fast_layers (`bool`): Whether the target's linear layers run as they do with a drafter.
        drafter ([`Drafter`], *optional*): The drafter.
        settings ([`DraftSettings`], *optional*): How it drafts.
    """

    name: str
    description: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    one_row_only: bool = False
    fast_layers: bool = False
    drafter: Drafter | None = None
    settings: DraftSettings | None = None


def make_contenders(
    target: PreTrainedModel,
    drafters: Iterable[str | Path | Drafter],
    schedules: Iterable[str] = ("own", "fixed"),
    baselines: Iterable[str] = (),
    assistant: str | PreTrainedModel | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
) -> list[Contender]:
    """
    Plain decoding, each drafter under each schedule, and the baselines.

    Args:
        target (`PreTrainedModel`): The target.
        drafters (`Iterable`): Folders, Hub ids or loaded drafters.
        schedules (`Iterable[str]`): See [`parse_schedule`].
        baselines (`Iterable[str]`): `"prompt_lookup"`, and `"fast_layers"`: plain decoding in
            [`~hf_dspark.fast_linear_layers`], which tells what of a gain comes from those.
        assistant (`str` or `PreTrainedModel`, *optional*): A small model, for assisted generation of transformers.
        assistant_tokenizer, tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed by an assistant with another
            vocabulary.
        dtype (`torch.dtype`, *optional*): Of drafters and assistant; the target's by default.

    Raises:
        ValueError: If a schedule or baseline is unknown, or a drafter doesn't fit the target or can't follow one.
    """
    dtype = dtype or target.dtype
    contenders = [Contender(PLAIN, {"kind": "plain", "model": None})]
    labels: set[str] = set()
    schedules = list(schedules)
    for source in drafters:
        drafter = source if isinstance(source, Drafter) else AutoDrafter.from_pretrained(str(source), dtype=dtype)
        drafter = drafter.to(target.device).eval().attach(target)
        label = _label(source if not isinstance(source, Drafter) else drafter.config.name_or_path, labels)
        drafted = [_drafted(label, drafter, schedule, target) for schedule in schedules]
        contenders += [each for each in drafted if not _is_own(each, drafted)]
        if drafter.config.source_format == "transformers":
            contenders.append(_transformers_dflash(label, drafter, target, dtype))
    for name in baselines:
        if name not in BASELINES:
            raise ValueError(f"There is no baseline {name!r}; choose one of {', '.join(BASELINES)}.")
        arguments = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if name == "prompt_lookup" else {}
        description = {"kind": name, "model": None, **arguments}
        contenders.append(
            Contender(name, description, arguments, name == "prompt_lookup", fast_layers=name == "fast_layers")
        )
    if assistant is not None:
        contenders.append(_assisted(assistant, target, assistant_tokenizer, tokenizer, dtype, labels))
    names = [contender.name for contender in contenders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} would be run twice. Name each drafter and schedule once.")
    return contenders


def parse_schedule(text: str) -> dict[str, Any]:
    """
    Arguments of `generate` for a schedule.

    Args:
        text (`str`): `"own"` (as the drafter's `generation_config` says), `"fixed"` (all that the drafter can draft),
            `"fixed:3"` (3 tokens a round), `"confidence"` (the drafter's own threshold), `"confidence:0.5"`, or
            `"throughput"`. All but the first copy nothing from the text itself, unless `"+lookup:5"` stands behind
            them (at most 5 tokens).

    Raises:
        ValueError: If it is none of these.
    """
    if text == "own":
        return {}
    schedule, plus, copied = text.partition("+lookup:")
    kind, colon, value = schedule.partition(":")
    try:
        arguments: dict[str, Any] = {"prompt_lookup_num_tokens": int(copied) if plus else 0}
        if kind == "fixed":
            return {"verification_schedule": kind, "num_assistant_tokens": int(value) if colon else None} | arguments
        if kind == "confidence" and colon:
            return {"verification_schedule": kind, "assistant_confidence_threshold": float(value)} | arguments
        if kind in SCHEDULES and not colon:
            return {"verification_schedule": kind} | arguments
    except ValueError:
        pass
    known = ", ".join(("own", "fixed", "fixed:3", "confidence:0.5", *SCHEDULES[2:], "fixed:3+lookup:5"))
    raise ValueError(f"There is no schedule {text!r}; examples are {known}.")


def _drafted(label: str, drafter: Drafter, schedule: str, target: PreTrainedModel) -> Contender:
    arguments = parse_schedule(schedule)
    if schedule != "own" and arguments.get("num_assistant_tokens") is None:
        arguments["num_assistant_tokens"] = drafter.num_drafts
    settings = resolve_settings(drafter, arguments, None)
    default = "fixed" if stored_profile(target, drafter) is None else "throughput"
    description = {
        "kind": "drafter",
        "model": drafter.config.name_or_path or None,
        "drafter": label,
        "drafter_type": drafter.config.model_type,
        "num_drafts": drafter.num_drafts,
        "schedule": schedule,
        "verification_schedule": settings.schedule or default,
        "num_assistant_tokens": make_schedule(settings, drafter, target).settings.num_drafts,
        "assistant_confidence_threshold": settings.threshold if settings.schedule == "confidence" else None,
        "confidence_temperatures": list(settings.temperatures) if settings.temperatures else None,
        **({"prompt_lookup_num_tokens": settings.num_copied} if settings.num_copied else {}),
        **_size(drafter),
    }
    return Contender(
        f"{label} {schedule}",
        description,
        {"assistant_model": drafter, **arguments},
        drafter=drafter,
        settings=settings,
    )


def _is_own(contender: Contender, drafted: Iterable[Contender]) -> bool:
    """Whether it runs the whole block, and so does what `generate` does without arguments, which is run as well."""
    names = ("verification_schedule", "num_assistant_tokens", "prompt_lookup_num_tokens")
    return contender.description["schedule"] == "fixed" and any(
        each.description["schedule"] == "own"
        and all(each.description.get(name) == contender.description.get(name) for name in names)
        for each in drafted
    )


def _transformers_dflash(label: str, drafter: Drafter, target: PreTrainedModel, dtype: torch.dtype) -> Contender:
    """The same checkpoint in transformers' own class and loop."""
    folder = drafter.config.name_or_path
    model = AutoModel.from_pretrained(folder, dtype=dtype).to(target.device).eval()
    return Contender(
        f"{label} in transformers",
        {"kind": "transformers_dflash", "model": folder, **_size(model)},
        {"assistant_model": model, "speculation_type": "dflash"},
        True,
    )


def _assisted(
    assistant: str | PreTrainedModel,
    target: PreTrainedModel,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    labels: set[str],
) -> Contender:
    model = assistant
    if not isinstance(assistant, PreTrainedModel):
        if AutoConfig.from_pretrained(assistant).model_type in ("dspark", "dflash", "eagle3"):
            raise ValueError(f"{assistant} is a drafter, not a small language model. Name it among the drafters.")
        model = AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype).to(target.device).eval()
    arguments: dict[str, Any] = {"assistant_model": model}
    if model.config.get_text_config().vocab_size != target.config.get_text_config().vocab_size:
        arguments |= {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    label = _label(model.name_or_path, labels)
    return Contender(
        f"{label} as assistant", {"kind": "assistant", "model": model.name_or_path, **_size(model)}, arguments, True
    )


def _size(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights": weights_fingerprint(model),
    }


def _label(source: str | Path | None, taken: set[str]) -> str:
    """A short name that no other drafter has: the last part of its path, or more parts."""
    parts = Path(source).parts if source else ("drafter",)
    candidates = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
    candidates += [f"{parts[-1]}-{n}" for n in range(2, len(taken) + 3)]
    label = next(name for name in candidates if name not in taken)
    taken.add(label)
    return label


@dataclass
class Forwards:
    """
    What [`counted_forwards`] counts.

    Args:
        count (`int`): Forwards.
        prefill_seconds (`float`): What the first one took.
    """

    count: int = 0
    prefill_seconds: float = 0.0


@contextmanager
def counted_forwards(target: PreTrainedModel) -> Iterator[Forwards]:
    """Counts the target's forwards, for ways to decode that don't, and times the first."""
    found = Forwards()

    def before(*args: Any) -> None:
        found.count += 1
        if found.count == 1:
            found.prefill_seconds = -now(target.device)

    def after(*args: Any) -> None:
        if found.count == 1:
            found.prefill_seconds += now(target.device)

    handles = target.register_forward_pre_hook(before), target.register_forward_hook(after)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
