"""Configuration of DSpark drafters."""

from typing import Any

from ..dflash.configuration_dflash import DFlashConfig


MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DSparkConfig(DFlashConfig):
    """
    Configuration of a [`DSparkDrafter`]: a DFlash drafter with a serial head and a confidence head.

    Args:
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`):
            `"vanilla"`, `"gated"` or `"rnn"` (DSpark paper, section on the semi-autoregressive head).
        markov_rank (`int`, *optional*, defaults to 256):
            Rank of the serial head; 0 leaves it out.
        enable_confidence_head (`bool`, *optional*, defaults to `True`):
            Whether the drafter predicts, per drafted token, the probability of its acceptance.
        confidence_head_with_markov (`bool`, *optional*, defaults to `True`):
            Whether the confidence head also reads the serial head's embedding of the previous token.
        **kwargs:
            Arguments of [`DFlashConfig`].
    """

    model_type = "dspark"

    markov_head_type: str = "vanilla"
    markov_rank: int = 256
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(
                f"`markov_head_type` {self.markov_head_type!r} is unknown; choose one of {', '.join(MARKOV_HEADS)}."
            )
        self.confidence_head_with_markov = self.confidence_head_with_markov and self.markov_rank > 0
