"""What loading a drafter adds to transformers' own: no key left over, and decoding settings from the checkpoint."""

from typing import Any

from transformers import GenerationConfig

from .configuration_drafter import DrafterConfig


def default_generation_config(config: DrafterConfig) -> GenerationConfig:
    """Our decoding defaults for a drafter: draft the whole block, verify all of it."""
    settings = GenerationConfig()
    settings.num_assistant_tokens = config.num_drafts
    settings.assistant_confidence_threshold = None
    settings.verification_schedule = "fixed"
    return settings


def load_generation_config(name_or_path: Any, config: DrafterConfig, kwargs: dict[str, Any]) -> GenerationConfig:
    """The checkpoint's own decoding settings over our defaults; transformers does this only for generating models."""
    hub = {k: kwargs[k] for k in ("cache_dir", "revision", "token", "local_files_only", "subfolder") if k in kwargs}
    settings = default_generation_config(config)
    try:
        stored = GenerationConfig.from_pretrained(name_or_path, **hub)
    except OSError:
        return settings
    stored = {k: v for k, v in stored.to_diff_dict().items() if v is not None and k != "transformers_version"}
    settings.update(**stored, allow_custom_entries=True)
    return settings


def refuse_incomplete(name: str, info: dict[str, Any]) -> None:
    """
    Refuses a checkpoint whose keys are not exactly the drafter's.

    Raises:
        ValueError: Naming the keys.
    """
    problems = []
    for kind, label in (("missing_keys", "missing"), ("unexpected_keys", "unknown")):
        if info.get(kind):
            problems.append(f"{label} keys {sorted(str(k) for k in info[kind])}")
    if info.get("mismatched_keys"):
        shapes = (f"{key} {tuple(stored)} instead of {tuple(ours)}" for key, stored, ours in info["mismatched_keys"])
        problems.append(f"misshapen {', '.join(sorted(shapes))}")
    if problems:
        raise ValueError(
            f"The drafter checkpoint {name} doesn't fit its config.json: {'; '.join(problems)}. Loading it would "
            "leave weights random or unused, so it is refused. Check that config and weights come from the same save."
        )
