"""What loading a drafter adds to transformers' own: no key left over, and decoding settings from the checkpoint."""

import json
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .configuration_drafter import DrafterConfig


TRAINING_RECORD = "training_record.json"
# What a checkpoint's generation_config.json says about drafting.
DRAFT_SETTINGS = (
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "verification_schedule",
    "confidence_temperatures",
    "calibration_temperature",
    "draft_context_window",
    "prompt_lookup_num_tokens",
)


def default_generation_config(config: DrafterConfig) -> GenerationConfig:
    """Our decoding defaults for a drafter: draft the whole block, and leave the schedule to `generate`."""
    settings = GenerationConfig()
    settings.num_assistant_tokens = config.num_drafts
    settings.assistant_confidence_threshold = None
    settings.verification_schedule = None
    settings.confidence_temperatures = None
    settings.draft_context_window = None
    return settings


def load_generation_config(
    name_or_path: Any, config: DrafterConfig, kwargs: dict[str, Any], is_changed: bool = False
) -> GenerationConfig:
    """
    The checkpoint's own decoding settings over our defaults; transformers does this only for generating models.

    Args:
        name_or_path (`str`): Folder or Hub id.
        config (`DrafterConfig`): The drafter's config.
        kwargs (`dict`): `from_pretrained`'s arguments.
        is_changed (`bool`, *optional*, defaults to `False`): Whether the config is not the checkpoint's own, so that
            the settings may speak of a longer block.

    Raises:
        ValueError: If they are damaged.
    """
    hub = {k: kwargs[k] for k in ("cache_dir", "revision", "token", "local_files_only", "subfolder") if k in kwargs}
    settings = default_generation_config(config)
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(name_or_path, GENERATION_CONFIG_NAME, **hub, **quiet)
    if file is None:
        return settings
    try:
        stored = GenerationConfig.from_pretrained(name_or_path, **hub)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error} Correct or remove it.") from error
    # Sampling settings and special tokens are the target's business.
    stored = {k: v for k, v in stored.to_diff_dict().items() if v is not None and k in DRAFT_SETTINGS}
    count = stored.get("num_assistant_tokens", config.num_drafts)
    if is_changed and type(count) is int:
        stored["num_assistant_tokens"] = min(count, config.num_drafts)
    _check_values(stored, config, file)
    settings.update(**stored, allow_custom_entries=True)
    return settings


def check_settings(settings: GenerationConfig, config: DrafterConfig, place: str) -> None:
    """
    Checks a drafter's decoding settings as they are checked when it is loaded.

    Raises:
        ValueError: Naming the setting, and `place` as where it stands.
    """
    values = {k: v for k, v in settings.to_diff_dict().items() if v is not None and k in DRAFT_SETTINGS}
    _check_values(values, config, place)
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings.save_pretrained(folder)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} can't be saved: {error}") from error


def _check_values(values: dict[str, Any], config: DrafterConfig, place: str) -> None:
    for name, value in values.items():
        if name != "num_assistant_tokens" and not _is_setting(name, value):
            raise ValueError(f"{place}: `{name}` {value!r} is no such setting. Correct or remove it.")
    count = values.get("num_assistant_tokens", config.num_drafts)
    if type(count) is not int or not 1 <= count <= config.num_drafts:
        raise ValueError(
            f"{place}: `num_assistant_tokens` {count!r} is no number of drafts from 1 to {config.num_drafts}. Correct "
            "or remove it."
        )


def _is_setting(name: str, value: Any) -> bool:
    """Whether a value is of its setting's kind and range."""
    if name == "verification_schedule":
        return isinstance(value, str)
    if name in ("draft_context_window", "prompt_lookup_num_tokens"):
        return type(value) is int and value >= (name == "draft_context_window")
    if name == "assistant_confidence_threshold":
        return type(value) in (int, float) and 0 <= value <= 1
    if name == "calibration_temperature":  # 0 is greedy
        return type(value) in (int, float) and 0 <= value < math.inf
    values = value if name == "confidence_temperatures" and isinstance(value, list) else [value]
    return all(type(v) in (int, float) and 0 < v < math.inf for v in values)


def read_object(file: str | os.PathLike) -> dict[str, Any]:
    """
    A JSON file's object.

    Raises:
        OSError: If there is no such file.
        ValueError: If it holds no JSON object.
    """
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}. Fetch or save the checkpoint again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is damaged: it holds no JSON object. Fetch or save the checkpoint again.")
    return value


def load_training_record(name_or_path: Any, subfolder: str = "") -> dict[str, Any] | None:
    """How the drafter of a folder was trained; `None` where nothing was recorded, and for Hub ids."""
    try:
        return read_object(Path(name_or_path, subfolder or "", TRAINING_RECORD))
    except (OSError, ValueError):
        return None


def save_training_record(folder: str | os.PathLike, record: dict[str, Any] | None) -> None:
    """Writes how a drafter was trained beside its weights; a record of other weights does not stay there."""
    file = Path(folder, TRAINING_RECORD)
    if record is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def earlier_trainings(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The trainings that a record tells of, oldest first, as the history of one that goes on from there."""
    if record is None:
        return []
    return [*record.get("earlier", []), {name: value for name, value in record.items() if name != "earlier"}]


def longest_trained(record: dict[str, Any] | None) -> int | None:
    """The longest sequence, in tokens, of the training that a record tells of, where it says so."""
    data = (record or {}).get("data")
    longest = data.get("longest") if isinstance(data, dict) else None
    return longest if isinstance(longest, int) else None


def refuse_incomplete(name: str, info: dict[str, Any]) -> None:
    """
    Refuses a checkpoint whose keys are not exactly the drafter's.

    Raises:
        ValueError: Naming the keys.
    """
    problems = []
    for kind, label in (("missing_keys", "missing"), ("unexpected_keys", "unknown")):
        if info.get(kind):
            problems.append(f"{label} keys {_some((repr(str(k)) for k in info[kind]), '[{}]')}")
    if info.get("mismatched_keys"):
        shapes = (f"{key} {tuple(stored)} instead of {tuple(ours)}" for key, stored, ours in info["mismatched_keys"])
        problems.append(f"misshapen {_some(shapes)}")
    if problems:
        raise ValueError(
            f"The drafter checkpoint {name} doesn't fit its config.json: {'; '.join(problems)}. Loading it would "
            "leave weights random or unused, so it is refused. Check that config and weights come from the same save."
        )


def _some(names: Iterable[str], form: str = "{}") -> str:
    names = sorted(names)
    return form.format(", ".join(names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
