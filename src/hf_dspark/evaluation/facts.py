"""The circumstances of an evaluation: what numbers mean nothing without."""

import platform
from typing import Any

import torch
from transformers import PreTrainedModel

from ..machine import processor
from ..models.fingerprint import weights_fingerprint
from .tasks import Task


def describe_target(target: PreTrainedModel) -> dict[str, Any]:
    """The target's entry in `results.json`."""
    return {
        "name": target.config.name_or_path or type(target).__name__,
        "model_type": target.config.model_type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in target.parameters()),
        "weights": weights_fingerprint(target),
    }


def hardware(target: PreTrainedModel) -> dict[str, Any]:
    """The machine that times were taken on."""
    return {
        "device": target.device.type,
        "device_name": processor(target.device),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
    }


def describe_task(task: Task) -> dict[str, Any]:
    """The task's entry in `results.json`."""
    return {
        "name": task.name,
        "source": task.source,
        "prompts": len(task.prompts),
        "turns": sum(len(prompt.turns) for prompt in task.prompts),
        "skipped": task.skipped,
    }
