"""From conversations to supervised token sequences, and from those to batches with anchors."""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .anchors import draw_anchors


Tokens = tuple[list[int], list[int]]


def tokenize_example(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Tokens:
    """
    Tokens of one example, and which of them are supervised (the assistant's).

    Args:
        example (`dict`): One of

            - `{"input_ids": [...], "loss_mask": [...]}`: tokens as they are;
            - `{"messages": [...]}`: a chat; every assistant turn is supervised;
            - `{"prompt": [...], "completion": [...]}`: two parts of a chat; the completion is supervised;
            - `{"prompt": str, "completion": str}`: plain text.
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Returns:
        `tuple[list[int], list[int]]`: `input_ids` and `loss_mask`.

    Raises:
        ValueError: If the example is of none of these forms, or its tokens can't be told apart.
    """
    if "input_ids" in example and "loss_mask" in example:
        input_ids, loss_mask = list(example["input_ids"]), list(example["loss_mask"])
        if len(input_ids) != len(loss_mask):
            raise ValueError(
                f"An example has {len(input_ids)} `input_ids` and {len(loss_mask)} entries in `loss_mask`."
            )
        return input_ids, loss_mask
    if tokenizer is None:
        raise ValueError("Text needs a tokenizer: pass the target's as `processing_class=`.")
    if "messages" in example:
        return _tokenize_chat(example["messages"], 0, tokenizer)
    if "prompt" in example and "completion" in example:
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, str):
            return _tokenize_text(prompt, completion, tokenizer)
        return _tokenize_chat([*prompt, *completion], len(prompt), tokenizer)
    raise ValueError(
        f"An example has the columns {sorted(example)}. Expected `messages`, or `prompt` and `completion`, or "
        "`input_ids` and `loss_mask`."
    )


def _tokenize_text(prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    before = tokenizer(prompt)["input_ids"]
    after = tokenizer(completion, add_special_tokens=False)["input_ids"]
    after = after + [tokenizer.eos_token_id] * (tokenizer.eos_token_id is not None)
    return before + after, [0] * len(before) + [1] * len(after)


def _tokenize_chat(messages: list[dict[str, Any]], first: int, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Supervises the assistant turns from message `first` on; where a turn begins and ends the template decides."""
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, so messages can't be turned into text. Use a target with one, or "
            "examples with `prompt` and `completion` as plain text."
        )

    def render(part: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        return tokenizer.apply_chat_template(part, tokenize=True, return_dict=True, **kwargs)["input_ids"]

    input_ids = render(messages)
    loss_mask = [0] * len(input_ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        before, through = render(messages[:i], add_generation_prompt=True), render(messages[: i + 1])
        if input_ids[: len(through)] != through or through[: len(before)] != before:
            raise ValueError(
                "The chat template renders an assistant turn differently when more messages follow, so its tokens "
                "can't be told apart. Give conversations with one assistant turn each, or `input_ids` and `loss_mask`."
            )
        end = len(through)
        # What the template puts behind the end of a turn is never generated.
        if tokenizer.eos_token_id in through[len(before) :]:
            end -= through[::-1].index(tokenizer.eos_token_id)
        loss_mask[len(before) : end] = [1] * (end - len(before))
    return input_ids, loss_mask


def prepare_dataset(dataset: Any, tokenizer: PreTrainedTokenizerBase | None, max_length: int) -> Any:
    """
    A dataset of `input_ids` and `loss_mask`, cut at `max_length`.

    Args:
        dataset (`datasets.Dataset`, iterable dataset, `list` or `dict`):
            Examples as in [`tokenize_example`]; a `dict` of several datasets is prepared one by one, `None` stays.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        max_length (`int`): Tokens kept of an example.

    Raises:
        TypeError: If it is no dataset.
        ValueError: If no token of the dataset is supervised.
    """
    if dataset is None:
        return None
    if isinstance(dataset, dict) and not hasattr(dataset, "map"):
        return {name: prepare_dataset(part, tokenizer, max_length) for name, part in dataset.items()}
    if isinstance(dataset, list):
        from datasets import Dataset

        dataset = Dataset.from_list(dataset)
    if not hasattr(dataset, "map"):
        raise TypeError(f"Examples come as a `datasets.Dataset` or a list of dicts, not as {type(dataset).__name__}.")

    def tokenize(example: dict[str, Any]) -> dict[str, list[int]]:
        input_ids, loss_mask = tokenize_example(example, tokenizer)
        return {"input_ids": input_ids[:max_length], "loss_mask": loss_mask[:max_length]}

    columns = dataset.column_names
    extra = [c for c in columns or [] if c not in ("input_ids", "loss_mask")]
    dataset = dataset.map(tokenize, remove_columns=extra)
    if hasattr(dataset, "__len__"):
        before = len(dataset)
        # Two supervised tokens in a row make the smallest block.
        dataset = dataset.filter(lambda e: any(a and b for a, b in zip(e["loss_mask"], e["loss_mask"][1:])))
        if len(dataset) == 0:
            raise ValueError(
                f"None of the {before} examples has two supervised tokens in a row within {max_length} tokens, so "
                "there is nothing to learn. Check that they have assistant turns and that `max_length` reaches them."
            )
    return dataset


class DraftCollator:
    """
    Pads examples on the right and draws their anchors.

    Args:
        pad_token_id (`int`): Fills the padding.
        num_anchors (`int`): Anchors per sequence at most.
        seed (`int`): Seed of the anchors.

    Attributes:
        epoch (`int`): Changes the draw; the trainer counts it up.
    """

    def __init__(self, pad_token_id: int, num_anchors: int, seed: int) -> None:
        self.pad_token_id = pad_token_id
        self.num_anchors = num_anchors
        self.seed = seed
        self.epoch = 0

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [torch.as_tensor(e["input_ids"]) for e in examples]
        masks = [torch.as_tensor(e["loss_mask"]) for e in examples]
        seed = self.seed * 1_000_003 + self.epoch
        anchors = [draw_anchors(i, m, self.num_anchors, seed) for i, m in zip(ids, masks)]
        anchor_masks = [torch.ones_like(a, dtype=torch.bool) for a in anchors]
        if not any(len(a) for a in anchors):
            # A batch without a block would have tensors without a size; it has one that doesn't count.
            anchors, anchor_masks = ([a.new_zeros(1) for a in part] for part in (anchors, anchor_masks))
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(ids, batch_first=True, padding_value=self.pad_token_id),
            "loss_mask": pad(masks, batch_first=True),
            "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
            "anchors": pad(anchors, batch_first=True),
            "anchor_mask": pad(anchor_masks, batch_first=True),
        }
