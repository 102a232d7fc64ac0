"""How a drafter is made, loaded, saved and published."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from .adapters import ADAPTERS_ALONE, ADAPTERS_PLACE, adapter_base
from .export import export
from .loading import (
    check_settings,
    load_generation_config,
    load_training_record,
    refuse_incomplete,
    save_training_record,
)


if TYPE_CHECKING:
    from .drafter import Drafter

# What `save_pretrained(push_to_hub=True)` passes on.
PUSH_ARGUMENTS = ("repo_id", "private", "revision", "create_pr", "commit_message", "commit_description", "tags")


class Checkpoints:
    """Making, loading and saving of a [`Drafter`]; what is not here is transformers' `PreTrainedModel`."""

    @classmethod
    def from_target(cls, target: PreTrainedModel | str, tokenizer: Any = None, **overrides: Any) -> "Drafter":
        """
        A fresh drafter for a target, with the paper's settings scaled to it.

        Args:
            target (`PreTrainedModel` or `str`): The target, or its Hub id or folder.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                Lets an unused or reserved token be found for the masked slots of a block (DFlash, DSpark).
            **overrides: Fields of the config that differ from the default, and

                - `num_hidden_layers` (`int`): depth of the draft, 5 for DFlash and DSpark and 1 for EAGLE-3, or
                  less on small targets;
                - `token_counts` (`torch.Tensor` of shape `(vocab_size,)`): needed with `draft_vocab_size`;
                - `init_from_target` (`bool`, defaults to `True`): begin as the target's own last layers where the
                  shapes allow, with `fc` passing on the deepest feature. It learns much faster from there.

        Returns:
            `Drafter`: attached to the target, with float32 parameters.

        Example:

        ```python
        >>> from hf_dspark import DSparkDrafter

        >>> drafter = DSparkDrafter.from_target(target, mask_token_id=3, num_hidden_layers=2)  # doctest: +SKIP
        >>> drafter.save_pretrained("my-drafter")  # doctest: +SKIP
        ```
        """
        from .fresh import fresh_drafter

        if isinstance(target, str | os.PathLike):
            target = AutoModelForCausalLM.from_pretrained(target)
        return fresh_drafter(cls, target, tokenizer, **overrides)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> "Drafter":
        """
        Loads a drafter from a folder or Hub id, in our format or another project's that we know. A folder of PEFT
        adapters gives the base drafter that it names, with those adapters.

        Args:
            pretrained_model_name_or_path (`str`): Folder or Hub id.
            *args, **kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`]; fields of the config among them
                replace the checkpoint's (`block_size=4`). Without `dtype` the weights are of the type that the
                config names, or if it names none, of the type that they are stored in.

        Raises:
            ValueError: If weights are missing, unknown or damaged, or the checkpoint is of another kind of drafter.
            OSError: If there are no weights.
        """
        from ..checkpoints import LOCATION, naming
        from ..checkpoints.files import require_there

        name, want_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        if name is not None:
            require_there(name, {k: kwargs[k] for k in LOCATION if k in kwargs})
        base = adapter_base(name, kwargs)
        if base is not None:
            loaded = cls._from_adapters(name, base, *args, **kwargs)
        elif name is None or kwargs.get("state_dict") is not None:
            loaded = cls._from_tensors(name, *args, **kwargs)
        else:
            loaded = cls._from_checkpoint(name, *args, **kwargs)
        drafter, info = loaded
        refuse_incomplete(str(name), info)
        with naming(name, "weights"):
            drafter.check_weights()
        return loaded if want_info else drafter

    @classmethod
    def _from_adapters(cls, name: Any, base: str, *args: Any, **kwargs: Any) -> tuple["Drafter", dict]:
        place = {k: kwargs.pop(k) for k in ADAPTERS_PLACE if k in kwargs}
        drafter, info = cls.from_pretrained(base, *args, output_loading_info=True, **kwargs)
        drafter.load_adapter(name, **place)
        drafter.stored_format = "PEFT adapters"
        return drafter, info

    @classmethod
    def _from_checkpoint(cls, name: Any, *args: Any, **kwargs: Any) -> tuple["Drafter", dict]:
        from ..checkpoints import read_checkpoint

        checkpoint = read_checkpoint(name, cls, kwargs)
        kwargs |= {"config": checkpoint.config, "state_dict": checkpoint.state_dict}
        try:
            drafter, info = cls._from_tensors(None, *args, **kwargs)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise TypeError(
                f"{cls.__name__}.from_pretrained knows no argument {str(error).split()[-1]}, and "
                f"{cls.config_class.__name__} has no such field."
            ) from error
        drafter.config.name_or_path = str(name)
        drafter.stored_format = checkpoint.format
        drafter.generation_config = load_generation_config(name, drafter.config, kwargs, checkpoint.is_changed)
        drafter.training_record = load_training_record(name, kwargs.get("subfolder"))
        return drafter, info

    @classmethod
    def _from_tensors(cls, name: Any, *args: Any, **kwargs: Any) -> tuple["Drafter", dict]:
        # What doesn't fit is refused by `from_pretrained` instead, by name.
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        drafter, info = super().from_pretrained(name, *args, **kwargs)
        if name is not None:
            drafter.generation_config = load_generation_config(name, drafter.config, kwargs)
        return drafter, info

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        Saves config, weights (without what is borrowed from the target), decoding settings and, if it was trained
        with [`DraftTrainer`], `training_record.json`; of a drafter with adapters, the active adapters and their
        record alone.

        Raises:
            ValueError: If its `generation_config` holds decoding settings that couldn't be loaded again. Nothing is
                written then.
        """
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        push_to_hub = kwargs.pop("push_to_hub", False)
        if self.has_adapters:
            if push_to_hub:
                raise ValueError(ADAPTERS_ALONE)
            if kwargs.get("is_main_process", True):
                self.save_adapters(save_directory)
            return
        check_settings(self.generation_config, self.config, "The drafter's `generation_config`")
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.generation_config.save_pretrained(save_directory)
            save_training_record(save_directory, self.training_record)
            if push_to_hub:
                self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **hub)

    def export(self, folder: str | os.PathLike, format: str = "hf-dspark", force: bool = False) -> Path:
        """
        Writes the drafter in another project's format, reads it back and compares, and only then puts it in place.

        Args:
            folder (`str`): Where to.
            format (`str`, *optional*, defaults to `"hf-dspark"`):
                `"hf-dspark"`, `"deepspec"`, `"speculators"` (vLLM), `"sglang"` or `"zlab"`. Not every format can carry
                every drafter; those that store copies of the target's embedding or LM head need `attach(target)`.
            force (`bool`, *optional*, defaults to `False`): Whether a drafter that is there already is replaced.

        Returns:
            `Path`: the folder.

        Raises:
            FileExistsError: If the folder is not empty and not to be replaced, or holds something else than a drafter.
            ValueError: If the format can't carry this drafter, naming why.

        Example:

        ```python
        >>> drafter.attach(target).export("my-drafter-vllm", format="speculators")  # doctest: +SKIP
        ```
        """
        return export(self, folder, format, force)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        commit_description: str | None = None,
        tags: list[str] | None = None,
        max_shard_size: int | str = "50GB",
        **facts: Any,
    ) -> Any:
        """
        Publishes the drafter: weights, config, decoding settings, `custom_generate/generate.py` and a model card
        written from what is known of it. Arguments are those of [`~hf_dspark.publish_drafter`], which takes folders
        too, and can show what would be sent.

        Returns:
            `huggingface_hub.CommitInfo`: the commit.

        Example:

        ```python
        >>> drafter.push_to_hub("you/my-drafter", license="apache-2.0", private=True)  # doctest: +SKIP
        ```
        """
        from ..hub.publishing import publish_drafter

        publication = publish_drafter(
            self,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
            tags=tags,
            max_shard_size=max_shard_size,
            **facts,
        )
        return publication.commit
