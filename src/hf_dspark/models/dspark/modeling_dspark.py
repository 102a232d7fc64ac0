"""DSpark: DFlash with a serial head inside the block and a confidence head (arXiv 2607.05147)."""

import torch

from ..dflash.modeling_dflash import DFlashDrafter, stack_proposal
from ..drafter import Draw, Proposal, largest_probability
from ..heads import MARKOV_HEADS, ConfidenceHead
from ..losses import LossWeights
from .configuration_dspark import DSparkConfig


class DSparkDrafter(DFlashDrafter):
    """
    Semi-autoregressive block drafter (DSpark paper): DFlash's parallel backbone, then a small serial head that lets
    each slot know the token drafted before it, and a confidence head that predicts which drafts will be accepted.

    Args:
        config ([`DSparkConfig`]): The configuration.

    Example:

    ```python
    >>> from hf_dspark import DSparkDrafter

    >>> drafter = DSparkDrafter.from_pretrained("my-dspark-drafter")  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter, assistant_confidence_threshold=0.4)  # doctest: +SKIP
    ```
    """

    config_class = DSparkConfig
    config: DSparkConfig
    default_loss = LossWeights(cross_entropy=0.1, l1=0.9, confidence=1.0)

    def _build_heads(self, config: DSparkConfig) -> None:
        self.markov_head = self.confidence_head = None
        width = config.hidden_size
        if config.markov_rank:
            head = MARKOV_HEADS[config.markov_head_type]
            self.markov_head = head(config.vocab_size, config.output_size, width, config.markov_rank)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(
                width, config.markov_rank if config.confidence_head_with_markov else 0
            )

    def confidence_logits(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """Confidence logits `[...]` of slots' hidden states and their previous tokens' embeddings `[..., rank]`."""
        return self.confidence_head(hidden, embedded if self.config.confidence_head_with_markov else None)

    def draft_tokens(
        self, hidden: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, draw: Draw | None
    ) -> Proposal:
        tokens, probabilities, confidences = [], [], []
        previous = anchors
        state = self.markov_head.initial_state(hidden[:, 0]) if self.markov_head is not None else None
        for k in range(logits.shape[1]):
            scores, embedded = logits[:, k], None
            if self.markov_head is not None:
                embedded = self.markov_head.markov_w1(previous)
                latent, state = self.markov_head.latent(embedded, hidden[:, k], state)
                scores = scores + self.markov_head.markov_w2(latent).float()
            if self.confidence_head is None:
                confidences.append(largest_probability(scores))
            else:
                confidences.append(self.confidence_logits(hidden[:, k], embedded).float().sigmoid())
            previous, q = self.pick(scores, tokens, draw)
            tokens.append(previous)
            probabilities.append(q)
        return stack_proposal(tokens, probabilities, torch.stack(confidences, dim=1))

    def serial_terms(
        self, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        latents = embedded = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous)
            latents = self.markov_head.latents(embedded, hidden)
        confidence = self.confidence_logits(hidden, embedded) if self.confidence_head is not None else None
        return latents, confidence
