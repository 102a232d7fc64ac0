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


class Pending:
    """What the drafter has not taken in yet: features of committed positions, each with the token behind it."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.features: list[torch.Tensor] = []
        self.places: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.total = 0

    def __len__(self) -> int:
        return self.total

    def add(self, features: torch.Tensor, tokens: dict[int, list[int]]) -> None:
        """
        Args:
            features (`torch.Tensor` of shape `(1, n, width)`): One row's positions after another's.
            tokens (`dict[int, list[int]]`): By row, in that order, the token behind each of its positions.
        """
        self.features.append(features)
        for row, following in tokens.items():
            self.places.setdefault(row, []).extend(range(self.total, self.total + len(following)))
            self.tokens.setdefault(row, []).extend(following)
            self.total += len(following)

    def take(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Everything that waits for the rows: features `(1, n, width)`, tokens `(1, n)` and how many are whose."""
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features, dim=1)
        places = [place for row in rows for place in self.places[row]]
        if places != list(range(self.total)):
            features = features.index_select(1, torch.tensor(places, device=features.device))
        tokens = torch.tensor([[token for row in rows for token in self.tokens[row]]], device=features.device)
        counts = [len(self.tokens[row]) for row in rows]
        self.clear()
        return features, tokens, counts
