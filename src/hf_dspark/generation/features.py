"""The target's features: the outputs of some of its layers, taken from a forward that happens anyway."""

from collections.abc import Sequence

import torch


def hidden_state_indices(target_layer_ids: Sequence[int]) -> list[int]:
    """What to pass as `output_hidden_states`, so that only the layers needed are kept: layer `i` is entry `i + 1`."""
    return sorted({i + 1 for i in target_layer_ids})


def concatenate_features(
    hidden_states: Sequence[torch.Tensor | None], target_layer_ids: Sequence[int]
) -> torch.Tensor:
    """
    Features of all positions of a target forward.

    Args:
        hidden_states (`Sequence[torch.Tensor]`): The forward's `hidden_states`, each `(rows, n, hidden_size)`.
        target_layer_ids (`Sequence[int]`): Layer ids, in the drafter's order.

    Returns:
        `torch.Tensor` of shape `(rows, n, layers * hidden_size)`.
    """
    return torch.cat([hidden_states[i + 1] for i in target_layer_ids], dim=-1)
