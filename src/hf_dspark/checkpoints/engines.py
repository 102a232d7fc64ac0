"""
Engines that serve drafters: which folders each takes as they are, which format it takes else, what it refuses, and
its command line. What is said of vLLM and SGLang was read from the sources of the versions named here and not run.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.configuration_drafter import EAGLE3_LAYERS, NAMES, eagle3_layers
from . import eagle
from .capabilities import refusals


VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
# Folders that an engine's model classes know: the project's format, and kinds of drafters.
AS_THEY_ARE = {
    VLLM: {
        "speculators": ("dspark", "dflash", "eagle3"),
        "deepspec": ("dspark",),
        "zlab": ("dflash",),
        "specforge": ("dflash", "eagle3"),
        "eagle": ("eagle3",),
        "transformers": ("dflash",),
    },
    SGLANG: {
        "deepspec": ("dspark",),
        "zlab": ("dflash",),
        "specforge": ("dspark", "dflash", "eagle3"),
        "transformers": ("dflash",),
    },
}

# Where one field makes all layers causal or none.
MIXED = ("dflash", "speculators")


@dataclass(frozen=True)
class Serving:
    """
    How an engine serves a drafter.

    Args:
        engine (`str`): Its name and the version that was read.
        format (`str`, *optional*): The format that it takes; `None` for the checkpoint as it is.
        reasons (`list[str]`): Why it can't serve this drafter; none if it can.
        command (`str`): Its command line.
    """

    engine: str
    format: str | None
    reasons: list[str]
    command: str


def servings(config: Any, checkpoint: str, target: str, stored_format: str) -> list[Serving]:
    """
    What the engines make of a drafter: of each first the checkpoint as it is, then, where that is refused, an export.

    Args:
        config (`DrafterConfig`): The drafter's.
        checkpoint (`str`): The checkpoint. Exports are called like it, with `-` and the format behind.
        target (`str`): The target.
        stored_format (`str`): The checkpoint's format, `drafter.stored_format`.
    """
    folder = Path(checkpoint)
    stem, found = folder.resolve().name if folder.is_dir() else folder.name, []
    for engine, format, engine_refusals, command in (
        (VLLM, "speculators", _vllm_refusals, _vllm_command),
        (SGLANG, "sglang", _sglang_refusals, _sglang_command),
    ):
        reasons = _direct_refusals(config, engine, stored_format) or engine_refusals(config, stored_format)
        found.append(Serving(engine, None, reasons, command(config, checkpoint, target)))
        if reasons:
            reasons = [*refusals(config, format, mere_copies=True), *engine_refusals(config, format)]
            found.append(Serving(engine, format, reasons, command(config, f"{stem}-{format}", target)))
    return found


def _direct_refusals(config: Any, engine: str, stored_format: str) -> list[str]:
    kind = config.model_type
    if kind not in AS_THEY_ARE[engine].get(stored_format, ()):
        return [f"it doesn't know {NAMES[kind]} drafters in the format {stored_format}"]
    if stored_format == "deepspec" and engine == SGLANG and config.text_config.model_type != "qwen3":
        return ["of DeepSpec's drafters it knows those of Qwen3 only"]
    if kind == "eagle3" and stored_format in ("specforge", "eagle") and _departs(config):
        # Only ids beside the transformer's fields are recorded as counted by vLLM.
        read_by = VLLM if "target_layer_ids" in (config.assumed or {}) else SGLANG
        if engine != read_by:
            place = "in `eagle_config`" if engine == SGLANG else "beside the transformer's fields"
            return [f"it looks for `{eagle.LAYERS}` {place} alone, and would take EAGLE-3's own layers"]
    if "sliding_causal" in (config.assumed or {}) and not config.sliding_causal:
        return ["it takes sliding layers for causal where the config doesn't say, and this format's own code doesn't"]
    return []


def _departs(config: Any) -> bool:
    """Whether an EAGLE-3 drafter takes other layers than the method's own."""
    depth = config.num_target_layers
    return config.target_layer_ids not in (EAGLE3_LAYERS, eagle3_layers(depth) if depth else None)


def _vllm_refusals(config: Any, format: str) -> list[str]:
    reasons = []
    if config.model_type == "dflash" and config.sample_from_anchor:
        reasons.append("its DFlash proposes from the mask slots only (`sample_from_anchor` is True here)")
    if config.model_type == "dspark" and (config.markov_rank == 0 or config.markov_head_type != "vanilla"):
        given = f"`markov_head_type` {config.markov_head_type!r}, `markov_rank` {config.markov_rank}"
        reasons.append(f"its DSpark has the plain Markov head only ({given} here)")
    sliding = [config.is_sliding(i) for i in range(config.num_hidden_layers)]
    if any(sliding) and config.model_type == "dspark" and not config.sliding_causal:
        reasons.append("sliding layers of its DSpark are causal (`sliding_causal` is False here)")
    if any(sliding) and not all(sliding) and config.sliding_causal and (config.model_type, format) == MIXED:
        reasons.append("it takes `sliding_causal` for all layers, and some are not sliding here")
    return reasons


def _sglang_refusals(config: Any, format: str) -> list[str]:
    if config.model_type == "dspark" and not config.markov_rank:
        return ["its DSpark needs a serial head (`markov_rank` is 0 here)"]
    return []


def _vllm_command(config: Any, folder: str, target: str) -> str:
    speculation = {"method": config.model_type, "model": folder, "num_speculative_tokens": config.num_drafts}
    quoted = shlex.quote(json.dumps(speculation, ensure_ascii=False))
    command = f"vllm serve {shlex.quote(target)} --speculative-config {quoted}"
    sliding = {config.is_sliding(i) for i in range(config.num_hidden_layers)}
    # Layers of two kinds are for its newer runner.
    return f"VLLM_USE_V2_MODEL_RUNNER=1 {command}" if len(sliding) > 1 else command


def _sglang_command(config: Any, folder: str, target: str) -> str:
    command = (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        f"--speculative-algorithm {config.model_type.upper()} --speculative-draft-model-path {shlex.quote(folder)}"
    )
    if config.model_type != "eagle3":
        return command  # the block is in the config
    steps = config.num_drafts
    chain = f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
    return f"{command} {chain}"
