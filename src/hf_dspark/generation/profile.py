"""What decoding costs on this machine, measured once and kept: the curve behind the throughput schedule."""

import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from ..files import write_whole
from ..machine import processor
from ..models.drafter import Drafter


FOLDER_VARIABLE = "HF_DSPARK_PROFILES"
# Fields of a config that say nothing about speed, or change when a drafter is attached.
_IRRELEVANT = re.compile(
    "name_or_path|version|architectures|assumed|source_format|dtype|_token_id|trained_length|label|^own_"
)


@dataclass(frozen=True)
class ThroughputProfile:
    """
    Seconds of a target step and of drafting on one machine (DSpark paper, the throughput curve `SPS(B)`).

    Args:
        step_seconds (`dict[int, dict[int, float]]`): By the number of rows, then by the tokens that a step computes in
            all rows together: the time of the target's forward.
        draft_seconds (`dict[int, dict[int, float]]`): By the number of rows, then by the drafts a row: the time in
            which the drafter takes in a round's features and drafts. Empty if measured without a drafter.
        conditions (`dict[str, Any]`): What was measured, and with what.
    """

    step_seconds: dict[int, dict[int, float]]
    draft_seconds: dict[int, dict[int, float]]
    conditions: dict[str, Any] = field(default_factory=dict)

    def step_costs(self, rows: int, drafts: int) -> np.ndarray:
        """
        Seconds of a step over `rows` anchors and `k` drafts among them, for `k` from 0 to `rows * drafts`. A step can
        be padded, so none costs more than a larger one: the curve never falls.
        """
        tokens = np.arange(rows, rows * (drafts + 1) + 1)
        measured = _at_rows(self.step_seconds, rows, lambda curve, r: _along(curve, tokens * (r / rows)))
        return np.minimum.accumulate(measured[::-1])[::-1]

    def draft_costs(self, rows: int, drafts: int) -> np.ndarray:
        """Seconds of drafting `n` tokens a row, for `n` from 0 (nothing) to `drafts`."""
        numbers = np.arange(1, drafts + 1)
        measured = _at_rows(self.draft_seconds, rows, lambda curve, r: _along(curve, numbers))
        return np.concatenate([[0.0], measured])

    def save(self, path: str | os.PathLike) -> None:
        """Writes the profile as JSON, aside first."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: getattr(self, name) for name in ("conditions", "step_seconds", "draft_seconds")}
        write_whole(path, json.dumps(content, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ThroughputProfile":
        """
        Reads a profile.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is damaged.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            steps, drafts = (_curves(content[name]) for name in ("step_seconds", "draft_seconds"))
            conditions = dict(content["conditions"])
            if not steps or (not drafts and conditions.get("drafter") is not None):
                raise ValueError("a curve is missing")
            return cls(steps, drafts, conditions)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no throughput profile ({error}). Delete it and measure again.") from error


def _curves(stored: dict[str, dict[str, float]]) -> dict[int, dict[int, float]]:
    curves = {int(r): {int(n): float(s) for n, s in curve.items()} for r, curve in stored.items()}
    if not all(r > 0 and curve and all(n > 0 and s > 0 for n, s in curve.items()) for r, curve in curves.items()):
        raise ValueError("rows, tokens and times must be positive")
    return curves


def _along(curve: dict[int, float], at: np.ndarray) -> np.ndarray:
    """A curve between its points, and in proportion to the last one beyond."""
    points = np.array(sorted(curve), dtype=float)
    seconds = np.array([curve[int(point)] for point in points])
    return np.interp(at, points, seconds) * np.maximum(1.0, at / points[-1])


def _at_rows(curves: dict[int, dict[int, float]], rows: int, values: Any) -> np.ndarray:
    """Values between those of the neighbouring numbers of rows that were measured, in proportion to rows beyond."""
    known = sorted(curves)
    below = max((r for r in known if r <= rows), default=known[0])
    above = min((r for r in known if r >= rows), default=known[-1])
    costs = values(curves[below], below)
    if above > below:
        share = (rows - below) / (above - below)
        costs = (1 - share) * costs + share * values(curves[above], above)
    return costs * max(1.0, rows / known[-1])


# ---------------------------------------------------------------------- which profile belongs to a pair


def pair_conditions(target: PreTrainedModel, drafter: Drafter | None) -> dict[str, Any]:
    """What a profile depends on: the shapes of both models, where and how they run, and the libraries."""
    conditions = {
        "target": _described(target),
        "drafter": None if drafter is None else _described(drafter),
        "processor": processor(target.device),
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
    }
    return conditions | {"torch": torch.__version__, "transformers": transformers.__version__}


def profile_path(conditions: dict[str, Any]) -> Path:
    """
    Where the profile for these conditions is kept: in the folder named by the environment variable
    `HF_DSPARK_PROFILES`, else beside the Hub's own cache. The libraries are no part of its name: they age.
    """
    from huggingface_hub import constants

    folder = os.environ.get(FOLDER_VARIABLE) or Path(constants.HF_HOME) / "hf-dspark" / "profiles"
    named = {name: value for name, value in conditions.items() if name not in ("torch", "transformers")}
    return Path(folder) / f"{_digest(named)}.json"


def stored_profile(target: PreTrainedModel, drafter: Drafter | None) -> ThroughputProfile | None:
    """The profile measured for this pair on this machine with these libraries; `None` if there is none."""
    conditions = pair_conditions(target, drafter)
    path = profile_path(conditions)
    try:
        profile = _loaded(path, path.stat().st_mtime_ns)
    except OSError:
        return None
    return profile if profile.conditions == conditions else None


def required_profile(target: PreTrainedModel, drafter: Drafter) -> ThroughputProfile:
    """
    The same, where it is needed.

    Raises:
        ValueError: Without one, or with one of other libraries, naming the command that measures it.
    """
    profile = stored_profile(target, drafter)
    if profile is None:
        path = profile_path(pair_conditions(target, drafter))
        reason = "none has been measured for this pair on this processor, in these types and with these threads"
        if path.is_file():
            stale = ThroughputProfile.load(path).conditions
            reason = f"the stored one is of torch {stale.get('torch')}, transformers {stale.get('transformers')}"
        names = target.config._name_or_path or "TARGET", drafter.config._name_or_path or "DRAFTER"
        raise ValueError(
            f'`verification_schedule="throughput"` needs a throughput profile, and {reason}. Measure it once with '
            f"`hf-dspark profile --target {names[0]} --drafter {names[1]}` or "
            "`hf_dspark.profile_throughput(target, drafter)`."
        )
    return profile


@functools.lru_cache(maxsize=16)
def _loaded(path: Path, changed: int) -> ThroughputProfile:
    return ThroughputProfile.load(path)


def _described(model: PreTrainedModel) -> dict[str, str]:
    """Shape, type and place of a model, without its name: a fine-tuned target is as fast as the one it came from."""
    shape = _relevant(model.config.to_dict())
    return {
        "model_type": model.config.model_type,
        "shape": _digest(shape),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "attention": str(model.config._attn_implementation),
    }


def _relevant(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {str(name): _relevant(value) for name, value in config.items() if not _IRRELEVANT.search(str(name))}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
