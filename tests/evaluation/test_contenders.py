"""What is compared with what, and how forwards are counted."""

import json
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM

from hf_dspark.evaluation import decoding
from hf_dspark.evaluation.contenders import counted_forwards, make_contenders
from hf_dspark.evaluation.decoding import decode


def test_dflash_of_transformers_runs_beside_ours(shared):
    """Its own checkpoints are run twice: by our loop, and by transformers' class and loop."""
    folder = shared / "golden" / "others" / "transformers_native_dflash"
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    plain, ours, theirs = make_contenders(target, [folder / "drafter"], ["fixed"])
    assert (ours.name, theirs.name) == ("drafter fixed", "drafter in transformers")
    assert theirs.description["kind"] == "transformers_dflash"
    assert theirs.one_row_only
    case = json.loads((folder / "decode.json").read_text())["rows"][0]
    outputs = [
        decode(target, each, [case["prompt_ids"]], 0, max_new_tokens=24, do_sample=False)
        for each in (plain, ours, theirs)
    ]
    assert outputs[0].new_ids == outputs[1].new_ids == outputs[2].new_ids
    assert outputs[0].target_forwards == 24
    # Both drafted the same: as many rounds, whatever they were worth.
    assert outputs[1].target_forwards == outputs[1].speculation.target_forwards == outputs[2].target_forwards


def test_fast_layers_are_plain_decoding_with_packed_layers(pair, monkeypatch):
    target, _ = pair
    seen = []
    monkeypatch.setattr(decoding, "fast_linear_layers", lambda model: seen.append(model) or nullcontext())
    plain, packed = make_contenders(target, [], baselines=["fast_layers"])
    outputs = [decode(target, each, [[1, 2, 3]], 0, max_new_tokens=5, do_sample=False) for each in (plain, packed)]
    assert seen == [None, target]
    assert outputs[0].new_ids == outputs[1].new_ids
    assert not packed.one_row_only


def test_forwards_are_counted_for_a_while_only(tiny_target):
    ids = torch.tensor([[1, 2, 3]])
    with counted_forwards(tiny_target) as count:
        tiny_target(ids)
        tiny_target(ids)
    tiny_target(ids)
    assert count.count == 2
    assert count.prefill_seconds > 0


def test_names_tell_drafters_apart(pair, tmp_path):
    target, drafter = pair
    for parent in ("a", "b"):
        drafter.save_pretrained(tmp_path / parent / "mine")
    contenders = make_contenders(target, [tmp_path / "a" / "mine", tmp_path / "b" / "mine"], ["fixed", "fixed:2"])
    names = [each.name for each in contenders]
    assert names == ["plain", "mine fixed", "mine fixed:2", "b/mine fixed", "b/mine fixed:2"]


def test_by_default_what_generate_does_and_the_whole_block(pair, monkeypatch):
    target, drafter = pair
    # Here they are the same, which is run once.
    assert [each.name for each in make_contenders(target, [drafter])] == ["plain", "drafter own"]
    monkeypatch.setattr(drafter.generation_config, "num_assistant_tokens", 2, raising=False)
    _, own, whole = make_contenders(target, [drafter])
    assert (own.name, whole.name) == ("drafter own", "drafter fixed")
    assert [each.description["num_assistant_tokens"] for each in (own, whole)] == [2, 4]
