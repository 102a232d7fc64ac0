"""A target on this machine that continues many prompts at once."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class LocalTarget:
    """
    Batched generation whose result depends on the batch and its seed alone.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer."""
        ids = self.model.generation_config.eos_token_id
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @property
    def context_length(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def generation_config(
        self, max_new_tokens: int, temperature: float | None, top_p: float | None, top_k: int | None
    ) -> GenerationConfig:
        """The target's own settings with what is given; a temperature alone samples from the whole distribution."""
        config = GenerationConfig.from_dict(self.model.generation_config.to_dict())
        changes: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_length": None, "eos_token_id": self.end_ids}
        if temperature == 0:
            changes |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        elif temperature is not None:
            changes |= {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}
        else:
            changes |= {"top_p": top_p} if top_p is not None else {}
            changes |= {"top_k": top_k} if top_k is not None else {}
            changes |= {"do_sample": True} if (top_p, top_k) != (None, None) else {}
        pad = self.tokenizer.pad_token_id
        changes["pad_token_id"] = (self.end_ids or [0])[0] if pad is None else pad
        config.update(**changes)
        return config

    @torch.no_grad()
    def continue_all(self, prompts: list[list[int]], config: GenerationConfig, seed: int) -> list[list[int]]:
        """
        Continues all prompts at once.

        Args:
            prompts (`list[list[int]]`): Token ids.
            config (`GenerationConfig`): From [`~LocalTarget.generation_config`].
            seed (`int`): The batch's; the caller's random state is left as it was.

        Returns:
            `list[list[int]]`: The new tokens of each, its end included where it came to one.
        """
        device, longest = self.model.device, max(map(len, prompts))
        ids = torch.full((len(prompts), longest), config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                output = self.model.generate(
                    input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config
                )
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"Out of memory with {len(prompts)} prompts of up to {longest} tokens at once. Start the same "
                    "command again with a smaller batch size; the answers that are there are kept."
                ) from error
        return [_until_end(row, config.eos_token_id) for row in output[:, longest:].tolist()]


def _until_end(ids: list[int], end_ids: list[int]) -> list[int]:
    ends = [ids.index(end) for end in end_ids if end in ids]
    return ids[: min(ends) + 1] if ends else ids
