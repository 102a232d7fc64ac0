"""What is supervised: exactly what the assistant generates, its end of turn included, and nothing behind it."""

import pytest
import torch
from conftest import CHAT_TEMPLATE, make_tokenizer
from datasets import Dataset

from hf_dspark.training.data import DraftCollator, prepare_dataset, tokenize_example


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6."},
]


def supervised_text(tokenizer, input_ids: list[int], loss_mask: list[int]) -> list[str]:
    """The supervised runs, as text."""
    runs, previous = [], 0
    for token, flag in zip(input_ids, loss_mask, strict=True):
        if flag and not previous:
            runs.append([])
        if flag:
            runs[-1].append(token)
        previous = flag
    return [tokenizer.decode(run) for run in runs]


def test_every_assistant_turn_of_a_chat_is_supervised_up_to_its_end(tiny_tokenizer):
    ids, mask = tokenize_example({"messages": CHAT}, tiny_tokenizer)
    assert supervised_text(tiny_tokenizer, ids, mask) == ["4.<|im_end|>", "It is 6.<|im_end|>"]
    assert tiny_tokenizer.decode(ids) == tiny_tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_an_answer_is_seen_behind_what_generation_would_see(tiny_tokenizer):
    """A drafter learns the prompt that decoding will give it."""
    ids, mask = tokenize_example({"messages": CHAT[:3]}, tiny_tokenizer)
    prompt = tiny_tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[: mask.index(1)] == prompt


def test_messages_of_a_completion_are_supervised_and_those_of_the_prompt_are_not(tiny_tokenizer):
    chat = tokenize_example({"prompt": CHAT[:4], "completion": CHAT[4:]}, tiny_tokenizer)
    assert supervised_text(tiny_tokenizer, *chat) == ["It is 6.<|im_end|>"]
    assert chat[0] == tokenize_example({"messages": CHAT}, tiny_tokenizer)[0]


def test_a_plain_completion_ends_with_the_end_token(tiny_tokenizer):
    ids, mask = tokenize_example({"prompt": "2 + 2 =", "completion": " 4"}, tiny_tokenizer)
    assert tiny_tokenizer.decode(ids) == "2 + 2 = 4<|im_end|>"
    assert supervised_text(tiny_tokenizer, ids, mask) == [" 4<|im_end|>"]


def test_tokens_are_taken_as_they_are_and_need_no_tokenizer():
    example = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "source": "somewhere"}
    assert tokenize_example(example, None) == ([5, 6, 7], [0, 1, 1])


def test_tokens_and_mask_of_different_length_are_refused():
    with pytest.raises(ValueError, match="3 `input_ids` and 2 entries in `loss_mask`"):
        tokenize_example({"input_ids": [5, 6, 7], "loss_mask": [0, 1]}, None)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="pass the target's as `processing_class=`"):
        tokenize_example({"messages": CHAT}, None)


def test_unknown_columns_are_refused_by_name(tiny_tokenizer):
    with pytest.raises(ValueError, match=r"columns \['answer', 'question'\].*`messages`"):
        tokenize_example({"question": "2 + 2?", "answer": "4"}, tiny_tokenizer)


def test_conversations_of_another_form_are_told_what_to_do(tiny_tokenizer):
    with pytest.raises(ValueError, match=r"Rename them to `messages`, each with `role` and `content`"):
        tokenize_example({"conversations": [{"from": "human", "value": "2 + 2?"}]}, tiny_tokenizer)


