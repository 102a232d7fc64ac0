"""Which part of a chat the target writes itself. Its tokenizer's chat template decides, and nothing is guessed."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template


Message = dict[str, Any]
Span = tuple[int, int]

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Where a message keeps what its writer thought.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# What templates put before an answer that was not thought about; the target did not write it.
_EMPTY_THINKING = re.compile(
    r"\s*(?:<(\w+)>\s*</\1>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>)\s*", re.IGNORECASE
)
_SPLIT_TURNS = (
    "Make an example of each assistant turn: what comes before it as `prompt`, the turn as `completion`. Or give "
    "`input_ids` and `loss_mask`."
)


def tokenize_chat(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    first: int = 0,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    finished: bool = True,
) -> tuple[list[int], list[int]]:
    """
    Tokens of a chat, and which of them the target writes: those that follow where it is asked to generate, up to the
    end of its turn. Where the template marks them (`{% generation %}`), its marks hold.

    Args:
        messages (`list[dict]`): The chat; tool calls and their results included.
        tokenizer (`PreTrainedTokenizerBase`): The target's, with a chat template.
        first (`int`, *optional*, defaults to 0): Assistant turns before this message are not supervised.
        tools (`list[dict]`, *optional*): JSON schemas of the tools that the template is given.
        template_kwargs (`dict`, *optional*): Further arguments of the template, such as `enable_thinking`.
        finished (`bool`, *optional*, defaults to `True`): Whether the last turn ended by itself; if not, the sequence
            stops where its text does.

    Returns:
        `tuple[list[int], list[int]]`: `input_ids` and `loss_mask`.

    Raises:
        ValueError: If the tokenizer has no chat template, the template refuses the messages, or what the target wrote
            can't be told from what the template made of it.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, so messages can't be turned into text. Use a target with one, or "
            "examples with `prompt` and `completion` as plain text."
        )

    def render(part: list[Message], add_generation_prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                part,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **(template_kwargs or {}),
            )
        except TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in part)
            raise ValueError(f"The chat template refuses a chat with the roles {roles}: {error}") from error

    text = render(messages)
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if _GENERATION_TAG.search(tokenizer.get_chat_template(None, tools)):
        spans = _marked_spans(messages, first, tokenizer, tools, template_kwargs or {})
    else:
        spans = [_turn_span(text, messages, i, render, tokenizer) for i in turns]
    _check_nothing_dropped([messages[i] for i in turns], "".join(text[start:end] for start, end in spans))
    if not any(_EMPTY_THINKING.match(_content(messages[i])) for i in turns):
        spans = [(_skip_empty_thinking(text, span), span[1]) for span in spans]
    if not finished and spans:
        text, spans = _cut_at_content(text, spans, messages[turns[-1]])
    return _encode(text, spans, tokenizer)


def around_user(tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False) -> tuple[str, str]:
    """What the chat template puts before and behind what the user writes, for a chat of one turn."""
    mark = "prompt-goes-here"
    turn = [{"role": "user", "content": mark}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=add_generation_prompt)
    before, _, after = text.partition(mark)
    return before, after


def _marked_spans(
    messages: list[Message],
    first: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any],
) -> list[Span]:
    """Spans that the template itself marks as generated, but for those in the messages before `first`."""

    def spans(part: list[Message]) -> list[Span]:
        _, found = render_jinja_template(
            [part],
            tools=tools,
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **template_kwargs},
        )
        return [tuple(span) for span in found[0]]

    return spans(messages)[len(spans(messages[:first])) if first else 0 :]


def _turn_span(
    text: str, messages: list[Message], i: int, render: Callable[..., str], tokenizer: PreTrainedTokenizerBase
) -> Span:
    """Where turn `i` stands in the whole text: what rendering it adds to the prompt that asks for it."""
    before = render(messages[:i], add_generation_prompt=True)
    through = text if i == len(messages) - 1 else render(messages[: i + 1])
    if not through.startswith(before):
        raise ValueError(
            "The chat template begins an assistant turn otherwise than its generation prompt does, so where the "
            "target starts to write can't be told. Mark it with `{% generation %}` in the template, or give "
            "`input_ids` and `loss_mask`."
        )
    start, end = len(before), _end_of_turn(through, len(before), tokenizer)
    if text[:end] != through[:end]:
        raise ValueError(
            "The chat template renders an assistant turn differently when more messages follow (as templates do that "
            f"drop earlier thinking), so a drafter would learn what is never decoded. {_SPLIT_TURNS}"
        )
    return start, end


def _end_of_turn(text: str, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """What the template puts behind the end of a turn is never generated."""
    eos = tokenizer.eos_token
    if eos and eos in text[start:]:
        return text.rindex(eos) + len(eos)
    # Chat models may end turns with a token of their own, which the tokenizer does not call its end.
    stripped = text.rstrip()
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return len(stripped) if len(stripped) > start and stripped.endswith(tuple(added)) else len(text)


def _skip_empty_thinking(text: str, span: Span) -> int:
    found = _EMPTY_THINKING.match(text, *span)
    return found.end() if found else span[0]


def _content(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _check_nothing_dropped(turns: list[Message], supervised: str) -> None:
    rendered = "".join(supervised.split())
    for message in turns:
        for name in ("content", *_THOUGHTS):
            value = _content(message) if name == "content" else message.get(name)
            if "".join((value or "").split()) not in rendered:
                raise ValueError(
                    f"The chat template drops or changes a part of an assistant turn's `{name}` "
                    f"({(value or '').strip()[:60]!r}), so the tokens would not be those that the target wrote. Give "
                    "`prompt_ids` and `completion_ids`, as `regenerate` writes them, or `input_ids` and `loss_mask`."
                )


def _cut_at_content(text: str, spans: list[Span], message: Message) -> tuple[str, list[Span]]:
    """An answer that was cut off, in its text or while it still thought, has no end."""
    thoughts = [message.get(name) for name in _THOUGHTS] if not message.get("tool_calls") else []
    (start, end), content = spans[-1], (_content(message) or next(filter(None, thoughts), "")).rstrip()
    place = text.rfind(content, start, end) if content else -1
    end = place + len(content) if place >= 0 else end
    return text[:end], [*spans[:-1], (start, end)]


def _encode(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokens of the text, split where the target starts and stops to write."""

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    whole, bounds = encode(text), sorted({0, len(text), *(place for span in spans for place in span)})
    prefixes = [encode(text[:place]) for place in bounds]
    if all(whole[: len(prefix)] == prefix for prefix in prefixes):
        places = [len(prefix) for prefix in prefixes]
    else:
        # A token would span a border. When decoding it can't: the prompt has been tokenized alone.
        whole, places = [], [0]
        for start, end in pairwise(bounds):
            whole += encode(text[start:end])
            places.append(len(whole))
    at = dict(zip(bounds, places))
    loss_mask = [0] * len(whole)
    for start, end in spans:
        loss_mask[at[start] : at[end]] = [1] * (at[end] - at[start])
    return whole, loss_mask
