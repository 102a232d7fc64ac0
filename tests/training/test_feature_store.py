"""Features kept between epochs: the same numbers, read back instead of computed, and never half a file."""

import json
import re
from collections import namedtuple

import pytest
import torch
from conftest import make_target, make_tokenizer

from hf_dspark.training import feature_store
from hf_dspark.training.feature_store import FeatureStore


LAYERS = [0, 1]
# The second answer is followed by a turn that is not supervised, the last has nothing in front.
EXAMPLES = [
    {"input_ids": list(range(1, 9)), "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1]},
    {"input_ids": list(range(10, 22)), "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]},
    {"input_ids": list(range(30, 36)), "loss_mask": [1] * 6},
    {"input_ids": list(range(40, 44)), "loss_mask": [0, 1, 1, 1]},
]
SEQUENCES = [torch.tensor(e["input_ids"]) for e in EXAMPLES]
MASKS = [torch.tensor(e["loss_mask"]) for e in EXAMPLES]


def states_of(input_ids, attention_mask=None):
    """States that tell token and position, so that a mix-up shows."""
    place = input_ids[..., None] + torch.arange(input_ids.shape[1])[:, None] / 16
    return place.expand(-1, -1, 64).clone(), -place.expand(-1, -1, 32).clone()


def make_store(folder, target=None, layers=LAYERS, examples=EXAMPLES, tokenizer=None) -> FeatureStore:
    return FeatureStore(folder, target or make_target(), layers, examples, tokenizer)


def fill(store, batch_size=2, compute=states_of, **share) -> FeatureStore:
    store.prepare()
    store.fill(compute, batch_size, progress=False, **share)
    return store


def free(monkeypatch, number: int) -> None:
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free=number))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_what_a_loss_reads_comes_back_in_bfloat16(tmp_path, batch_size):
    store = fill(make_store(tmp_path), batch_size)
    assert store.is_full
    features, last_hidden = store.load(SEQUENCES, MASKS)
    assert features.shape == (4, 12, 64) and last_hidden.shape == (4, 12, 32)
    for row, (ids, mask) in enumerate(zip(SEQUENCES, MASKS)):
        expected, expected_last = (states[0].bfloat16() for states in states_of(ids[None]))
        last = int(mask.nonzero()[-1])
        assert torch.equal(features[row, : last + 1], expected[: last + 1])
        for place in mask.nonzero().squeeze(-1).tolist():
            for near in {max(place - 1, 0), min(place + 1, len(ids) - 1)}:
                assert torch.equal(last_hidden[row, near], expected_last[near])


def test_nothing_else_is_kept(tmp_path):
    store = fill(make_store(tmp_path))
    features, last_hidden = store.load(SEQUENCES[1:2], MASKS[1:2])
    assert torch.all(features[0, 6:] == 0)
    assert torch.all(last_hidden[0, [0, 1, 7, 8, 9, 10, 11]] == 0)
    tensors = 2 * (64 * (8 + 6 + 6 + 4) + 32 * (5 + 5 + 6 + 4))
    assert tensors < store.bytes_on_disk() < tensors + 1000


def test_examples_are_found_in_any_batch_and_by_another_run(tmp_path):
    fill(make_store(tmp_path))
    again = make_store(tmp_path)
    assert again.is_full
    whole = again.load(SEQUENCES, MASKS)[0]
    assert torch.equal(again.load(SEQUENCES[3:], MASKS[3:])[0][0], whole[3, :4])
    with pytest.raises(ValueError, match="not in the feature store"):
        again.load([torch.arange(3)], [torch.ones(3)])


def test_processes_share_the_work(tmp_path):
    stores = [make_store(tmp_path) for _ in range(2)]
    stores[0].prepare()
    seen = []

    def compute(ids, mask):
        seen.extend(ids[:, 0].tolist())
        return states_of(ids)

    for i, store in enumerate(stores):
        store._places = {}  # each began before the other wrote
        store.fill(compute, 1, i, 2, progress=False)
    assert sorted(seen) == [1, 10, 30, 40]
    stores[0].refresh()
    assert stores[0].is_full and stores[1].is_full


