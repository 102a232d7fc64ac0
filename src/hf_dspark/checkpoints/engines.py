"""
Engines that serve drafters: which format each takes, what it refuses, and its command line. What is said of vLLM and
SGLang was read from the versions named here and not run.
"""

from dataclasses import dataclass
from typing import Any

from .capabilities import refusals


VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"


@dataclass(frozen=True)
class Serving:
    """
    How an engine serves a drafter.

    Args:
        engine (`str`): Its name and the version that was read.
        format (`str`): The format that it takes.
        reasons (`list[str]`): Why it can't serve this drafter; none if it can.
        command (`str`): Its command line, with the folder of the export in it.
    """

    engine: str
    format: str
    reasons: list[str]
    command: str


def servings(config: Any, folder: str, target: str) -> list[Serving]:
    """
    What the engines make of a drafter.

    Args:
        config (`DrafterConfig`): The drafter's.
        folder (`str`): What the folders of the exports are called before `-` and the format.
        target (`str`): The target.
    """
    vllm = [*refusals(config, "speculators", mere_copies=True), *_vllm_refusals(config)]
    sglang = refusals(config, "sglang", mere_copies=True)
    return [
        Serving(VLLM, "speculators", vllm, _vllm_command(config, f"{folder}-speculators", target)),
        Serving(SGLANG, "sglang", sglang, _sglang_command(config, f"{folder}-sglang", target)),
    ]


def _vllm_refusals(config: Any) -> list[str]:
    reasons = []
    if config.model_type == "dflash" and config.sample_from_anchor:
        reasons.append("its DFlash proposes from the mask slots only (`sample_from_anchor` is True here)")
    if config.model_type == "dspark" and (config.markov_rank == 0 or config.markov_head_type != "vanilla"):
        given = f"`markov_head_type` {config.markov_head_type!r}, `markov_rank` {config.markov_rank}"
        reasons.append(f"its DSpark has the plain Markov head only ({given} here)")
    sliding = [config.is_sliding(i) for i in range(config.num_hidden_layers)]
    if any(sliding) and not all(sliding) and config.sliding_causal:
        reasons.append("it takes `sliding_causal` for all layers, and some are not sliding here")
    return reasons


def _vllm_command(config: Any, folder: str, target: str) -> str:
    speculation = (
        f'"method": "{config.model_type}", "model": "{folder}", "num_speculative_tokens": {config.num_drafts}'
    )
    return f"vllm serve {target} --speculative-config '{{{speculation}}}'"


def _sglang_command(config: Any, folder: str, target: str) -> str:
    command = (
        f"python -m sglang.launch_server --model-path {target} "
        f"--speculative-algorithm {config.model_type.upper()} --speculative-draft-model-path {folder}"
    )
    if config.model_type != "eagle3":
        return command  # the block is in the config
    steps = config.num_drafts
    chain = f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}"
    return f"{command} {chain}"
