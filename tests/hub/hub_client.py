"""
What a user does with a published drafter, in a process of its own: huggingface_hub reads HF_ENDPOINT when it is
imported. Run by `test_publishing.py` against the server of `local_hub.py`; prints what came of it as JSON.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from huggingface_hub import HfApi
from transformers import AutoModel, AutoModelForCausalLM

from hf_dspark import AutoDrafter, publish_drafter


target_folder, folder = map(Path, sys.argv[1:])


def generate(target, **kwargs) -> list[int]:
    inputs = torch.arange(1, 9)[None]
    output = target.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False, pad_token_id=0, **kwargs
    )
    return output[0].tolist()


def main() -> None:
    told = {}
    publication = publish_drafter(folder, "my-drafter", private=True, license="apache-2.0", languages="en")
    told["published"] = [publication.repo_id, publication.commit.oid, sorted(publication.files)]

    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    local, loaded = AutoDrafter.from_pretrained(folder), AutoDrafter.from_pretrained("you/my-drafter")
    told["same weights"] = all(torch.equal(loaded.state_dict()[k], v) for k, v in local.state_dict().items())
    told["same settings"] = loaded.generation_config.to_dict() == local.generation_config.to_dict()
    told["AutoModel"] = type(AutoModel.from_pretrained("you/my-drafter")).__name__
    plain = generate(target)
    told["drafted"] = generate(target, assistant_model=loaded) == plain
    told["custom_generate"] = generate(target, custom_generate="you/my-drafter", trust_remote_code=True) == plain

    # Again, from a drafter: nothing new is stored, and what is written by hand on the Hub stays.
    told["again"] = loaded.push_to_hub("you/my-drafter", commit_message="Again").oid
    loaded.push_to_hub("you/my-drafter", revision="trial")
    told["branch"] = publish_drafter(loaded, "you/my-drafter", revision="trial").revision
    told["pull request"] = loaded.push_to_hub("you/my-drafter", create_pr=True).pr_url
    loaded.save_pretrained("elsewhere", push_to_hub=True, repo_id="you/saved", private=False)

    loaded.fc.weight.data.add_(1)  # a file that the Hub does not have yet
    for repo_id, where in (("you/refused", "the large file"), ("theirs/x", "the name")):
        try:
            publish_drafter(loaded, repo_id)
        except OSError as error:
            told[where] = str(error)
    print(json.dumps(told | publish_again(folder)))


def publish_again(folder: Path) -> dict:
    told = {}
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.training_record = {"updates": 4}
    publish_drafter(drafter, "you/again")
    drafter.fc.weight.data.add_(2)
    drafter.training_record = None
    told["removed"] = publish_drafter(drafter, "you/again", max_shard_size="20KB").removed
    told["new weights"] = torch.equal(AutoDrafter.from_pretrained("you/again").fc.weight, drafter.fc.weight)

    # The folder has a card of its own, and that on the Hub is edited.
    kept = shutil.copytree(folder, Path("kept"))
    plan = publish_drafter(kept, "you/kept", dry_run=True)
    (kept / "README.md").write_text(plan.card)
    publish_drafter(kept, "you/kept")
    told["unread card"] = refusal(lambda: publish_drafter(kept, "you/kept"))  # the server refuses it once
    publish_drafter(kept, "you/kept")
    card = plan.card.replace("by hand: notes -->\n", "by hand: notes -->\nWritten on the Hub.\n")
    HfApi().upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="you/kept")
    told["edited there"] = refusal(lambda: publish_drafter(kept, "you/kept", dry_run=True))
    (kept / "README.md").unlink()
    plan = publish_drafter(kept, "kept", dry_run=True)
    told["dry run"] = [plan.repo_id, "Written on the Hub." in plan.card, plan.notes]

    told["public"] = refusal(lambda: publish_drafter(kept, "you/again", private=True))
    told["no login"] = refusal(lambda: publish_drafter(kept, "you/never", token=False))
    told["bad licence"] = refusal(lambda: publish_drafter(kept, "you/never", license="Do what you want"))
    (kept / "README.md").write_text("# Mine")
    told["own card"] = refusal(lambda: publish_drafter(kept, "you/never"))
    return told


def refusal(publish) -> str:
    try:
        publish()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "published"


if __name__ == "__main__":
    main()