@pytest.mark.parametrize("kill_at", range(4))
def test_a_killed_run_goes_on_with_what_is_there(tmp_path, monkeypatch, kill_at):
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 1)
    calls = []

    def killed(ids, mask):
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        calls.append(1)
        return states_of(ids)

    with pytest.raises(KeyboardInterrupt):
        fill(make_store(tmp_path), 1, killed)
    (tmp_path / "tmpabc.partial").write_bytes(b"half a shard")
    calls.clear()
    counted = fill(make_store(tmp_path), 1, lambda ids, mask: calls.append(1) or states_of(ids))
    assert len(calls) == 4 - kill_at
    whole = fill(make_store(tmp_path / "whole"))
    for ours, theirs in zip(counted.load(SEQUENCES, MASKS), whole.load(SEQUENCES, MASKS)):
        assert torch.equal(ours, theirs)
    assert not list(tmp_path.glob("*.partial"))


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def write_half(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(feature_store, "save_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        fill(make_store(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["feature_store.json"]
    assert len(make_store(tmp_path).missing) == 4


def test_a_damaged_shard_is_named(tmp_path):
    fill(make_store(tmp_path))
    (shard,) = tmp_path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(OSError, match=f"{re.escape(str(shard))} is damaged .*Delete it"):
        make_store(tmp_path)
    shard.unlink()
    assert fill(make_store(tmp_path)).is_full


def fine_tuned():
    tuned = make_target()
    with torch.no_grad():
        tuned.model.layers[3].mlp.down_proj.weight += 0.01
    return tuned


@pytest.mark.parametrize(
    "change,told",
    [
        ({"target": fine_tuned()}, "of another target .*weights differ"),
        ({"layers": [0, 2]}, r"of the target layers \[0, 1\], not \[0, 2\]"),
        ({"examples": EXAMPLES[:3]}, "of other data .4 examples there, 3 now"),
        (
            {"examples": [EXAMPLES[0] | {"loss_mask": [0, 0, 0, 0, 0, 1, 1, 1]}, *EXAMPLES[1:]]},
            "of other data .4 examples there, 4 now",
        ),
    ],
    ids=["target", "layers", "examples", "supervision"],
)
def test_a_stale_store_is_refused_by_name(tmp_path, change, told):
    fill(make_store(tmp_path))
    with pytest.raises(ValueError, match=f"feature store in .* is {told}.*Delete it, or name another folder"):
        make_store(tmp_path, **change)


def test_another_chat_template_is_named(tmp_path, tiny_tokenizer):
    fill(make_store(tmp_path, tokenizer=tiny_tokenizer))
    other = make_tokenizer()
    other.chat_template += " "
    with pytest.raises(ValueError, match="made with another tokenizer or chat template"):
        make_store(tmp_path, examples=EXAMPLES[:2], tokenizer=other)
    # The same tokens are the same features, whatever made them.
    assert make_store(tmp_path, tokenizer=other).is_full


def test_a_disk_too_small_is_an_error_before_anything_is_written(tmp_path, monkeypatch, caplog):
    size = 2 * (64 * (8 + 6 + 6 + 4) + 32 * (5 + 5 + 6 + 4))
    free(monkeypatch, size)
    with pytest.raises(
        OSError, match=r"for 30 tokens \(145 bytes a token\) .*Train without `feature_store`, or choose"
    ):
        make_store(tmp_path / "new").check_disk()
    assert not (tmp_path / "new").exists()
    free(monkeypatch, int(size * 1.02))
    make_store(tmp_path / "new").check_disk()


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    fill(make_store(tmp_path))
    free(monkeypatch, 0)
    make_store(tmp_path).check_disk()


def test_the_record_tells_what_the_store_is_for(tmp_path):
    fill(make_store(tmp_path))
    record = json.loads((tmp_path / "feature_store.json").read_text())
    assert record["target_layer_ids"] == LAYERS and record["examples"] == 4