def test_a_tokenizer_without_chat_template_is_refused(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_example({"messages": CHAT}, tiny_tokenizer)
    assert tokenize_example({"prompt": "a", "completion": "b"}, tiny_tokenizer)[1] == [0, 1, 1]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_tokenizer, monkeypatch):
    """As templates do that drop the thinking of all turns but the last."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="renders an assistant turn differently when more messages follow"):
        tokenize_example({"messages": CHAT}, tiny_tokenizer)
    ids, mask = tokenize_example({"messages": CHAT[:3]}, tiny_tokenizer)
    assert supervised_text(tiny_tokenizer, ids, mask) == ["4.<|im_end|>"]


THINKING_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools[0]['function']['name'] }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m['reasoning_content'] or '' }}\n</think>\n\n"
    "{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}"
    "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}<think>\n\n</think>\n\n{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def with_template(monkeypatch, tiny_tokenizer):
    def use(template: str):
        monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
        return tiny_tokenizer

    return use


def supervised(tokenizer, example) -> list[str]:
    return supervised_text(tokenizer, *tokenize_example(example, tokenizer))


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": False}, {"enable_thinking": True}])
def test_an_empty_think_block_of_the_template_is_not_supervised(with_template, kwargs):
    tokenizer = with_template(THINKING_TEMPLATE)
    example = {"prompt": CHAT[:2], "completion": [CHAT[2]], "chat_template_kwargs": kwargs}
    assert supervised(tokenizer, example) == ["4.<|im_end|>"]


def test_thinking_of_the_target_s_own_is_supervised(with_template):
    turn = {"role": "assistant", "content": "4.", "reasoning_content": "2 and 2"}
    found = supervised(with_template(THINKING_TEMPLATE), {"prompt": CHAT[:2], "completion": [turn]})
    assert found == ["<think>\n2 and 2\n</think>\n\n4.<|im_end|>"]


def test_a_template_that_drops_thinking_is_refused(with_template, tiny_tokenizer):
    turn = {"role": "assistant", "content": "4.", "reasoning_content": "2 and 2"}
    with pytest.raises(ValueError, match=r"drops .*`reasoning_content` \('2 and 2'\).*`completion_ids`"):
        tokenize_example({"prompt": CHAT[:2], "completion": [turn]}, tiny_tokenizer)


def test_earlier_turns_that_the_template_edits_may_stand_in_the_prompt(with_template):
    tokenizer = with_template(THINKING_TEMPLATE)
    with pytest.raises(ValueError, match="Make an example of each assistant turn"):
        tokenize_example({"messages": CHAT}, tokenizer)
    assert supervised(tokenizer, {"prompt": CHAT[:4], "completion": CHAT[4:]}) == ["It is 6.<|im_end|>"]


def test_tool_calls_are_supervised_and_their_results_are_not(with_template):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    messages = [
        CHAT[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = with_template(THINKING_TEMPLATE.replace("and loop.last", "and false"))
    example = {"messages": messages, "tools": [tool]}
    assert supervised(tokenizer, example) == ['<call>add {"a": 2, "b": 2}</call><|im_end|>', "It is 4.<|im_end|>"]
    ids, _ = tokenize_example(example, tokenizer)
    assert tokenizer.decode(ids).startswith("<|im_start|>tools\nadd<|im_end|>")
    # `datasets` fills the keys that a row lacks.
    filled = [{"content": None, "tool_calls": None, "name": None} | message for message in messages]
    assert tokenize_example({"messages": filled, "tools": [tool], "prompt": None}, tokenizer)[0] == ids


def test_marks_of_the_template_hold(with_template):
    tokenizer = with_template(MARKING_TEMPLATE)
    assert supervised(tokenizer, {"messages": CHAT}) == ["4.<|im_end|>", "It is 6.<|im_end|>"]
    assert supervised(tokenizer, {"prompt": CHAT[:4], "completion": CHAT[4:]}) == ["It is 6.<|im_end|>"]


def test_a_turn_that_begins_otherwise_than_its_prompt_is_refused(with_template):
    template = CHAT_TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>model\n'")
    with pytest.raises(ValueError, match=r"begins an assistant turn otherwise.*\{% generation %\}"):
        tokenize_example({"messages": CHAT[:3]}, with_template(template))


def test_a_template_s_own_refusal_is_told(with_template):
    tokenizer = with_template("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(
        ValueError, match="refuses a chat with the roles system, user, assistant: Roles must alternate"
    ):
        tokenize_example({"messages": CHAT[:3]}, tokenizer)


def test_turns_may_end_with_another_token_than_the_tokenizer_s(with_template, monkeypatch):
    tokenizer = with_template(CHAT_TEMPLATE.replace("<|im_end|>", "<|reserved_0|>"))
    assert supervised(tokenizer, {"messages": CHAT[:3]}) == ["4.<|reserved_0|>"]


def test_an_answer_cut_off_has_no_end(tiny_tokenizer):
    example = {"prompt": CHAT[:2], "completion": [CHAT[2]], "finished": False}
    ids, mask = tokenize_example(example, tiny_tokenizer)
    assert supervised_text(tiny_tokenizer, ids, mask) == ["4."]
    assert tiny_tokenizer.decode(ids).endswith("assistant\n4.")
    text = {"prompt": "2 + 2 =", "completion": " 4", "finished": False}
    assert supervised(tiny_tokenizer, text) == [" 4"]


def test_an_answer_cut_off_while_it_thinks_has_no_end(with_template):
    answer = {"role": "assistant", "content": "", "reasoning_content": "2 and"}
    example = {"prompt": CHAT[:2], "completion": [answer], "finished": False}
    assert supervised(with_template(THINKING_TEMPLATE), example) == ["<think>\n2 and"]


@pytest.mark.parametrize("wrong", [-100, 2, 0.5])
def test_a_loss_mask_of_other_values_is_refused(wrong):
    with pytest.raises(ValueError, match="other values than 0 and 1"):
        tokenize_example({"input_ids": [3, 4, 5], "loss_mask": [wrong, 1, 1]}, None)


def test_prompt_and_answer_are_tokenized_apart_where_a_token_would_join_them():
    """As in decoding, where the prompt is there first."""
    from tokenizers import models

    tokenizer = make_tokenizer()
    vocabulary = {t: i for t, i in tokenizer.get_vocab().items() if i < 256} | {"\u010a\u010a": 300}
    tokenizer.backend_tokenizer.model = models.BPE(vocab=vocabulary, merges=[("\u010a", "\u010a")])
    chat = [*CHAT[:2], {"role": "assistant", "content": "\n\n4."}]
    assert 300 in tokenizer.apply_chat_template(chat)["input_ids"]
    ids, mask = tokenize_example({"messages": chat}, tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True)["input_ids"]
    assert ids[: mask.index(1)] == prompt
    assert supervised_text(tokenizer, ids, mask) == ["\n\n4.<|im_end|>"]


def test_exact_tokens_of_an_answer_are_taken_before_its_text(tiny_tokenizer):
    completion_ids = [70, 71, tiny_tokenizer.eos_token_id]
    example = {"prompt_ids": [1, 2], "completion_ids": completion_ids}
    assert tokenize_example(example, None) == ([1, 2, *completion_ids], [0, 0, 1, 1, 1])
    text = tiny_tokenizer.decode([70, 71])
    chat = example | {"prompt": CHAT[:2], "completion": [{"role": "assistant", "content": text}]}
    assert tokenize_example(chat, tiny_tokenizer)[0] == [1, 2, *completion_ids]


def test_tokens_of_another_tokenizer_are_refused(tiny_tokenizer):
    example = {"prompt_ids": [1], "completion_ids": [70, 71], "prompt": CHAT[:2], "completion": [CHAT[2]]}
    with pytest.raises(ValueError, match=r"`completion` '4\.': they were written with another tokenizer"):
        tokenize_example(example, tiny_tokenizer)


def test_plain_text_is_supervised_as_a_whole(tiny_tokenizer):
    assert supervised(tiny_tokenizer, {"text": "Once upon"}) == ["Once upon<|im_end|>"]


@pytest.mark.real
def test_the_real_template(real_target):
    _, tokenizer = real_target
    assert supervised(tokenizer, {"messages": CHAT}) == ["4.<|im_end|>", "It is 6.<|im_end|>"]


def test_a_dataset_becomes_tokens_cut_at_the_longest_length(tiny_tokenizer):
    data = Dataset.from_list([{"messages": CHAT, "id": 1}])
    ids, mask = tokenize_example({"messages": CHAT}, tiny_tokenizer)
    length = mask.index(1) + 3
    prepared = prepare_dataset(data, tiny_tokenizer, length)
    assert prepared.to_list() == [{"input_ids": ids[:length], "loss_mask": mask[:length]}]


def test_examples_that_teach_nothing_are_left_out(tiny_tokenizer):
    data = Dataset.from_list([{"messages": CHAT[:2]}, {"messages": CHAT[:3]}])
    assert len(prepare_dataset(data, tiny_tokenizer, 200)) == 1


@pytest.mark.parametrize("messages,max_length", [(CHAT[:2], 200), (CHAT, 8)], ids=["no answer", "cut before it"])
def test_nothing_supervised_is_an_error(tiny_tokenizer, messages, max_length):
    data = Dataset.from_list([{"messages": messages}] * 2)
    with pytest.raises(ValueError, match=f"None of the 2 examples .* within {max_length} tokens"):
        prepare_dataset(data, tiny_tokenizer, max_length)


def test_batches_are_padded_on_the_right_and_padding_is_neither_attended_nor_supervised():
    collate = DraftCollator(pad_token_id=9, num_anchors=2, seed=0)
    batch = collate(
        [
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]},
            {"input_ids": [5, 6], "loss_mask": [1, 1]},
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 9, 9]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["anchors"].tolist() == [[1, 2], [0, 0]]
    assert batch["anchor_mask"].tolist() == [[True, True], [True, False]]


def test_a_batch_without_any_anchor_keeps_a_shape():
    batch = DraftCollator(pad_token_id=9, num_anchors=2, seed=0)([{"input_ids": [5, 6], "loss_mask": [0, 0]}] * 2)
    assert batch["anchors"].shape == batch["anchor_mask"].shape == (2, 1)
    assert not torch.any(batch["anchor_mask"])


def test_rows_of_a_list_keep_the_keys_that_the_first_one_lacks(tiny_tokenizer):
    whole, cut = {"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "ce", "finished": False}
    for rows in ([whole, cut], [cut, whole]):
        prepared = {tiny_tokenizer.decode(row["input_ids"]) for row in prepare_dataset(rows, tiny_tokenizer, 64)}
        assert prepared == {"abcd<|im_end|>", "abce"}
    prepared = prepare_dataset([{"text": "abc"}, whole], tiny_tokenizer, 64)
    assert [sum(row["loss_mask"]) for row in prepared] == [4, 3]
    with pytest.raises(TypeError, match="a list of dicts; one is a str"):
        prepare_dataset([whole, "text"], tiny_tokenizer, 64)


def test_left_out_examples_are_counted(tiny_tokenizer, caplog):
    rows = [{"prompt": "x" * 40, "completion": "never reached"}, {"prompt": "x", "completion": "reached"}]
    with caplog.at_level("WARNING"):
        assert len(prepare_dataset(rows, tiny_tokenizer, 32)) == 1
    assert "1 of 2 examples have no two supervised tokens in a row within 32 tokens" in caplog.text


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": CHAT[:2], "completion": "text"}, "must both be text, or both lists of messages; they are a list"),
        ({"prompt": "text", "completion": CHAT[2:3]}, "they are a str and a list"),
        ({"messages": [CHAT]}, "A chat must be a list of messages, each with `role` and `content`"),
        ({"messages": "hello"}, "A chat must be a list of messages"),
    ],
)
def test_parts_of_the_wrong_kind_are_refused(example, message, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        tokenize_example(example, tiny_tokenizer)
