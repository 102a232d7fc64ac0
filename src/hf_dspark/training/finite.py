"""A step that meets NaN or infinity ends the run before it reaches a weight, and says where it came from."""

import torch

from ..models.drafter import Drafter, DrafterOutput
from .checkpoints import kept


_ADVICE = "Usual causes: float16 (use bfloat16 or float32), too high a learning rate, a damaged target or drafter."


def require_finite_loss(outputs: DrafterOutput, states: dict[str, torch.Tensor], step: int, output_dir: str) -> None:
    """
    Args:
        outputs ([`DrafterOutput`]): Of the training forward.
        states (`dict[str, torch.Tensor]`): What came from the target, by name.
        step (`int`): Updates done.
        output_dir (`str`): Where the run's checkpoints are.

    Raises:
        FloatingPointError: Naming what the target gave, or the terms of the loss.
    """
    if torch.isfinite(outputs.loss):
        return
    guilty = [name for name, state in states.items() if not torch.isfinite(state).all()]
    guilty = guilty or [f"the loss term `{n}`" for n, value in outputs.terms.items() if not value.isfinite().all()]
    raise FloatingPointError(
        f"Step {step + 1} met NaN or infinity in {', '.join(guilty) or 'the loss'}. No weight was changed by it. "
        f"{kept(output_dir)} {_ADVICE}"
    )


def require_finite_gradients(drafter: Drafter, step: int, output_dir: str) -> None:
    """
    Raises:
        FloatingPointError: Naming the parameters.
    """
    named = [(name, p.grad) for name, p in drafter.named_parameters() if p.grad is not None]
    if not named:
        return
    norms = torch.stack(torch._foreach_norm([gradient for _, gradient in named]))
    if torch.isfinite(norms).all():
        return
    guilty = [f"`{name}`" for (name, _), ok in zip(named, torch.isfinite(norms).tolist()) if not ok]
    more = f" and {len(guilty) - 3} more" if len(guilty) > 3 else ""
    raise FloatingPointError(
        f"Step {step + 1} met NaN or infinity in the gradient of {', '.join(guilty[:3])}{more}. No weight was changed "
        f"by it. {kept(output_dir)} {_ADVICE}"
    )
