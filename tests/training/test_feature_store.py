"""Features kept between epochs: the same numbers, read back instead of computed, and never half a file."""

from collections import namedtuple

import pytest
import torch
from conftest import make_target

from hf_dspark.training import feature_store
from hf_dspark.training.feature_store import FeatureStore


LAYERS = [0, 1]


def states(seed: int = 0, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(2, length, 64), torch.randn(2, length, 32)


SEQUENCES = [torch.arange(6), torch.arange(10, 14)]


def test_what_was_stored_comes_back_in_bfloat16_with_zeros_for_padding(tmp_path):
    store = FeatureStore(tmp_path, make_target(), LAYERS)
    assert store.load(SEQUENCES) is None
    features, last_hidden = states()
    store.save(SEQUENCES, features, last_hidden)
    loaded = store.load(SEQUENCES)
    for ours, theirs in zip(loaded, (features, last_hidden)):
        assert torch.equal(ours[0], theirs[0].bfloat16())
        assert torch.equal(ours[1, :4], theirs[1, :4].bfloat16())
        assert torch.all(ours[1, 4:] == 0)


def test_examples_are_found_in_any_batch(tmp_path):
    store = FeatureStore(tmp_path, make_target(), LAYERS)
    features, last_hidden = states()
    store.save(SEQUENCES, features, last_hidden)
    again = FeatureStore(tmp_path, make_target(), LAYERS)
    assert torch.equal(again.load(SEQUENCES[1:])[0][0], features[1, :4].bfloat16())
    assert again.load([SEQUENCES[1], torch.arange(3)]) is None


def test_another_target_or_other_layers_have_their_own_files(tmp_path):
    FeatureStore(tmp_path, make_target(), LAYERS).save(SEQUENCES, *states())
    assert FeatureStore(tmp_path, make_target(seed=1), LAYERS).load(SEQUENCES) is None
    assert FeatureStore(tmp_path, make_target(), [0, 2]).load(SEQUENCES) is None
    tuned = make_target()
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter += 0.01
    assert FeatureStore(tmp_path, tuned, LAYERS).load(SEQUENCES) is None


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    store = FeatureStore(tmp_path, make_target(), LAYERS)

    def write_half(tensors, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(feature_store, "save_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        store.save(SEQUENCES, *states())
    assert list(tmp_path.iterdir()) == []
    assert store.load(SEQUENCES) is None


def test_a_disk_too_small_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    store = FeatureStore(tmp_path, make_target(), LAYERS)
    # 10 tokens of 3 states of 32 bfloat16 numbers.
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free=1919))
    with pytest.raises(OSError, match=r"for 10 tokens .*Train without `feature_store`, or choose another folder"):
        store.check_disk(SEQUENCES)
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free=1920))
    store.check_disk(SEQUENCES)


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    store = FeatureStore(tmp_path, make_target(), LAYERS)
    store.save(SEQUENCES[:1], *states())
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free=4 * 192))
    store.check_disk(SEQUENCES)
    with pytest.raises(OSError, match="for 10 tokens"):
        FeatureStore(tmp_path, make_target(seed=1), LAYERS).check_disk(SEQUENCES)
