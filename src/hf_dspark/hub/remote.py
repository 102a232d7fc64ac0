"""What a repository on the Hub holds before something is published to it."""

import glob
import re
from dataclasses import dataclass, field

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from .regions import read_header, was_touched


# What an earlier publication may have put there. Everything else is its owner's, and stays.
_OURS = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)|(model\.safetensors|pytorch_model\.bin)\.index\.json"
    r"|generation_config\.json|training_record\.json|results\.json"
    r"|plots/(training_loss|accepted_length|conditional_acceptance|accepted_histogram|reliability(_\d+)?"
    r"|thresholds(_\d+)?|throughput|time|predicted)\.png"
)


@dataclass
class Remote:
    """
    Args:
        private (`bool`): Whether it is.
        files (`list[str]`): Their paths.
        card (`bytes`, *optional*): Its README.md.
    """

    private: bool
    files: list[str] = field(default_factory=list)
    card: bytes | None = None

    def obsolete(self, sent: dict[str, int]) -> list[str]:
        """What an earlier publication put there and this one doesn't hold: loaders would take old weights for new."""
        return sorted(name for name in self.files if _OURS.fullmatch(name) and name not in sent)


def read_remote(api: HfApi, repo_id: str, revision: str | None, card: str) -> Remote | None:
    """
    Asks the Hub; nothing is taken from the cache. A branch that is not there yet begins as `main`.

    Args:
        api (`HfApi`): The client.
        repo_id (`str`): The repository.
        revision (`str`, *optional*): The branch.
        card (`str`): The name of its card.

    Returns:
        [`Remote`], or `None` if there is no such repository.

    Raises:
        OSError: If the Hub can't be reached, or refuses.
    """
    try:
        try:
            info = api.model_info(repo_id, revision=revision)
        except RevisionNotFoundError:
            info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None
    files = [sibling.rfilename for sibling in info.siblings or []]
    # Named by its commit, so that a copy in the cache is the same.
    path = api.hf_hub_download(repo_id, card, revision=info.sha) if card in files else None
    content = None
    if path is not None:
        with open(path, "rb") as file:
            content = file.read()
    return Remote(bool(info.private), files, content)


def patterns(names: list[str]) -> list[str]:
    """Patterns that match these names and no others."""
    return [glob.escape(name) for name in names]


def was_changed_there(theirs: bytes, ours: bytes) -> bool:
    """Whether the card on the Hub has been edited since it was published, and is not the one that is here."""
    if theirs.replace(b"\r\n", b"\n") == ours.replace(b"\r\n", b"\n"):
        return False
    try:
        card = ModelCard(theirs.decode("utf-8"), ignore_metadata_errors=True)
    except Exception:  # whatever is wrong with it was not written here
        return True
    return read_header(card.content) is None or was_touched(card.data.to_dict(), card.text)
