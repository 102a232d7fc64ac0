"""PEFT adapters on a drafter: finding their base, telling what they can't sit on, merging them."""

import copy
import os
import shlex
import sys
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from transformers.utils import cached_file

from .adapter_records import joined, unrecorded
from .loading import load_training_record, longest_trained, read_object, save_training_record


if TYPE_CHECKING:
    from .drafter import Drafter


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What of `from_pretrained`'s arguments says where the adapters are, and not their base.
ADAPTERS_PLACE = ("revision", "subfolder")
MODEL_CONFIG = "config.json"
# What PEFT puts before a name in its files.
PREFIX = "base_model.model."
ADAPTERS_ALONE = "Adapters are not published alone: merge them into their drafter first (`drafter.merge_adapters()`)."
# Their weights enter a chunked loss or a gather directly, so that an adapter beside them would not be seen.
READ_DIRECTLY = ("embed_tokens", "lm_head", "markov_head.markov_w2")


def require_peft() -> None:
    """
    Raises:
        ImportError: If peft is not installed, saying how to get it.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ImportError('Adapters need peft. Install it: pip install "hf-dspark[train]"') from error


def adapter_base(name_or_path: str | os.PathLike | None, location: dict[str, Any]) -> str | None:
    """
    The base drafter that a folder or repository of adapters names; `None` if it holds no adapters, or a model too.

    Raises:
        ValueError: If the adapters don't say what they belong to.
    """
    if name_or_path is None:
        return None
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    places = ("cache_dir", "token", "local_files_only", *ADAPTERS_PLACE)
    known = {k: v for k, v in location.items() if k in places}
    file = cached_file(name_or_path, ADAPTER_CONFIG, **known, **quiet)
    if file is None or cached_file(name_or_path, MODEL_CONFIG, **known, **quiet) is not None:
        return None
    base = read_object(file).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{name_or_path} holds adapters and its {ADAPTER_CONFIG} does not name their base drafter. Load that "
            f'drafter and call `drafter.load_adapter("{name_or_path}")`.'
        )
    return _found_base(Path(file), base)


def _found_base(file: Path, base: Any) -> str:
    """The base that an adapter_config.json names; folders are looked for from where the file is, then from here."""
    named = f"{file}: `base_model_name_or_path` {base!r}"
    if not isinstance(base, str):
        raise ValueError(f"{named} is no name. Write the folder or Hub id of the base drafter.")
    if Path(file.parent, base).is_dir():
        base = str(Path(file.parent, base))
    if not Path(base).is_dir():
        try:
            validate_repo_id(base)
        except HFValidationError:
            raise OSError(f"{named} is not there. Write the folder or Hub id of the base drafter.") from None
    elif Path(base, ADAPTER_CONFIG).is_file() and not Path(base, MODEL_CONFIG).is_file():
        raise ValueError(f"{named} holds adapters itself. Write the folder or Hub id of the base drafter.")
    return base


def refuse_adapter_folder(folder: str | os.PathLike) -> None:
    """
    For what needs a whole drafter.

    Raises:
        ValueError: If the folder holds adapters alone, naming their base and the command that merges them into it.
    """
    base = adapter_base(folder, {}) if os.path.isdir(folder) else None
    if base is not None:
        raise ValueError(
            f"{folder} holds adapters of {base}; merge them first: "
            f"hf-dspark convert {shlex.quote(str(folder))} MERGED --to hf-dspark"
        )


def merged_size(drafter: "Drafter") -> int:
    """How many parameters a drafter has once its adapters are merged, which is what it has without them."""
    layers = adapter_layers(drafter).values()
    added = sum(_size(module) - _size(_base_of(module)) for module in layers)
    return _size(drafter) - added


def _base_of(module: Any) -> torch.nn.Module:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def underlying_drafter(model: Any) -> "Drafter | None":
    """
    The drafter that `model` is, or that a `PeftModel` is wrapped around, adapters in place; `None` for anything else.

    Raises:
        ValueError: If the wrapper does more than its layers do (prompt learning).
    """
    from .drafter import Drafter

    if isinstance(model, Drafter):
        return model
    base_of = getattr(model, "get_base_model", None)
    base = base_of() if callable(base_of) else None
    if not isinstance(base, Drafter):
        return None
    refuse_prompts(model.active_peft_config)
    return base


def refuse_prompts(peft_config: Any) -> None:
    """
    Raises:
        ValueError: If the adapters would sit before a prompt instead of on layers (prompt learning).
    """
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{peft_config.peft_type.value} puts virtual tokens before a prompt, and a drafter has no prompt. Use "
            "adapters that sit on layers, LoRA for example."
        )


def adapter_layers(drafter: "Drafter") -> dict[str, Any]:
    """The modules of a drafter that carry adapters, or copies trained whole beside them, by name."""
    # Without peft imported nobody can have put one there.
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return {name: module for name, module in drafter.named_modules() if isinstance(module, kinds)}


def check_adapters(drafter: "Drafter") -> None:
    """
    Refuses adapters that would be there and have no effect.

    Raises:
        ValueError: Naming where they sit.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    silent = [
        name
        for name, module in adapter_layers(drafter).items()
        if isinstance(module, BaseTunerLayer) and name.endswith(READ_DIRECTLY)
    ]
    if silent:
        raise ValueError(
            f"Adapters on {', '.join(silent)} would have no effect: a drafter reads those weights directly. Leave "
            "them out of `target_modules`, or train the whole module by `modules_to_save`."
        )


