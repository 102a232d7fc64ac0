"""The small heads of a DSpark drafter: serial (Markov) heads and the confidence head."""

import torch
from torch import nn


class MarkovHead(nn.Module):
    """
    Serial head: corrects a slot's logits by what was drafted right before it (DSpark paper, Markov head).

    The correction is `W2 · z`, where `z` (`latent`, of width `rank`) comes from the previous token's embedding `W1`.
    Subclasses compute another `z`. Keeping `z` apart from `W2` lets training add the correction chunk by chunk.

    Args:
        vocab_size (`int`): Tokens that can precede (the target's vocabulary).
        output_size (`int`): Tokens that can be drafted.
        hidden_size (`int`): Width of the block's hidden states.
        rank (`int`): Width of the head.
    """

    def __init__(self, vocab_size: int, output_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, output_size, bias=False)

    def initial_state(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """State before the first slot, for hidden states `[..., hidden_size]`."""
        return None

    def latent(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One slot: previous token's embedding `[..., rank]`, hidden `[..., hidden_size]` -> `z`, next state."""
        return embedded, state

    def latents(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All slots of a block at once, previous tokens known: `[..., block, rank]` -> `[..., block, rank]`."""
        return self.latent(embedded, hidden, None)[0]


class GatedMarkovHead(MarkovHead):
    """Markov head whose lookup is gated by the slot's hidden state: `z = σ(W [h ; e] + b) ⊙ e`."""

    def __init__(self, vocab_size: int, output_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, output_size, hidden_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def latent(self, embedded, hidden, state):
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state


class RNNMarkovHead(MarkovHead):
    """Markov head with a recurrent state inside the block, zero at its first slot."""

    def __init__(self, vocab_size: int, output_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, output_size, hidden_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def initial_state(self, hidden):
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def latent(self, embedded, hidden, state):
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def latents(self, embedded, hidden):
        state, slots = self.initial_state(hidden[..., 0, :]), []
        for k in range(hidden.shape[-2]):
            z, state = self.latent(embedded[..., k, :], hidden[..., k, :], state)
            slots.append(z)
        return torch.stack(slots, dim=-2)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """
    Logit of the probability that a slot's draft is accepted, given that those before it were. It reads the slot's
    hidden state and, if `markov_rank > 0`, the previous token's embedding, but never the drafted token itself.
    """

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        features = hidden if embedded is None else torch.cat([hidden, embedded], dim=-1)
        return self.proj(features).squeeze(-1)
