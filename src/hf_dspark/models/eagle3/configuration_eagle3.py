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
        fc_norm (`bool`, *optional*, defaults to `False`):
            Whether each layer's feature is normed before `fc` projects them.
        norm_before_fc (`bool`, *optional*, defaults to `False`):
            Whether the concatenated features are normed as one before `fc`.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            Whether the layer's residual begins with the normed feature instead of the feature itself.
        norm_output (`bool`, *optional*, defaults to `False`):
            Whether what is fed back as the next position's feature has passed the final norm.
        **kwargs:
            Arguments of [`DrafterConfig`].
    """

    model_type = "eagle3"

    num_drafts: int = 7
    step_loss_decay: float | int = 0.8
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def require_complete(self) -> None:
        super().require_complete()
        if any(map(self.is_sliding, range(self.num_hidden_layers))):
            raise ValueError("`layer_types` names sliding layers, which EAGLE-3 drafters don't have here.")