def _read_config(name_or_path: str | os.PathLike, location: dict[str, Any]) -> Any:
    from peft import PeftConfig

    from ..checkpoints import naming

    with naming(name_or_path, ADAPTER_CONFIG):
        config = PeftConfig.from_pretrained(str(name_or_path), **location)
    refuse_prompts(config)
    return config


def _read_weights(name_or_path: str | os.PathLike, location: dict[str, Any]) -> tuple[Path, dict[str, torch.Tensor]]:
    """The adapters' file, and its tensors by their names in the drafter."""
    from ..checkpoints.files import find_file, read_tensors

    file = next(filter(None, (find_file(name_or_path, name, location) for name in ADAPTER_WEIGHTS)), None)
    if file is None:
        raise OSError(f"{name_or_path} has an {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS[0]}: the weights are missing.")
    return file, {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(file).items()}


def adapters_dtype(name_or_path: str | os.PathLike) -> torch.dtype:
    """The narrowest type that holds all weights of adapters exactly."""
    types = {t.dtype for t in _read_weights(name_or_path, {})[1].values() if t.is_floating_point()}
    return reduce(torch.promote_types, types)


def _shallow_copy(drafter: "Drafter") -> "Drafter":
    """A copy with the same weights, to try on whether adapters fit."""
    shared = [*drafter.parameters(), *drafter.buffers(), drafter._target]
    return copy.deepcopy(drafter, {id(thing): thing for thing in shared})


def _put_on(drafter: "Drafter", config: Any, adapter_name: str, file: Path, stored: dict[str, torch.Tensor]) -> None:
    from peft.functional import inject_adapter_in_model, set_peft_model_state_dict

    try:
        inject_adapter_in_model(config, drafter, adapter_name)
        result = set_peft_model_state_dict(drafter, stored, adapter_name)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"The adapters {file} don't fit this drafter: {message}") from error
    wrong = [key for key in result.missing_keys if f".{adapter_name}." in key] + list(result.unexpected_keys)
    if wrong:
        raise ValueError(
            f"The adapters {file} don't fit this drafter: {len(wrong)} weights are missing or unknown, "
            f"{wrong[0]} for one. Load the drafter that they were trained on."
        )
    check_adapters(drafter)


