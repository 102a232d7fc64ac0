"""What every drafter's configuration holds: the transformer of the draft, and how it hangs on its target."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


class DrafterConfig(PreTrainedConfig):
    """
    Base of [`DFlashConfig`], [`DSparkConfig`] and [`Eagle3Config`]. Everything that changes a number is stored,
    defaults included, so that a checkpoint never depends on a guess.

    Args:
        text_config (`PreTrainedConfig` or `dict`, *optional*):
            The draft transformer itself, as the config class of its family (`llama` or `qwen3`);
            `text_config.num_hidden_layers` is the depth of the *drafter* and `text_config.vocab_size` the
            vocabulary of the *target*.
        target_layer_ids (`list[int]`, *optional*):
            Target layers whose outputs are the drafter's features, in the order in which they are concatenated.
            Id `i` is the output of decoder layer `i` (`hidden_states[i + 1]` in transformers), `-1` the embeddings.
        num_target_layers (`int`, *optional*):
            Number of decoder layers of the target.
        target_hidden_size (`int`, *optional*):
            Width of the target's hidden states; the drafter's own width if not given.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary; `None` drafts over the target's whole vocabulary. Which target token
            each draft token stands for is stored with the weights (`d2t`, `t2d`).
        own_embedding (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint carries a token embedding of its own instead of borrowing the target's.
        own_head (`bool`, *optional*, defaults to `False`):
            Whether the checkpoint carries an LM head of its own instead of borrowing the target's.
        target_name_or_path (`str`, *optional*):
            The target that the drafter was made for. Information only.
        source_format (`str`, *optional*, defaults to `"hf-dspark"`):
            The checkpoint format that the drafter was read from.
        max_trained_length (`int`, *optional*):
            Longest sequence seen in training, in tokens. Information only.
    """

    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}

    text_config: dict | PreTrainedConfig | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    target_name_or_path: str | None = None
    source_format: str = "hf-dspark"
    max_trained_length: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.text_config.hidden_size

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the target; the drafter's own output may be smaller, see `output_size`."""
        return self.text_config.vocab_size

    @property
    def output_size(self) -> int:
        """Number of tokens that the drafter can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_hidden_layers(self) -> int:
        return self.text_config.num_hidden_layers

    def require_complete(self) -> None:
        """
        Refuses a configuration from which a needed convention is missing, before any weight is read.

        Raises:
            ValueError: If `target_layer_ids` is missing or names a layer that the target does not have.
        """
        if not self.target_layer_ids:
            raise ValueError(
                f"{type(self).__name__} has no `target_layer_ids`: which target layers feed the drafter can't be "
                "guessed (a wrong guess drafts badly without any error). Add the list to the checkpoint's config.json "
                "or pass `target_layer_ids=[...]`."
            )
        if self.num_target_layers is not None:
            # The last layer's output exists only behind the final norm in transformers.
            bad = [i for i in self.target_layer_ids if not -1 <= i < self.num_target_layers - 1]
            if bad:
                raise ValueError(
                    f"`target_layer_ids` {bad} are outside -1..{self.num_target_layers - 2}: the target has "
                    f"{self.num_target_layers} layers and its last one can't be used as a feature. Correct the list."
                )
