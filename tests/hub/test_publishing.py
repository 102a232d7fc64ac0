"""Publishing, against a local server that speaks the Hub's protocol, with huggingface_hub's own client."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_target
from huggingface_hub import ModelCard

from hf_dspark import AutoDrafter, DSparkDrafter, publish_drafter
from hf_dspark.hub.publishing import complete_folder

from .local_hub import TOKEN, LocalHub


CLIENT = Path(__file__).with_name("hub_client.py")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a tiny target and a drafter, the latter with what a trainer leaves beside it."""
    root = tmp_path_factory.mktemp("published")
    target = make_target("qwen3")
    target.save_pretrained(root / "target")
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, block_size=4, target_name_or_path="/home/me/target")
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(root / "drafter")
    (root / "drafter" / "optimizer.pt").write_bytes(b"not a drafter's")
    return root / "target", root / "drafter"


def start(hub: LocalHub, home: Path, *arguments: Path) -> subprocess.Popen:
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "home"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    command = [sys.executable, str(CLIENT), *map(str, arguments)]
    return subprocess.Popen(command, env=env, cwd=home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def walk(pair, tmp_path_factory):
    """A user's whole walk: an upload that is killed before its commit, the same again, then use and updates."""
    home = tmp_path_factory.mktemp("user")
    with LocalHub(part_size=20_000) as hub:
        hub.hold = r"POST /api/models/you/my-drafter/commit/main"
        first = start(hub, home, *pair)
        assert hub.held.wait(300), first.communicate(timeout=1)
        first.kill()
        first.communicate()
        hub.hold, hub.after_kill = None, (hub.files("you/my-drafter"), len(hub.objects), hub.count("PUT .*"))

        hub.refusals = [r"PUT /lfs/\w+(/\d+)?"]
        hub.forbidden = {"theirs"}
        second = start(hub, home, *pair)
        output, errors = second.communicate(timeout=600)
        assert second.returncode == 0, errors[-3000:]
        yield hub, json.loads(output.splitlines()[-1])


def test_a_killed_upload_leaves_nothing_half(walk):
    hub, _ = walk
    files, objects, puts = hub.after_kill
    assert list(files) == [".gitattributes"]
    assert (objects, puts > 1) == (1, True)  # the weights are there, in parts, and no commit names them


def test_rerun_sends_large_files_once(walk):
    hub, told = walk
    assert told["published"][0] == "you/my-drafter"
    assert hub.count("PUT .*") == hub.after_kill[2] + 1  # and one that was refused, of another drafter


def test_repository_is_whole(walk, pair):
    hub, told = walk
    repository = hub.repositories["you/my-drafter"]
    first = repository.commits[told["published"][1]]
    assert repository.private
    expected = ["README.md", "config.json", "custom_generate/generate.py", "custom_generate/requirements.txt"]
    assert sorted(first.keys() - {".gitattributes"}) == [*expected, "generation_config.json", "model.safetensors"]
    assert first["model.safetensors"] == (pair[1] / "model.safetensors").read_bytes()
    assert b"DRAFTER = 'you/my-drafter'\nREVISION = 'main'" in first["custom_generate/generate.py"]
    assert json.loads(first["generation_config.json"])["num_assistant_tokens"] == 3
    assert json.loads(first["config.json"])["target_name_or_path"] == "target"  # and no folder of the author's


def test_loads_and_decodes_from_the_hub(walk):
    _, told = walk
    assert told["same weights"]
    assert told["same settings"]
    assert told["AutoModel"] == "DSparkDrafter"
    assert told["drafted"]
    assert told["custom_generate"]


def test_updates(walk):
    hub, told = walk
    repository = hub.repositories["you/my-drafter"]
    again = repository.commits[told["again"]]
    assert repository.messages[2] == "Again"
    card = ModelCard(again["README.md"].decode())
    assert (card.data.license, card.data.language) == ("apache-2.0", ["en"])  # as given the first time
    assert told["branch"] == "trial"
    assert b"REVISION = 'trial'" in hub.files("you/my-drafter", "trial")["custom_generate/generate.py"]
    assert told["pull request"] == f"{hub.endpoint}/you/my-drafter/discussions/1"
    assert not hub.repositories["you/saved"].private
    assert b"DRAFTER = 'you/saved'" in hub.files("you/saved")["custom_generate/generate.py"]


def test_failures_are_told(walk):
    _, told = walk
    assert told["the large file"].startswith("The upload to http://127.0.0.1")
    assert told["the large file"].endswith("Run it again: what has been uploaded is not sent twice.")
    assert "403" in told["the name"]


def test_dry_run_sends_nothing_and_tells_all(pair):
    plan = publish_drafter(pair[1], "you/x", dry_run=True, private=True)  # offline: a request would fail
    assert plan.commit is None
    assert plan.left_out == ["optimizer.pt"]
    assert plan.files["model.safetensors"] == (pair[1] / "model.safetensors").stat().st_size
    assert plan.card.startswith("---\n")
    assert not (pair[1] / "README.md").exists()


def test_checkpoint_of_a_trainer(pair, tmp_path):
    """Of its state the losses are published, and not the folders that it names."""
    folder = shutil.copytree(pair[1], tmp_path / "checkpoint-4")
    state = {"global_step": 4, "epoch": 1.0, "log_history": [{"step": n, "loss": 4.0 - n} for n in (2, 4)]}
    (folder / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": "/home/me/x"}))
    plan = publish_drafter(folder, "you/x", dry_run=True)
    assert plan.left_out == ["optimizer.pt", "trainer_state.json"]
    assert {"training_record.json", "plots/training_loss.png"} <= plan.files.keys()
    assert "Updates: 4; epochs: 1.00; time: not recorded." in plan.card
    assert "| 4 | 0 |" in plan.card


def test_bad_names_and_folders(tmp_path, pair):
    with pytest.raises(ValueError, match="no name of a repository"):
        publish_drafter(pair[1], "you/my drafter", dry_run=True)
    with pytest.raises(FileNotFoundError, match="holds no drafter"):
        publish_drafter(tmp_path, "you/x", dry_run=True)
    with pytest.raises(ValueError, match="no licence identifier"):
        publish_drafter(pair[1], "you/x", dry_run=True, license="Do what you want")


def test_damaged_checkpoint_is_not_published(pair, tmp_path):
    drafter = AutoDrafter.from_pretrained(pair[1])
    drafter.save_pretrained(tmp_path)
    state_dict = {k: v for k, v in drafter.state_dict().items() if k != "fc.weight"}
    from safetensors.torch import save_file

    save_file(state_dict, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing keys"):
        publish_drafter(tmp_path, "you/x", dry_run=True)


def test_local_custom_generate(pair, tmp_path):
    """The file works from a folder too, without a repository."""
    drafter = AutoDrafter.from_pretrained(pair[1])
    drafter.save_pretrained(tmp_path / "d")
    complete_folder(tmp_path / "d")
    target = make_target("qwen3")
    inputs = {"input_ids": torch.arange(1, 9)[None], "max_new_tokens": 16, "do_sample": False}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    plain = target.generate(**inputs)
    assert torch.equal(plain, target.generate(**inputs, custom_generate=str(tmp_path / "d"), trust_remote_code=True))
