"""
transformers' own DFlash, `generate(..., speculation_type="dflash")`, with one of our drafters. The loop is theirs; it
calls an assistant with a signature of its own, which `NativeAssistant` gives a drafter.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, StaticCache, SynthIDTextWatermarkingConfig
from transformers.modeling_outputs import BaseModelOutput

from ..models.configuration_drafter import NAMES, PARTS
from ..models.drafter import Drafter
from .settings import SETTING_NAMES, effective
from .verification import ROW_PROCESSORS


SPECULATION_TYPE = "dflash"
# What that loop leaves out or fails at, or what takes its place. Criteria: what a round has accepted behind the end is
# kept there.
UNSUPPORTED = (
    "inputs_embeds",
    "custom_generate",
    "assistant_tokenizer",
    "use_mtp",
    "prefill_chunk_size",
    "stop_strings",
    "stopping_criteria",
    "output_hidden_states",
    "output_attentions",
    "penalty_alpha",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)


def speculation_type(arguments: dict[str, Any]) -> str | None:
    """Which loop of transformers' own a call of `generate` asks for, by itself or in a `generation_config`."""
    named = arguments.get("speculation_type")
    return named or getattr(arguments.get("generation_config"), "speculation_type", None)


def generate_natively(original: Callable, target: PreTrainedModel, **arguments: Any) -> Any:
    """
    What `target.generate(..., assistant_model=drafter, speculation_type="dflash")` does: `original`, with the drafter
    in the form that transformers' loop calls.

    Raises:
        ValueError: If that loop can't use this drafter, naming why.
    """
    if speculation_type(arguments) != SPECULATION_TYPE:
        raise ValueError(
            f"Decoding with a drafter does not support `speculation_type={speculation_type(arguments)!r}`."
        )
    refuse_options(target, arguments)
    drafter = arguments.pop("assistant_model")
    assistant = NativeAssistant(drafter, target)
    training = drafter.training
    drafter.eval()
    try:
        return original(target, assistant_model=assistant, **arguments)
    finally:
        drafter.train(training)


def refuse_options(target: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """
    Refuses by name what transformers' loop would leave out, fail at or decode otherwise than plain `generate`.

    Raises:
        ValueError: Naming the option.
    """
    config = arguments.get("generation_config")

    def option(name: str) -> Any:
        return effective(name, arguments, config, target)

    cache = arguments.get("cache", arguments.get("past_key_values"))
    kind = option("cache_implementation") or ("static" if isinstance(cache, StaticCache) else "dynamic")
    present = {f"`{name}`": option(name) is not None and option(name) is not False for name in UNSUPPORTED}
    # Ours, which are the drafter's to default to and not the target's.
    ours = [name for name in SETTING_NAMES if name not in UNSUPPORTED]
    given = {name: arguments.get(name, getattr(config, name, None)) for name in ours}
    present |= {f"`{name}`": value is not None for name, value in given.items()}
    present |= {
        "num_beams > 1": (option("num_beams") or 1) > 1,
        "`assistant_ensemble_weight` (it changes the distribution)": option("assistant_ensemble_weight") is not None,
        "`use_cache=False`": option("use_cache") is False,
        f"a {kind} cache": "static" in kind or kind in ("quantized", "paged"),
        # The features of what it holds are gone.
        "a cache that holds tokens already": hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0,
        "`guidance_scale`": option("guidance_scale") not in (None, 1),
        "`watermarking_config` with SynthID": isinstance(option("watermarking_config"), SynthIDTextWatermarkingConfig),
    }
    # They are called for rejected drafts too.
    for processor in arguments.get("logits_processor") or ():
        if type(processor) not in ROW_PROCESSORS and not getattr(processor, "row_wise", False):
            name = type(processor).__name__
            present[f"{name}; if it keeps nothing between its calls, say so with an attribute `row_wise = True`"] = (
                True
            )
    for what, value in present.items():
        if value:
            raise ValueError(
                f"`speculation_type={SPECULATION_TYPE!r}` is transformers' own loop, which does not support {what}. "
                "Leave one of the two out."
            )


class NativeAssistant(nn.Module):
    """
    The assistant of one call of transformers' DFlash loop. It keeps the context in a draft cache of its own, so that
    sliding layers see what they were trained on; the loop's cache stays empty.

    Args:
        drafter ([`DFlashDrafter`]): The drafter.
        target (`PreTrainedModel`): Its target.

    Raises:
        ValueError: If that loop can't use this drafter, naming why.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel) -> None:
        super().__init__()
        _require_masks_only(drafter)
        self.drafter = drafter.attach(target)
        _require_borrowed(drafter)
        self.context = drafter.new_cache()
        # What the loop reads. It makes its cache by the layer types, and can't crop sliding layers that are empty.
        self.config = copy.deepcopy(drafter.config)
        self.config.text_config.layer_types = ["full_attention"] * drafter.config.num_hidden_layers

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """
        One round.

        Args:
            noise_embeds (`torch.Tensor` of shape `(1, block_size, hidden_size)`): The embedded block.
            context_hidden_states (`torch.Tensor` of shape `(1, n, layers * target_hidden_size)`): The features of the
                newly committed positions.
            attention_mask (`torch.Tensor` of shape `(1, committed + block_size)`, *optional*): 0 on padding.
            **_: The positions and the loop's cache, which say what the draft cache knows.
        """
        features = context_hidden_states
        if attention_mask is not None:
            new = slice(-self.config.block_size - features.shape[1], -self.config.block_size)
            features = features[:, attention_mask[0, new].bool()]
        self.drafter.extend(self.context, features, None)
        block = noise_embeds.to(self.device, self.drafter.dtype)
        hidden = self.drafter.denoise(self.context, block)
        return BaseModelOutput(last_hidden_state=hidden.to(noise_embeds.dtype))


def _require_masks_only(drafter: Drafter) -> None:
    config = drafter.config
    reason = None
    if config.model_type != "dflash":
        reason = f"this one is {NAMES[config.model_type]}"
    elif config.sample_from_anchor:
        reason = "in this one every slot of a block proposes (`sample_from_anchor`)"
    elif config.draft_vocab_size:
        reason = f"this one has a draft vocabulary of {config.draft_vocab_size}"
    _refuse(reason)


def _require_borrowed(drafter: Drafter) -> None:
    own = [PARTS[part] for part in PARTS if getattr(drafter, part) is not None]
    _refuse(f"this one has its own {' and '.join(own)}" if own else None)


def _refuse(reason: str | None) -> None:
    if reason:
        raise ValueError(
            f"`speculation_type={SPECULATION_TYPE!r}` is transformers' own loop, for DFlash drafters whose mask slots "
            f"alone propose, over the target's embedding, LM head and whole vocabulary; {reason}. Leave "
            "`speculation_type` out to decode with hf-dspark's loop."
        )
