"""Configuration of EAGLE-3 drafters."""

from ..configuration_drafter import DrafterConfig


class Eagle3Config(DrafterConfig):
    """
    Configuration of an [`Eagle3Drafter`].

    Args:
        num_drafts (`int`, *optional*, defaults to 7):
            Most tokens that a round proposes; also the number of unrolled steps in training.
        step_loss_decay (`float`, *optional*, defaults to 0.8):
            Weight of training step `i` is `step_loss_decay ** i`.
        **kwargs:
            Arguments of [`DrafterConfig`].
    """

    model_type = "eagle3"

    num_drafts: int = 7
    step_loss_decay: float = 0.8
