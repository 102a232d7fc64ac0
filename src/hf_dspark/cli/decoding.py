"""What the commands share: load a pair, encode a prompt, decode it and take the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typer import BadParameter


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation.streaming import DraftStreamer


@dataclass
class Decoded:
    """
    One answer.

    Args:
        ids (`list[int]`): the new tokens.
        seconds (`float`): wall-clock time of the `generate` call.
        speculation (*optional*): the statistics of speculative decoding; `None` for plain decoding.
    """

    ids: list[int]
    seconds: float
    speculation: Any = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds

    @property
    def target_forwards(self) -> int:
        return self.speculation.target_forwards if self.speculation else len(self.ids)


def device() -> str:
    """The device that the commands run on: the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_target(target: str | None, drafters: Sequence[str]) -> str | None:
    """
    The target to load for drafters: the one named, else the one that the drafters name; `None` is the embedded one.

    Raises:
        BadParameter: If a target but no drafter is named, or drafters don't tell their target.
    """
    from ..hub.pairs import target_of
    from ..origins import EMBEDDED

    if target:
        if not drafters and target != EMBEDDED:
            raise BadParameter("name the target's drafter with --drafter.")
        return target
    try:
        found = {target_of(drafter): drafter for drafter in drafters}
    except ValueError as error:
        raise BadParameter(str(error)) from None
    if len(found) > 1:
        told = ", ".join(f"{drafter} for {place}" for place, drafter in found.items())
        raise BadParameter(f"the drafters are for different targets ({told}): name one with --target.")
    return next(iter(found), None)


def load_target(target: str | None, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target and its tokenizer; the embedded pair's where `target` is `None`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ..hub.pairs import load_tokenizer, target_folder

    folder = target_folder(target)
    tokenizer = load_tokenizer(folder)
    disable_progress_bar()  # loading takes a second, and its bars would stand between the command and its output
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device()).eval(), tokenizer


def load_drafter(drafter: str | None, target: PreTrainedModel) -> PreTrainedModel:
    """Load a drafter in the target's type and place; the embedded pair's where `drafter` is `None`."""
    from ..auto import AutoDrafter
    from ..hub.pairs import drafter_folder

    return AutoDrafter.from_pretrained(drafter_folder(drafter), dtype=target.dtype).to(target.device).eval()


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool = False) -> dict[str, torch.Tensor]:
    """
    Turn a prompt into the model's inputs, as a user's message unless `raw` or the tokenizer knows no chat.

    Raises:
        BadParameter: If the prompt is no text, or empty.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadParameter("the prompt is not valid UTF-8 text.") from None
    if raw or tokenizer.chat_template is None:
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    if encoded["input_ids"].shape[1] == 0:
        raise BadParameter("the prompt is empty: there is nothing to continue.")
    return {name: encoded[name].to(device()) for name in ("input_ids", "attention_mask")}


def decode(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    drafter: PreTrainedModel | None = None,
    streamer: DraftStreamer | None = None,
    **settings: Any,
) -> Decoded:
    """Generate one answer, with the drafter if there is one, and take the time."""
    if drafter is not None:
        settings["assistant_model"] = drafter
    start = _now()
    output = target.generate(**inputs, streamer=streamer, return_dict_in_generate=True, **settings)
    seconds = _now() - start
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Decoded(ids, seconds, getattr(output, "speculation", None))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
