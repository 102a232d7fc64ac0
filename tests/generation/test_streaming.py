"""The streamer knows where every token came from, and never shows half a character."""

import pytest
import torch

from hf_dspark import DSparkDrafter
from hf_dspark.generation.streaming import Detokenizer, DraftStreamer


def feed(streamer, prompt, rounds):
    """Plays a generation: the prompt, then rounds of `(counts, tokens)`; without counts, tokens of no round."""
    streamer.put(torch.tensor([prompt]))
    for counts, tokens in rounds:
        if counts is not None:
            streamer.on_round(*counts)
        for token in tokens:
            streamer.put(torch.tensor([token]))
    streamer.end()


def test_streamer_knows_where_tokens_come_from(tiny_tokenizer):
    shown = []
    streamer = DraftStreamer(tiny_tokenizer, lambda text, origin: shown.append((text, origin)))
    a, b, c, d = tiny_tokenizer("abcd")["input_ids"]
    rounds = [
        (None, [a]),  # the prefill's token
        ((5, 5, 2), [b, c, d]),
        ((5, 2, 2), [a, b, c]),  # of five drafts two were checked, and both were right
        ((5, 0, 0), [d]),
        ((5, 5, 2), [a, b]),  # generation ended inside the accepted run
    ]
    feed(streamer, [a, a], rounds)
    assert shown == [
        ("a", "plain"),
        *[("b", "accepted"), ("c", "accepted"), ("d", "correction")],
        *[("a", "accepted"), ("b", "accepted"), ("c", "bonus")],
        ("d", "plain"),
        *[("a", "accepted"), ("b", "accepted")],
    ]


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_origins_of_a_real_run_agree_with_its_statistics(tiny_target, tiny_tokenizer, threshold):
    """A fresh drafter under both ends of the confidence schedule: everything checked, and nothing."""
    drafter = DSparkDrafter.from_target(tiny_target, mask_token_id=3, num_hidden_layers=1, block_size=4)
    origins = []
    streamer = DraftStreamer(tiny_tokenizer, lambda text, origin: origins.append(origin))
    output = tiny_target.generate(
        torch.tensor([[5, 9, 17]]),
        assistant_model=drafter,
        assistant_confidence_threshold=threshold,
        max_new_tokens=24,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
    )
    run = output.speculation
    # Every id below 64 is one printable byte here, so pieces and tokens are the same in number.
    assert len(origins) == 24
    assert origins.count("accepted") == sum(run.accepted)
    if threshold == 1.0:
        assert set(origins) == {"plain"}
    else:
        assert origins[0] == "plain"
        assert "correction" in origins


def test_detokenizer_holds_back_half_a_character(tiny_tokenizer):
    text = "é ok 🎉\n  x"
    detokenizer = Detokenizer(tiny_tokenizer)
    pieces = [detokenizer.push(token) for token in tiny_tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert pieces[:2] == ["", "é"]
    assert detokenizer.flush() == ""
    assert detokenizer.push(tiny_tokenizer("é")["input_ids"][0]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
