"""
Where transformers learns of us: registration of the drafters, and the one hook that lets `generate` take a drafter.
Nothing else in the package touches transformers' own classes.
"""

import functools
import inspect
import os
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin

from .checkpoints import LOCATION, drafter_type
from .checkpoints.files import require_there
from .models.adapters import ADAPTERS_PLACE, adapter_base, underlying_drafter
from .models.dflash.configuration_dflash import DFlashConfig
from .models.dflash.modeling_dflash import DFlashDrafter
from .models.drafter import Drafter
from .models.dspark.configuration_dspark import DSparkConfig
from .models.dspark.modeling_dspark import DSparkDrafter
from .models.eagle3.configuration_eagle3 import Eagle3Config
from .models.eagle3.modeling_eagle3 import Eagle3Drafter


DRAFTERS = {"dspark": DSparkDrafter, "dflash": DFlashDrafter, "eagle3": Eagle3Drafter}


class AutoDrafter:
    """
    Loads a drafter of any kind: DSpark, DFlash or EAGLE-3, in our format or another project's that we know.

    Example:

    ```python
    >>> from hf_dspark import AutoDrafter

    >>> drafter = AutoDrafter.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")  # doctest: +SKIP
    ```
    """

    def __init__(self) -> None:
        raise TypeError("AutoDrafter is not instantiated; call `AutoDrafter.from_pretrained(folder_or_hub_id)`.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Drafter:
        """
        Loads a drafter.

        Args:
            pretrained_model_name_or_path (`str`): Folder or Hub id of a drafter, or of PEFT adapters for one.
            **kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            OSError: If there is no folder or model of this name.
            ValueError: If the checkpoint is no drafter that we know, or damaged.
        """
        location = {k: kwargs[k] for k in LOCATION if k in kwargs}
        require_there(pretrained_model_name_or_path, location)
        base = adapter_base(pretrained_model_name_or_path, location)
        if base is not None:
            location = {k: v for k, v in location.items() if k not in ADAPTERS_PLACE}
        kind = drafter_type(base or pretrained_model_name_or_path, **location)
        return DRAFTERS[kind].from_pretrained(pretrained_model_name_or_path, **kwargs)


class _NeedsTarget:
    """What `AutoModelForCausalLM` finds for a drafter's config: an explanation instead of a list of all models."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"{pretrained_model_name_or_path} is a drafter, which can't generate alone: it needs its target. Load it "
            "with `hf_dspark.AutoDrafter.from_pretrained` and call `target.generate(..., assistant_model=drafter)`."
        )

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> None:
        cls.from_pretrained(f"A {type(config).__name__}")


def register() -> None:
    """Registers the drafters with transformers and hooks into `generate`. Calling it again changes nothing."""
    for config_class, drafter_class in (
        (DSparkConfig, DSparkDrafter),
        (DFlashConfig, DFlashDrafter),
        (Eagle3Config, Eagle3Drafter),
    ):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, drafter_class, exist_ok=True)
        needs_target = type("NeedsTarget", (_NeedsTarget,), {"config_class": config_class})
        AutoModelForCausalLM.register(config_class, needs_target, exist_ok=True)
    hook_generate()


def hook_generate() -> None:
    """
    Lets `generate` take a [`Drafter`] as `assistant_model`; every other call passes untouched.

    Raises:
        RuntimeError: If transformers' `generate` no longer has the parameters that the hook stands on.
    """
    original = GenerationMixin.generate
    if getattr(original, "_hf_dspark_original", None) is not None:
        return
    missing = {"generation_config", "stopping_criteria", "streamer", "assistant_model", "custom_generate"} - set(
        inspect.signature(original).parameters
    )
    if missing:
        raise RuntimeError(
            f"This version of transformers changed `generate` (no longer there: {sorted(missing)}), so hf-dspark "
            "can't hook into it. Use `custom_generate=hf_dspark.speculative_decoding(drafter)` or another version of "
            "transformers."
        )

    @functools.wraps(original)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        assistant = arguments.get("assistant_model")
        if isinstance(assistant, str | os.PathLike):
            raise TypeError(
                f"`assistant_model` takes a loaded model, not the name {str(assistant)!r}. Load the drafter first: "
                f"`hf_dspark.AutoDrafter.from_pretrained({str(assistant)!r}, dtype=target.dtype)`."
            )
        drafter = underlying_drafter(assistant)
        if drafter is None:
            _refuse_lost_streamer(arguments)
            return original(self, *args, **kwargs)
        from .generation.decoding import generate_with_drafter
        from .generation.native import generate_natively, speculation_type

        arguments["assistant_model"] = drafter
        arguments.pop("self")
        run = generate_with_drafter if speculation_type(arguments) is None else generate_natively
        return run(original, self, **arguments)

    generate._hf_dspark_original = original
    GenerationMixin.generate = generate


def _refuse_lost_streamer(arguments: dict[str, Any]) -> None:
    """transformers hands a custom loop no streamer, whose reader would wait for ever."""
    if arguments.get("streamer") is not None and hasattr(arguments.get("custom_generate"), "hf_dspark_drafter"):
        raise ValueError("Give `streamer` to `speculative_decoding` itself; `generate` does not pass it on.")


def unhook_generate() -> None:
    """Takes the hook out of `generate` again."""
    original = getattr(GenerationMixin.generate, "_hf_dspark_original", None)
    if original is not None:
        GenerationMixin.generate = original
