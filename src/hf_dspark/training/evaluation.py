"""Evaluation in training: held-out prompts are really decoded, because a falling loss does not promise acceptance."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from ..evaluation.calibration import expected_calibration_error
from ..generation.statistics import Speculation
from ..models.drafter import Drafter


def held_out_prompts(examples: Iterable[dict[str, Any]], count: int) -> list[list[int]]:
    """The tokens before the first supervised one, of the first `count` examples that have any."""
    prompts = (list(e["input_ids"])[: list(e["loss_mask"]).index(1)] for e in examples if 1 in e["loss_mask"])
    return list(islice((prompt for prompt in prompts if prompt), count))


def decode_prompts(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Speculation]:
    """
    Decodes prompts with the drafter, all drafts verified, and leaves the random state as it was.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`Drafter`]): The drafter.
        prompts (`list[list[int]]`): Token ids.
        max_new_tokens (`int`): Longest answer.
        temperature (`float`, *optional*, defaults to 0.0): Greedy at 0.
        seed (`int`, *optional*, defaults to 0): Of the sampling.

    Returns:
        `list[Speculation]`: The statistics of each.
    """
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    devices = [target.device] if target.device.type == "cuda" else []
    runs = []
    with torch.random.fork_rng(devices=devices):
        for prompt in prompts:
            # By the prompt, so that any split over processes samples the same.
            torch.manual_seed(seed + sum(prompt))
            ids = torch.tensor([prompt], device=target.device)
            output = target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                verification_schedule="fixed",
                prompt_lookup_num_tokens=0,
                max_new_tokens=max_new_tokens,
                return_dict_in_generate=True,
                **sampling,
            )
            runs.append(output.speculation)
    return runs


def pool(runs: list[Speculation]) -> Speculation:
    """One record of several runs."""
    pooled = Speculation(accepted_lengths=[row for run in runs for row in run.accepted_lengths])
    pooled.history = [r for run in runs for r in run.history]
    pooled.target_forwards = sum(run.target_forwards for run in runs)
    pooled.generated_tokens = sum(run.generated_tokens for run in runs)
    return pooled


def decoding_metrics(runs: list[Speculation]) -> dict[str, float]:
    """
    What held-out decoding tells: `accepted_length`, `tokens_per_forward`, `marginal_acceptance_K` and
    `conditional_acceptance_K` for each draft position `K` from 1, and `confidence_error` where the drafter has
    confidences. What was never reached is left out.
    """
    pooled = pool(runs)
    metrics = {"accepted_length": pooled.mean_accepted_length, "tokens_per_forward": pooled.tokens_per_forward}
    for name in ("marginal_acceptance", "conditional_acceptance"):
        metrics |= {f"{name}_{k}": share for k, share in enumerate(getattr(pooled, name), start=1)}
    metrics["confidence_error"] = confidence_error(pooled)
    return {name: value for name, value in metrics.items() if value == value}


def confidence_error(speculation: Speculation) -> float:
    """
    Expected calibration error of the prefix survival `a_k = c_1 · … · c_k`, over all positions of the rounds that
    verified their whole block: 15 equal-width bins, weighted by count. `nan` without confidences.
    """
    predicted, observed = [], []
    for r in speculation.history:
        if r.confidences is None:
            continue
        for confidences, verified, accepted in zip(r.confidences, r.verified, r.accepted):
            if verified == r.proposed > 0:
                predicted.append(confidences.double().cumprod(0))
                observed.append((torch.arange(verified) < accepted).double())
    if not predicted:
        return float("nan")
    return expected_calibration_error(torch.cat(predicted), torch.cat(observed))
