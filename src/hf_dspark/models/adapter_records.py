"""How adapters were trained: what their record says of them, and what becomes of it when they are merged."""

from pathlib import Path
from typing import Any

from .loading import earlier_trainings


RECORD_VERSION = 1
# Of a PEFT config, what its adapters are; not all kinds have all of it.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "modules_to_save")


def describe_adapters(config: Any, base: str | None) -> dict[str, Any]:
    """
    What a record says of adapters.

    Args:
        config (`peft.PeftConfig`): Theirs.
        base (`str`, *optional*): The drafter that they sit on. Of a folder its name is told, for a path is nobody
            else's business.
    """
    found = {name: getattr(config, name, None) for name in SETTINGS}
    found = {name: sorted(value) if isinstance(value, set) else value for name, value in found.items() if value}
    return {"type": config.peft_type.value, "base": _told(base), **found}


def _told(base: str | None) -> str | None:
    if not base or not Path(base).is_dir():
        return base or None
    folder = Path(base).resolve()
    # What a run calls its result says less than the run's own name.
    return folder.parent.name if folder.name == "final" else folder.name


def unrecorded(config: Any, base: str | None, base_record: dict[str, Any] | None) -> dict[str, Any]:
    """The record of adapters that came without one."""
    return {
        "record_version": RECORD_VERSION,
        "adapters": describe_adapters(config, base),
        "earlier": earlier_trainings(base_record),
    }


def joined(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several sets of adapters that are active together: the last one's, the others as history."""
    *others, last = records
    history = [*last.get("earlier", []), *(earlier_trainings(record)[-1] for record in others)]
    return last | {"earlier": history}
