"""From a checkpoint to a repository on the Hub: everything in one commit, which can be tried again if it fails."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

from ..evaluation.results import RESULTS_FILE
from ..models.adapters import ADAPTERS_ALONE
from ..models.drafter import Drafter
from ..models.loading import TRAINING_RECORD, save_training_record
from .card import CARD, PLOTS, CardFacts, copy_results, record_of_state, require_drafter, write_card
from .custom_generate import write_custom_generate
from .names import hub_id, without_paths


# What a repository gets of a folder. Optimizer states, tokenizers and arguments of a trainer are not a drafter's.
PUBLISHED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    TRAINING_RECORD,
    f"{PLOTS}/*.png",
    CARD,
    "LICENSE*",
    "NOTICE*",
)


@dataclass
class Publication:
    """
    What is sent to the Hub, or was.

    Args:
        repo_id (`str`): The repository.
        revision (`str`): The branch.
        private (`bool`, *optional*): Whether a new repository is private; the account's default if `None`.
        files (`dict[str, int]`): Paths in the repository, and sizes in bytes.
        left_out (`list[str]`): What the folder holds and the repository does not get.
        card (`str`): The model card.
        commit (`huggingface_hub.CommitInfo`, *optional*): The commit; `None` after a dry run.
    """

    repo_id: str
    revision: str
    private: bool | None
    files: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    card: str = ""
    commit: CommitInfo | None = None


def publish_drafter(
    drafter: Drafter | str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    dry_run: bool = False,
    results: str | os.PathLike | None = None,
    force: bool = False,
    max_shard_size: int | str = "50GB",
    **facts: Any,
) -> Publication:
    """
    Publishes a drafter: weights, config, decoding settings and calibration, `custom_generate/generate.py` that knows
    the repository, and a model card made from what is known. All of it is one commit; if that fails, run it again:
    what has been uploaded is not sent twice.

    Args:
        drafter ([`Drafter`] or `str`): A drafter, or the folder of one. A folder also gives its training record,
            results of an evaluation, plots, and what is written by hand in its card. It is left as it is.
        repo_id (`str`): The repository, `"user/name"`; created if it is not there. Without `user/` it is your own.
        private (`bool`, *optional*): Whether a new repository is private; the account's default if not given.
        token (`bool` or `str`, *optional*): As in `huggingface_hub`: the one that is logged in by default.
        revision (`str`, *optional*, defaults to `"main"`): The branch, created if it is not there.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request instead.
        commit_message, commit_description (`str`, *optional*): Of the commit.
        dry_run (`bool`, *optional*, defaults to `False`): Whether to send nothing and only tell what would be sent.
        results (`str`, *optional*): What `hf-dspark evaluate` wrote, to go with it.
        force (`bool`, *optional*, defaults to `False`): Whether a card that was not made here is replaced.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`): Largest file of weights, for a drafter that
            is not a folder.
        **facts: `base_model`, `license`, `languages`, `datasets`, `tags`, `thinking`; see
            [`~hf_dspark.hub.card.CardFacts`].

    Returns:
        [`Publication`]: what was sent, or would be.

    Raises:
        FileExistsError: If a card would be lost.
        FileNotFoundError: If the folder holds no drafter.
        OSError: If the Hub refuses, or can't be reached.
        ValueError: If a name is none that the Hub takes, the checkpoint is damaged, or it is adapters alone.

    Example:

    ```python
    >>> from hf_dspark import publish_drafter
    >>> from hf_dspark.hub import embedded_drafter

    >>> plan = publish_drafter(embedded_drafter(), "you/my-drafter", dry_run=True)
    >>> sorted(plan.files)[:3]
    ['README.md', 'config.json', 'custom_generate/generate.py']
    ```
    """
    _check_repo_id(repo_id)
    api = HfApi(token=token, library_name="hf-dspark")
    with _staged(drafter, max_shard_size) as (folder, left_out):
        if results is not None:
            copy_results(results, folder)
        loaded = _loaded(folder, drafter)
        if not dry_run:
            with _told_plainly(api):
                repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                if revision is not None and not revision.startswith("refs/pr"):
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
                _fetch_card(api, repo_id, revision, folder)
        complete_folder(folder, loaded, repo_id, revision, force, **facts)
        publication = Publication(repo_id, revision or "main", private, _files(folder), left_out)
        publication.card = (folder / CARD).read_text(encoding="utf-8")
        if dry_run:
            return publication
        with _told_plainly(api):
            publication.commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or f"Upload {type(loaded).__name__}",
                commit_description=commit_description,
            )
    return publication


def complete_folder(
    folder: str | os.PathLike,
    drafter: Drafter | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
    force: bool = False,
    **facts: Any,
) -> None:
    """
    Adds to a drafter's folder what its repository on the Hub has besides: `custom_generate/generate.py` and the card.

    Args:
        folder (`str`): The folder.
        drafter (`Drafter`, *optional*): The drafter, if it is loaded already.
        repo_id, revision (`str`, *optional*): Where it will be.
        force (`bool`, *optional*): Whether a card that was not made here is replaced.
        **facts: See [`~hf_dspark.hub.card.CardFacts`].
    """
    write_card(folder, CardFacts(repo_id=repo_id, **facts), force, drafter)
    write_custom_generate(folder, repo_id, revision or "main")


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no name of a repository: {error}") from None


@contextmanager
def _staged(drafter: Drafter | str | os.PathLike, max_shard_size: int | str) -> Iterator[tuple[Path, list[str]]]:
    """A folder of what is published, weights as links, and the names of what is left out."""
    with tempfile.TemporaryDirectory(prefix="hf-dspark-") as name:
        staging, left_out = Path(name), []
        if isinstance(drafter, Drafter):
            if drafter.has_adapters:
                raise ValueError(ADAPTERS_ALONE)
            drafter.save_pretrained(staging, max_shard_size=max_shard_size)
        else:
            left_out = _link(Path(drafter), staging)
        _hide_paths(staging / "config.json")
        yield staging, left_out


def _link(source: Path, staging: Path) -> list[str]:
    require_drafter(source)
    published = {file for pattern in PUBLISHED for file in source.glob(pattern) if file.is_file()}
    for file in published:
        place = staging / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        if file.suffix in (".safetensors", ".bin"):
            _link_file(file.resolve(), place)
        else:
            shutil.copyfile(file, place)
    if (source / RESULTS_FILE).is_file():
        copy_results(source, staging)
        published.add(source / RESULTS_FILE)
    if not (source / TRAINING_RECORD).is_file():
        save_training_record(staging, record_of_state(source))
    rewritten = {source / "custom_generate"}
    return sorted(entry.name for entry in source.iterdir() if entry not in published | rewritten | {source / PLOTS})


def _link_file(file: Path, place: Path) -> None:
    try:
        place.symlink_to(file)
    except OSError:  # not every system lets everyone make links
        shutil.copyfile(file, place)


def _hide_paths(file: Path) -> None:
    """A folder of this machine says nothing to others, and is none of their business."""
    config = json.loads(file.read_text(encoding="utf-8"))
    target = config.get("target_name_or_path")
    if target is not None:
        config["target_name_or_path"] = hub_id(target) or without_paths(target)
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _loaded(folder: Path, drafter: Drafter | str | os.PathLike) -> Drafter:
    """The drafter as others will load it: what can't be loaded is not published."""
    from ..auto import AutoDrafter

    loaded = AutoDrafter.from_pretrained(folder)
    if not isinstance(drafter, Drafter):
        loaded.config.name_or_path = str(drafter)
    return loaded


def _fetch_card(api: HfApi, repo_id: str, revision: str | None, folder: Path) -> None:
    """What was written by hand into the card on the Hub stays, unless the folder has a card of its own."""
    if (folder / CARD).exists():
        return
    try:
        file = api.hf_hub_download(repo_id, CARD, revision=revision)
    except EntryNotFoundError:
        return
    shutil.copyfile(file, folder / CARD)


def _files(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


@contextmanager
def _told_plainly(api: HfApi) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError:
        raise  # says what the Hub says
    except (HTTPError, RuntimeError) as error:  # of a broken upload huggingface_hub makes a RuntimeError
        raise ConnectionError(
            f"The upload to {api.endpoint} broke off: {error.__cause__ or error}. Run it again: what has been "
            "uploaded is not sent twice."
        ) from error
