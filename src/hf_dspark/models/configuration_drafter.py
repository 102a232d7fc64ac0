"""What every drafter's configuration holds: the transformer of the draft, and how it hangs on its target."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from .configuration_checks import require_possible, require_types


FORMAT_VERSION = 1
# By the `model_type` of its config, what people call a kind of drafter; and the parts that one may borrow.
NAMES = {"dspark": "DSpark", "dflash": "DFlash", "eagle3": "EAGLE-3"}
PARTS = {"embed_tokens": "token embedding", "lm_head": "LM head"}
# Of a transformer's config, what decides what its layers and its head compute; no family has all of them.
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
    "final_logit_softcapping",
)
# Stands for EAGLE-3's own feature layers where the depth of the target is not known yet.
EAGLE3_LAYERS = "eagle3"


def eagle3_layers(num_target_layers: int) -> list[int]:
    """The layers that EAGLE-3 takes its features from: near the beginning, the middle and the end."""
    return [1, num_target_layers // 2 - 1, num_target_layers - 4]


class DrafterConfig(PreTrainedConfig):
    """
    Base of [`DFlashConfig`], [`DSparkConfig`] and [`Eagle3Config`]. Everything that changes a number is stored,
    defaults included, so that a checkpoint never depends on a guess.

    Args:
        text_config (`PreTrainedConfig` or `dict`, *optional*):
            The draft transformer itself, as the config class of its family (`llama`, `qwen3` or `gemma4_text`);
            `text_config.num_hidden_layers` is the depth of the *drafter* and `text_config.vocab_size` the
            vocabulary of the *target* (0 while unknown: some formats don't say it, and `attach` fills it in).
        target_layer_ids (`list[int]` or `str`, *optional*):
            Target layers whose outputs are the drafter's features, in the order in which they are concatenated.
            Id `i` is the output of decoder layer `i` (`hidden_states[i + 1]` in transformers), `-1` the embeddings.
            `"eagle3"` stands for the three layers that EAGLE-3 takes from a target of any depth; `attach` puts the
            list in its place.
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
        assumed (`dict[str, str]`, *optional*):
            What the checkpoint did not say and its format's own code takes for granted: field to value and reason.
        max_trained_length (`int`, *optional*):
            Longest sequence seen in training, in tokens. Information only.
        format_version (`int`, *optional*, defaults to 1):
            Version of this list of fields. A checkpoint of a newer one is refused.
    """

    sub_configs_defaults = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}

    text_config: dict | PreTrainedConfig | None = None
    target_layer_ids: list[int] | str | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    target_name_or_path: str | None = None
    source_format: str = "hf-dspark"
    assumed: dict | None = None
    max_trained_length: int | None = None
    format_version: int = FORMAT_VERSION
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.target_layer_ids, tuple):
            self.target_layer_ids = list(self.target_layer_ids)
        require_types(self)
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

    @property
    def num_features(self) -> int:
        """Number of target layers that are concatenated."""
        return 3 if self.target_layer_ids == EAGLE3_LAYERS else len(self.target_layer_ids)

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer of the draft sees only a window of the context."""
        layer_types = getattr(self.text_config, "layer_types", None)
        return layer_types is not None and layer_types[layer] == "sliding_attention"

    def complete_from(self, target: PreTrainedConfig) -> None:
        """
        Fills in what the checkpoint left to its target, a text config: its depth, its vocabulary, EAGLE-3's layers.

        Raises:
            ValueError: If the result names layers or tokens that the target does not have.
        """
        if self.num_target_layers is None:
            self.num_target_layers = target.num_hidden_layers
        if not self.text_config.vocab_size:
            self.text_config.vocab_size = target.vocab_size
        if self.target_layer_ids == EAGLE3_LAYERS:
            self.target_layer_ids = eagle3_layers(target.num_hidden_layers)
        self.require_complete()

    def require_complete(self) -> None:
        """
        Refuses a configuration from which a needed convention is missing, before any weight is read.

        Raises:
            ValueError: If a value is of another type than its field's or impossible, if it is of a newer version, if
                `target_layer_ids` is missing or names a layer that the target does not have, or if the reduced
                vocabulary is larger than the whole.
        """
        require_types(self)
        require_possible(vars(self))
        require_possible(vars(self.text_config))
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"`format_version` {self.format_version} is newer than {FORMAT_VERSION}, the newest that this "
                "hf-dspark knows. Update hf-dspark."
            )
        if self.draft_vocab_size and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"`draft_vocab_size` {self.draft_vocab_size} exceeds `vocab_size` {self.vocab_size}.")
        if isinstance(self.target_layer_ids, str) and self.target_layer_ids != EAGLE3_LAYERS:
            raise ValueError(f"`target_layer_ids` {self.target_layer_ids!r} is neither a list nor {EAGLE3_LAYERS!r}.")
        if not self.target_layer_ids:
            raise ValueError(
                f"{type(self).__name__} has no `target_layer_ids`: which target layers feed the drafter can't be "
                "guessed (a wrong guess drafts badly without any error). Add the list to the checkpoint's config.json "
                "or pass `target_layer_ids=[...]`."
            )
        self._require_layers()

    def _require_layers(self) -> None:
        if self.target_layer_ids == EAGLE3_LAYERS:
            return
        below = [i for i in self.target_layer_ids if i < -1]
        if below:
            raise ValueError(
                f"`target_layer_ids` {below} name no layer: the first is 0, and -1 the embeddings. Correct the list."
            )
        # The last layer's output exists only behind the final norm in transformers.
        above = [i for i in self.target_layer_ids if self.num_target_layers and i >= self.num_target_layers - 1]
        if above:
            raise ValueError(
                f"`target_layer_ids` {above} are outside -1..{self.num_target_layers - 2}: the target has "
                f"{self.num_target_layers} layers and its last one can't be used as a feature. Correct the list."
            )
