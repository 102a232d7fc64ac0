"""Publishing, against a local server that speaks the Hub's protocol, with huggingface_hub's own client."""

import json
import os
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from conftest import make_target
from huggingface_hub import ModelCard

from hf_dspark import AutoDrafter, DSparkDrafter, publish_drafter
from hf_dspark.evaluation.results import write_results
from hf_dspark.hub.card import training_record
from hf_dspark.hub.publishing import _loaded, _naming, _staged, complete_folder

from .local_hub import TOKEN, LocalHub
from .test_card import make_results


UNREAD = r"HEAD /you/kept/resolve/\w+/README.md"
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

        hub.refusals = [r"PUT /lfs/\w+(/\d+)?", UNREAD]
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
    requests = takewhile(lambda request: "you/again" not in request[1], hub.received)
    assert (
        sum(method == "PUT" for method, _ in requests) == hub.after_kill[2] + 1
    )  # and one that was refused, of another drafter


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


def test_what_an_earlier_publication_left_is_removed(walk):
    """A single file of old weights would be loaded instead of new shards."""
    hub, told = walk
    assert told["removed"] == ["model.safetensors", "training_record.json"]
    assert told["new weights"]
    assert "model.safetensors.index.json" in hub.files("you/again")
    assert not {*told["removed"]} & hub.files("you/again").keys()
    assert ".gitattributes" in hub.files("you/again")


def test_edits_on_the_hub_are_not_lost(walk):
    hub, told = walk
    assert told["edited there"].startswith("FileExistsError: The README.md of you/kept was edited on the Hub")
    assert told["dry run"] == ["you/kept", True, []]
    assert "could not be read" in told["unread card"]
    assert b"Written on the Hub." in hub.files("you/kept")["README.md"]


def test_refused_before_anything_is_created(walk):
    hub, told = walk
    assert "you/again is there already and is public" in told["public"]
    assert "run `hf auth login`" in told["no login"]
    assert "no licence identifier" in told["bad licence"]
    assert "was not made by hf-dspark" in told["own card"]
    assert "you/never" not in hub.repositories


def test_dry_run_sends_nothing_and_tells_all(pair):
    plan = publish_drafter(pair[1], "you/x", dry_run=True, private=True)
    assert "The Hub could not be asked" in plan.notes[0]  # offline
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


def test_folders_of_the_author_are_not_published(pair, tmp_path):
    folder = shutil.copytree(pair[1], tmp_path / "d")
    for name, fields in {
        "config.json": {"_name_or_path": "runs/mine", "note": "/home/me/x", "target_model_name_or_path": "~/me/t"},
        "generation_config.json": {"_name_or_path": "/home/me/y"},
        "training_record.json": {"data": {"datasets": ["/home/me/secret.jsonl"]}, "arguments": {"config": "./me/z"}},
    }.items():
        stored = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(stored | fields))
    with _staged(folder, "50GB") as (staging, _), _naming(staging, folder):
        record = training_record(_loaded(staging, folder), folder)
        config, settings = (json.loads((staging / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert [config[name] for name in ("_name_or_path", "note", "target_model_name_or_path")] == ["runs/mine", "x", "t"]
    assert settings["_name_or_path"] == "y"
    assert record == {"data": {"datasets": ["secret.jsonl"]}, "arguments": {"config": "z"}}
    assert "/me" not in publish_drafter(folder, "you/x", dry_run=True).card


def test_weights_that_loading_reads_are_sent(pair, tmp_path):
    folder = shutil.copytree(pair[1], tmp_path / "d")
    shutil.copy(folder / "model.safetensors", folder / "backup.safetensors")
    (folder / "pytorch_model_optimizer.bin").write_bytes(b"x")
    plan = publish_drafter(folder, "you/x", dry_run=True)
    assert plan.left_out == ["backup.safetensors", "optimizer.pt", "pytorch_model_optimizer.bin"]
    AutoDrafter.from_pretrained(folder).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    plan = publish_drafter(tmp_path / "shards", "you/x", dry_run=True)
    assert sum(name.endswith(".safetensors") for name in plan.files) == 4
    assert "model.safetensors.index.json" in plan.files


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("config.json", '{"a', "config.json is damaged"),
        ("training_record.json", "[]", "training_record.json is damaged: it holds no JSON object"),
        ("training_record.json", '{"log": [1]}', "training_record.json is damaged: `log` is no list"),
        ("training_record.json", '{"data": {"thinking": [1]}}', "`data.thinking`"),
        ("trainer_state.json", '{"log_hist', "trainer_state.json is damaged"),
        ("README.md", "\xff", "README.md is no UTF-8 text"),
    ],
)
def test_damaged_files_are_not_published(name, text, complaint, pair, tmp_path):
    folder = shutil.copytree(pair[1], tmp_path / "d")
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=complaint) as error:
        publish_drafter(folder, "you/x", dry_run=True)
    assert "/hf-dspark-" not in str(error.value)  # the folder in which things are put together


def test_unknown_facts_are_refused(pair):
    with pytest.raises(TypeError, match="licence"):
        publish_drafter(pair[1], "you/x", dry_run=True, licence="mit")


def test_results_of_one_of_two_drafters(pair, tmp_path):
    folders = [shutil.copytree(pair[1], tmp_path / name / "drafter") for name in ("a", "b")]
    results = make_results(folders[0], target="target")
    results["contenders"]["confidence"]["model"] = str(folders[1])
    write_results(tmp_path / "run", results)
    for drafter in (folders[1], AutoDrafter.from_pretrained(folders[1])):
        plan = publish_drafter(drafter, "you/x", results=tmp_path / "run", dry_run=True)
        names = {result.metric_name for result in ModelCard(plan.card).data.eval_results}
        assert all("confidence" in name for name in names)


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
