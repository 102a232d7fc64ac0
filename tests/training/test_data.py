"""What is supervised: exactly what the assistant generates, its end of turn included, and nothing behind it."""

import pytest
import torch
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
