"""From conversations to supervised token sequences, and from those to batches with anchors."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from .anchors import draw_anchors
from .chat import tokenize_chat


logger = logging.get_logger(__name__)

Tokens = tuple[list[int], list[int]]
# Columns of examples that are tokens already, whatever else they hold.
TOKENS = (("input_ids", "loss_mask"), ("prompt_ids", "completion_ids"))


def tokenize_example(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Tokens:
    """
    Tokens of one example, and which of them are supervised (those that the target writes).

    Args:
        example (`dict`): One of

            - `{"input_ids": [...], "loss_mask": [...]}`: tokens as they are;
            - `{"prompt_ids": [...], "completion_ids": [...]}`: an answer's exact tokens, which are supervised;
            - `{"messages": [...]}`: a chat; every assistant turn is supervised;
            - `{"prompt": [...], "completion": [...]}`: two parts of a chat; the completion is supervised;
            - `{"prompt": str, "completion": str}`: plain text; the completion is supervised;
            - `{"text": str}`: plain text, all of it supervised.

            Chats may come with `tools` (JSON schemas) and `chat_template_kwargs` (such as `enable_thinking`), and a
            false `finished` says that the last answer was cut off, so that no end belongs to it.
        tokenizer (`PreTrainedTokenizerBase`): The target's.

    Returns:
        `tuple[list[int], list[int]]`: `input_ids` and `loss_mask`.

    Raises:
        ValueError: If the example is of none of these forms, or its tokens can't be told apart.
    """
    # `datasets` fills with None what other rows have and this one lacks.
    example = {name: value for name, value in example.items() if value is not None}
    if "input_ids" in example and "loss_mask" in example:
        input_ids, loss_mask = list(example["input_ids"]), list(example["loss_mask"])
        if len(input_ids) != len(loss_mask):
            raise ValueError(
                f"An example has {len(input_ids)} `input_ids` and {len(loss_mask)} entries in `loss_mask`."
            )
        if not set(loss_mask) <= {0, 1}:
            raise ValueError(
                "The `loss_mask` of an example holds other values than 0 and 1. It says which tokens are supervised; "
                "where labels are -100, it is 0."
            )
        return input_ids, loss_mask
    if "prompt_ids" in example and "completion_ids" in example:
        return _join_ids(example, tokenizer)
    if tokenizer is None:
        raise ValueError("Text needs a tokenizer: pass the target's as `processing_class=`.")
    if "messages" in example:
        return _tokenize_messages(example["messages"], 0, example, tokenizer)
    if "prompt" in example and "completion" in example:
        prompt, completion = example["prompt"], example["completion"]
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError(
                "The `prompt` and the `completion` of an example must both be text, or both lists of messages; they "
                f"are a {type(prompt).__name__} and a {type(completion).__name__}."
            )
        if isinstance(prompt, str):
            return _tokenize_text(prompt, completion, example.get("finished", True), tokenizer)
        return _tokenize_messages([*prompt, *completion], len(prompt), example, tokenizer)
    if "text" in example:
        return _tokenize_text("", example["text"], True, tokenizer)
    if "conversations" in example:
        raise ValueError(
            "An example has `conversations`. Rename them to `messages`, each with `role` and `content` (where it has "
            "`from` and `value`, those; `human` is `user` and `gpt` is `assistant`)."
        )
    raise ValueError(
        f"An example has the columns {sorted(example)}. Expected `messages`, or `prompt` and `completion`, or `text`, "
        "or `prompt_ids` and `completion_ids`, or `input_ids` and `loss_mask`."
    )


def _join_ids(example: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Tokens:
    before, after, completion = example["prompt_ids"], example["completion_ids"], example.get("completion")
    text = completion if isinstance(completion, str) else completion and completion[-1].get("content")
    if tokenizer is not None and isinstance(text, str):
        decoded = tokenizer.decode(after, skip_special_tokens=True)
        if "".join(text.split()) not in "".join(decoded.split()):
            raise ValueError(
                f"The `completion_ids` of an example read {decoded[:40]!r} and its `completion` {text[:40]!r}: they "
                "were written with another tokenizer. Remove the columns `prompt_ids` and `completion_ids`, or "
                "regenerate the answers."
            )
    return [*before, *after], [0] * len(before) + [1] * len(after)


def _tokenize_text(prompt: str, completion: str, finished: bool, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    before = tokenizer(prompt)["input_ids"] if prompt else []
    after = tokenizer(completion, add_special_tokens=not prompt)["input_ids"]
    after = after + [tokenizer.eos_token_id] * (finished and tokenizer.eos_token_id is not None)
    return before + after, [0] * len(before) + [1] * len(after)


def _tokenize_messages(
    messages: list[dict[str, Any]], first: int, example: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Tokens:
    messages = without_none(messages)
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(
            "A chat must be a list of messages, each with `role` and `content`; an example holds "
            f"{str(messages)[:60]!r}."
        )
    return tokenize_chat(
        messages,
        tokenizer,
        first,
        tools=without_none(example.get("tools")) or None,
        template_kwargs=without_none(example.get("chat_template_kwargs")),
        finished=example.get("finished", True),
    )


def without_none(value: Any) -> Any:
    """Without the keys that `datasets` filled with None because other rows have them."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def rows_to_dataset(rows: list[dict[str, Any]]) -> Any:
    """
    A `datasets.Dataset` of rows that need not have the same keys, as tool calls differ in their arguments.

    Raises:
        TypeError: If a row is no dict.
    """
    from datasets import Dataset

    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise TypeError(f"Examples come as a `datasets.Dataset` or a list of dicts; one is a {type(wrong).__name__}.")
    columns = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_list([dict.fromkeys(columns) | row for row in rows], on_mixed_types="use_json")


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
        dataset = rows_to_dataset(dataset)
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
        if len(dataset) < before:
            logger.warning(
                "%d of %d examples have no two supervised tokens in a row within %d tokens and are left out.",
                before - len(dataset),
                before,
                max_length,
            )
    return dataset


def require_known_tokens(dataset: Any, vocab_size: int) -> None:
    """
    Raises:
        ValueError: If an example holds a token that the target doesn't have.
    """
    for i, ids in enumerate(dataset["input_ids"]):
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(
                f"Example {i} holds token {max(ids) if max(ids) >= vocab_size else min(ids)}, and the target's "
                f"vocabulary has {vocab_size}: it was tokenised for another model. Give its text instead, or the "
                "tokens of this target's tokenizer."
            )


def require_positions(dataset: Any, target: PreTrainedConfig) -> None:
    """
    Warns of examples that are longer than the target was made for; where it embeds positions, they can't be read.

    Args:
        dataset (`datasets.Dataset`): Examples with `input_ids`.
        target (`PreTrainedConfig`): The target's text config.

    Raises:
        ValueError: If the target has no embedding for an example's last position.
    """
    rope, most = getattr(target, "rope_parameters", None), getattr(target, "max_position_embeddings", None)
    longest = max(map(len, dataset["input_ids"]))
    # Scaled rotary embeddings reach further than the number says.
    if most is None or longest <= most or (rope and rope.get("rope_type", "default") != "default"):
        return
    told = (
        f"The longest example has {longest} tokens, and the target was made for {most}: `max_length={most}` cuts it."
    )
    if not rope:
        raise ValueError(told)
    logger.warning("%s Beyond them its features may mean little.", told)


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