class Adapters:
    """
    What a [`Drafter`] does with PEFT adapters. The names are those of transformers' `PeftAdapterMixin`, whose own
    methods ask for a newer peft than there is.
    """

    @property
    def has_adapters(self) -> bool:
        return bool(adapter_layers(self))

    @property
    def is_gradient_checkpointing(self) -> bool:
        # Of this name, which peft asks for, transformers warns.
        return self.is_activation_checkpointing

    def load_adapter(
        self, peft_model_id: str | os.PathLike, adapter_name: str = "default", is_trainable: bool = False, **hub: Any
    ) -> None:
        """
        Loads PEFT adapters onto the drafter. The first are active at once; beside others, `set_adapter` chooses.

        Args:
            peft_model_id (`str`): Folder or Hub id of the adapters.
            adapter_name (`str`, *optional*, defaults to `"default"`): What to call them.
            is_trainable (`bool`, *optional*, defaults to `False`): Whether they keep gradients.
            **hub: `revision`, `token`, `cache_dir`, `subfolder` of a Hub id.

        Raises:
            ImportError: If peft is not installed.
            ValueError: If the name is taken, or the adapters don't fit this drafter.

        Example:

        ```python
        >>> drafter.load_adapter("my-code-adapter", adapter_name="code")  # doctest: +SKIP
        >>> drafter.load_adapter("my-chat-adapter", adapter_name="chat")  # doctest: +SKIP
        >>> drafter.set_adapter("code")  # doctest: +SKIP
        >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
        ```
        """
        require_peft()
        from peft.functional import set_adapter

        if self.has_adapters:
            active = self.active_adapters()
        else:
            active, self.adapter_records = [adapter_name], {}
        if self.has_adapters and adapter_name in self.peft_config:
            raise ValueError(f"The drafter has adapters called {adapter_name!r} already; choose another name.")
        config = _read_config(peft_model_id, hub)
        config.inference_mode = not is_trainable
        file, stored = _read_weights(peft_model_id, hub)
        gradients = {parameter: parameter.requires_grad for parameter in self.parameters()}
        try:
            _put_on(_shallow_copy(self), copy.deepcopy(config), adapter_name, file, stored)
        except Exception:
            for parameter, wanted in gradients.items():
                parameter.requires_grad_(wanted)
            raise
        _put_on(self, config, adapter_name, file, stored)
        set_adapter(self, active, inference_mode=not is_trainable)
        base_record = self.adapter_records.setdefault(None, self.training_record)
        self.adapter_records[adapter_name] = load_training_record(peft_model_id, hub.get("subfolder")) or unrecorded(
            config, config.base_model_name_or_path, base_record
        )
        self._tell_training()

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """Makes one set of adapters active, or several at once."""
        self._require_adapters()
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        unknown = sorted(set(names) - set(self.peft_config))
        if unknown:
            raise ValueError(f"The drafter has no adapters {unknown}, only {sorted(self.peft_config)}.")
        from peft.functional import set_adapter

        set_adapter(self, adapter_name, inference_mode=True)
        self._tell_training()

    def enable_adapters(self) -> None:
        """Undoes `disable_adapters`."""
        self._require_adapters()
        for module in adapter_layers(self).values():
            module.enable_adapters(True)
        self._tell_training()

    def disable_adapters(self) -> None:
        """Lets the drafter draft as its base does."""
        self._require_adapters()
        for module in adapter_layers(self).values():
            module.enable_adapters(False)
        self._tell_training()

    def active_adapters(self) -> list[str]:
        """Names of the adapters that are in use, or would be if they were not disabled."""
        return list(self._first_tuner_layer().active_adapters)

    def merge_adapters(self) -> "Drafter":
        """
        Writes the active adapters into the weights and takes all adapters off, so that the drafter can be saved,
        exported and run as one without. Its `training_record` is then theirs, with that of the base as history.

        Returns:
            `Drafter`: itself.

        Raises:
            ValueError: If it has no adapters, or they are disabled.
        """
        self._require_adapters()
        if any(module.disable_adapters for module in adapter_layers(self).values()):
            raise ValueError(
                "The adapters are disabled. Call `drafter.enable_adapters()` before merging, or load the base drafter "
                "to go on without them."
            )
        self._tell_training()
        for name, module in adapter_layers(self).items():
            plain = _base_of(module)
            if hasattr(module, "get_base_layer"):
                module.merge(safe_merge=True)
            elif module.active_adapters:
                plain = module.modules_to_save[module.active_adapters[0]]
            self.set_submodule(name, plain)
        del self.peft_config
        self.adapter_records = {}
        # It is not saved anywhere yet, so that nothing can be trained on top that would name the base alone.
        self.name_or_path = self.config.name_or_path = ""
        longest = (longest_trained(self.training_record), self.config.max_trained_length)
        self.config.max_trained_length = max(filter(None, longest), default=None)
        return self.requires_grad_(True)

    def save_adapters(self, folder: str | os.PathLike) -> None:
        """Saves the active adapters, in the form that `PeftModel` writes and reads, and how they were trained."""
        from peft.functional import get_peft_model_state_dict

        if os.path.exists(os.path.join(folder, MODEL_CONFIG)):
            raise ValueError(
                f"{folder} holds a drafter, and adapters beside it would spoil it. Save them to another folder."
            )
        name, *more = self.active_adapters()
        if more:
            raise ValueError(
                f"A folder holds one set of adapters, and {', '.join([name, *more])} are active. Save them one by one "
                "(`drafter.set_adapter`), or merge them into the drafter and save that."
            )
        os.makedirs(folder, exist_ok=True)
        config = copy.deepcopy(self.peft_config[name])
        config.inference_mode = True
        tensors = get_peft_model_state_dict(self, adapter_name=name, save_embedding_layers=False)
        tensors = {PREFIX + key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(tensors, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        save_training_record(folder, self.adapter_record(name))

    def adapter_record(self, name: str) -> dict[str, Any]:
        """How one set of adapters was trained; what they are, where that was not recorded."""
        base_record = self.adapter_records.setdefault(None, self.training_record)
        config = self.peft_config[name]
        return self.adapter_records.get(name) or unrecorded(config, config.base_model_name_or_path, base_record)

    def _tell_training(self) -> None:
        """Has `training_record` speak of the weights as they draft now."""
        names = [] if self._first_tuner_layer().disable_adapters else self.active_adapters()
        base_record = self.adapter_records.setdefault(None, self.training_record)
        self.training_record = joined([self.adapter_record(name) for name in names]) if names else base_record

    def _first_tuner_layer(self) -> Any:
        self._require_adapters()
        from peft.tuners.tuners_utils import BaseTunerLayer

        return next(module for module in adapter_layers(self).values() if isinstance(module, BaseTunerLayer))

    def _require_adapters(self) -> None:
        if not self.has_adapters:
            raise ValueError("This drafter has no adapters; call `load_adapter` first.")
