"""Configuration of DFlash drafters."""

from ..blocks import Window
from ..configuration_drafter import DrafterConfig


class DFlashConfig(DrafterConfig):
    """
    Configuration of a [`DFlashDrafter`].

    Args:
        block_size (`int`, *optional*, defaults to 7):
            Number of input slots of a block: the anchor and `block_size - 1` mask tokens.
        sample_from_anchor (`bool`, *optional*, defaults to `True`):
            `True`: every slot proposes, slot `k` (from 0) the token `1 + k` places after the anchor (`block_size`
            drafts; DeepSpec). `False`: only the masks do, slot `k >= 1` the token `k` places after it
            (`block_size - 1` drafts; z-lab, transformers).
        mask_token_id (`int`, *optional*):
            Token whose embedding fills the slots behind the anchor.
        window_from_anchor (`bool`, *optional*, defaults to `False`):
            What `text_config.sliding_window` is counted from in the layers that `text_config.layer_types` names
            `"sliding_attention"`. `False`: from each slot, which sees positions less than the window away. `True`:
            from the anchor, and all slots see the same context (speculators).
        sliding_causal (`bool`, *optional*, defaults to `False`):
            Whether the slots of a block see only those before them in sliding layers.
        **kwargs:
            Arguments of [`DrafterConfig`].

    Example:

    ```python
    >>> from hf_dspark import DFlashConfig

    >>> config = DFlashConfig(target_layer_ids=[1, 9, 17], num_target_layers=24, mask_token_id=3)
    >>> config.num_drafts
    7
    ```
    """

    model_type = "dflash"

    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int | None = None
    window_from_anchor: bool = False
    sliding_causal: bool = False

    @property
    def num_drafts(self) -> int:
        """Most tokens that a round can propose."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def window(self, layer: int) -> Window | None:
        """How far a layer of the draft sees; `None` for all of the context."""
        if not self.is_sliding(layer):
            return None
        return Window(self.text_config.sliding_window, self.window_from_anchor, self.sliding_causal)

    def require_complete(self) -> None:
        super().require_complete()
        if any(map(self.is_sliding, range(self.num_hidden_layers))) and not getattr(
            self.text_config, "sliding_window", None
        ):
            raise ValueError(
                "`layer_types` names sliding layers, but no `sliding_window` is set (or `use_sliding_window` is off)."
            )
        if self.mask_token_id is None:
            raise ValueError(
                f"{type(self).__name__} has no `mask_token_id`: the token that fills a block behind its anchor can't "
                "be guessed. Add it to the checkpoint's config.json or pass `mask_token_id=...`."
            )
        if isinstance(self.target_layer_ids, str):
            raise ValueError(f"`target_layer_ids` {self.target_layer_ids!r} is for EAGLE-3 alone. Give the list.")
        # Some formats leave the vocabulary to the target.
        if self.mask_token_id < 0 or 0 < self.vocab_size <= self.mask_token_id:
            raise ValueError(f"`mask_token_id` {self.mask_token_id} is outside the vocabulary of {self.vocab_size}.")
        if self.num_drafts < 1:
            raise ValueError(
                f"`block_size` {self.block_size} with sample_from_anchor={self.sample_from_anchor} proposes nothing."
            )
