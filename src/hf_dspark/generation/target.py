"""
The target's side of a round: one forward over every row's anchor and the drafts to verify, and the caches behind it.
A single row lives in transformers' own cache, whatever kind that is; several live in a [`RowCache`].
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .attention import RowAttention
from .cache import forget_rejected, prepare_for_rollback, to_rows
from .features import concatenate_features
from .sequences import Sequences
from .statistics import Speculation


@dataclass
class Checked:
    """
    What a forward says about its tokens, row after row.

    Args:
        logits (`torch.Tensor` of shape `(tokens, vocab_size)`): The target's logits.
        hidden_states (`tuple[torch.Tensor]`): As transformers returns them, each `(1, tokens, hidden_size)`.
    """

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]

    def features(self, target_layer_ids: list[int], places: list[int]) -> torch.Tensor:
        """Features `(1, n, width)` of the tokens at `places`."""
        features = concatenate_features(self.hidden_states, target_layer_ids)
        if len(places) == features.shape[1]:
            return features
        if places[-1] - places[0] + 1 == len(places):
            return features[:, places[0] : places[-1] + 1]
        return features.index_select(1, torch.tensor(places, device=features.device))


class Target:
    """
    A target in one generation, with one row in transformers' own cache.

    Args:
        model (`PreTrainedModel`): The target.
        model_kwargs (`dict`): What `generate` prepared for its forwards.
        hidden_states (`list[int]` or `bool`): Passed to the forwards as `output_hidden_states`.
        speculation ([`Speculation`]): Counts and times the forwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        hidden_states: list[int] | bool,
        speculation: Speculation,
    ) -> None:
        self.model, self.speculation = model, speculation
        self.kwargs = {**model_kwargs, "output_hidden_states": hidden_states}

    def prefill(self, input_ids: torch.Tensor, config: Any) -> Any:
        """The forward over the prompt, behind what the cache holds already."""
        self.speculation.target_forwards += 1
        with self.speculation.timed("target", self.model.device):
            # transformers' own, since which inputs a filled cache still needs is its business.
            outputs = self.model._prefill(input_ids, config, self.kwargs)
        self._after_prefill(outputs)
        return outputs

    def check(self, sequences: Sequences, drafts: list[list[int]]) -> Checked:
        """The forward over the anchor of every row and the drafts behind it."""
        ids, num_verified = sequences.with_drafts(0, drafts[0]), len(drafts[0])
        kwargs = dict(self.kwargs)
        if num_verified:
            kwargs = self.model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=num_verified)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = num_verified + 1
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=num_verified + 1, is_first_iteration=False, **kwargs
        )
        return self._forward(inputs)

    def commit(self, drafts: list[list[int]], committed: list[int]) -> None:
        """Keeps of every row's last forward what its committed tokens leave valid."""
        forget_rejected(self.cache, len(drafts[0]), committed[0])
        self._advance(committed[0])

    def drop_row(self, place: int) -> None:
        """Takes a finished row out of the forwards. The last one stays: its cache may be wanted."""

    def _after_prefill(self, outputs: Any) -> None:
        self.cache = outputs.cache
        prepare_for_rollback(self.cache)
        self._advance(1)

    def _advance(self, num_new_tokens: int) -> None:
        outputs = {"cache": self.cache}
        self.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.kwargs, num_new_tokens=num_new_tokens
        )

    def _forward(self, inputs: dict[str, Any]) -> Checked:
        self.speculation.target_forwards += 1
        with self.speculation.timed("target", self.model.device):
            outputs = self.model(**inputs, return_dict=True)
        return Checked(outputs.logits[0], outputs.hidden_states)


class TargetOfRows(Target):
    """
    A target in one generation, with rows of their own lengths.

    Args:
        real (`torch.BoolTensor` of shape `(rows, length)`): What of the prompts is no padding.
        longest_forward (`int`): Most tokens that a round sends through the target for a row.
    """

    def __init__(self, *args: Any, real: torch.Tensor, longest_forward: int) -> None:
        super().__init__(*args)
        self.real, self.longest_forward = real, longest_forward
        self.attention = RowAttention(self.model)
        # Any mask of four dimensions is handed to the attention as it is, and ours needs none.
        self.no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=real.device)

    def check(self, sequences: Sequences, drafts: list[list[int]]) -> Checked:
        tokens = [token for place, row in enumerate(drafts) for token in (sequences.anchor(place), *row)]
        layout = self.cache.open([len(row) + 1 for row in drafts], self.real.device)
        inputs = {
            "input_ids": torch.tensor([tokens], device=self.real.device),
            "position_ids": layout.positions[None],
            "attention_mask": self.no_mask,
            "cache": self.cache,
            "use_cache": True,
            "output_hidden_states": self.kwargs["output_hidden_states"],
        }
        with self.attention.over(self.cache):
            return self._forward(inputs)

    def commit(self, drafts: list[list[int]], committed: list[int]) -> None:
        self.cache.commit(committed)

    def drop_row(self, place: int) -> None:
        self.cache.drop_row(place)

    def _after_prefill(self, outputs: Any) -> None:
        self.cache = to_rows(outputs.cache, self.real, self.longest_forward)
