"""From a checkpoint to a repository on the Hub: everything in one commit, which can be tried again if it fails."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from ..evaluation.results import RESULTS_FILE
from ..models.adapters import ADAPTERS_ALONE
from ..models.drafter import Drafter
from ..models.loading import TRAINING_RECORD, read_object, save_training_record
from .card import CARD, PLOTS, CardFacts, require_drafter, training_record, write_card
from .custom_generate import write_custom_generate
from .escaping import one_line
from .names import without_paths
from .remote import Remote, patterns, read_remote, was_changed_there


# What a repository gets of a folder beside the weights. Optimizer states, tokenizers and arguments of a trainer are
# not a drafter's.
PUBLISHED = (
    "config.json",
    "generation_config.json",
    f"{PLOTS}/*.png",
    CARD,
    "LICENSE*",
    "NOTICE*",
)

NOT_LOGGED_IN = "The Hub needs you to be logged in: run `hf auth login`, or give a token."


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
        removed (`list[str]`): What an earlier publication put there and this one doesn't hold.
        notes (`list[str]`): What a dry run could not find out.
        card (`str`): The model card.
        commit (`huggingface_hub.CommitInfo`, *optional*): The commit; `None` after a dry run.
    """

    repo_id: str
    revision: str
    private: bool | None
    files: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
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
    the repository, and a model card made from what is known. All of it is one commit, which also removes what an
    earlier publication put there and this one doesn't hold; if that fails, run it again: what has been uploaded is not
    sent twice.

    Args:
        drafter ([`Drafter`] or `str`): A drafter, or the folder of one. A folder also gives its training record,
            results of an evaluation, plots, and what is written by hand in its card. It is left as it is.
        repo_id (`str`): The repository, `"user/name"`; created if it is not there. Without `user/` it is your own.
        private (`bool`, *optional*): Whether a new repository is private; the account's default if not given. One that
            is there already and is not so is refused.
        token (`bool` or `str`, *optional*): As in `huggingface_hub`: the one that is logged in by default.
        revision (`str`, *optional*, defaults to `"main"`): The branch, created if it is not there.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request instead.
        commit_message, commit_description (`str`, *optional*): Of the commit.
        dry_run (`bool`, *optional*, defaults to `False`): Whether to send nothing and only tell what would be sent. It
            reads the card on the Hub, and says so where it can't.
        results (`str`, *optional*): What `hf-dspark evaluate` wrote, to go with it.
        force (`bool`, *optional*, defaults to `False`): Whether a card that was not made here, or was edited on the
            Hub since, is replaced.
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
    CardFacts(**facts)  # before anything is asked or sent
    api, notes = HfApi(token=token, library_name="hf-dspark"), []
    repo_id, remote = _look(api, repo_id, revision, notes, dry_run)
    if remote and private is not None and remote.private != private:
        now, asked = ("private", "public") if remote.private else ("public", "private")
        raise ValueError(
            f"{repo_id} is there already and is {now}; publishing doesn't make it {asked}. Change it in its settings, "
            f"or leave out private={private} (--{asked})."
        )
    with _staged(drafter, max_shard_size) as (folder, left_out), _naming(folder, drafter):
        loaded = _loaded(folder, drafter)
        source = folder if isinstance(drafter, Drafter) else Path(drafter)
        save_training_record(folder, _finite(training_record(loaded, source)))
        _take_card(remote, repo_id, folder, force)
        if results is None and source != folder and (source / RESULTS_FILE).is_file():
            results = source
        complete_folder(folder, loaded, repo_id, revision, force, results, **facts)
        publication = Publication(repo_id, revision or "main", private, _files(folder), left_out, notes=notes)
        publication.removed = remote.obsolete(publication.files) if remote else []
        publication.card = (folder / CARD).read_text(encoding="utf-8")
        if dry_run:
            return publication
        with _told_plainly(api):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            publication.commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or f"Upload {type(loaded).__name__}",
                commit_description=commit_description,
                delete_patterns=patterns(publication.removed) or None,
            )
    return publication


def complete_folder(
    folder: str | os.PathLike,
    drafter: Drafter | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
    force: bool = False,
    results: str | os.PathLike | None = None,
    **facts: Any,
) -> None:
    """
    Adds to a drafter's folder what its repository on the Hub has besides: `custom_generate/generate.py` and the card.

    Args:
        folder (`str`): The folder.
        drafter (`Drafter`, *optional*): The drafter, if it is loaded already.
        repo_id, revision (`str`, *optional*): Where it will be.
        force (`bool`, *optional*): Whether a card that was not made here is replaced.
        results (`str`, *optional*): Results of an evaluation that lie elsewhere.
        **facts: See [`~hf_dspark.hub.card.CardFacts`].
    """
    write_card(folder, CardFacts(repo_id=repo_id, **facts), force, drafter, results)
    write_custom_generate(folder, repo_id, revision or "main")


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no name of a repository: {error}") from None


def _look(
    api: HfApi, repo_id: str, revision: str | None, notes: list[str], dry_run: bool
) -> tuple[str, Remote | None]:
    """The whole name of the repository, and what it holds. A dry run goes on without the Hub, and notes it."""
    try:
        with _told_plainly(api, is_upload=False):
            if "/" not in repo_id:
                repo_id = f"{_user(api)}/{repo_id}"
            return repo_id, read_remote(api, repo_id, revision, CARD)
    except OSError as error:
        if not dry_run:
            raise
        notes.append(
            f"The Hub could not be asked ({one_line(error)}): a card or older files that are there already are not "
            "taken into account" + ("." if "/" in repo_id else ", nor is the name of your account.")
        )
        return repo_id, None


def _user(api: HfApi) -> str:
    if api.token is False or not (api.token or get_token()):
        raise PermissionError(NOT_LOGGED_IN)
    return api.whoami()["name"]


def _take_card(remote: Remote | None, repo_id: str, folder: Path, force: bool) -> None:
    """
    What was written by hand into the card on the Hub stays, unless the folder has a card of its own.

    Raises:
        FileExistsError: If both have one, and that on the Hub was edited there.
    """
    if remote is None or remote.card is None:
        return
    file = folder / CARD
    if not file.exists():
        file.write_bytes(remote.card)
    elif not force and was_changed_there(remote.card, file.read_bytes()):
        raise FileExistsError(
            f"The {CARD} of {repo_id} was edited on the Hub, and that would be lost: the folder has a {CARD} of its "
            f"own. Put what you want to keep into one of them, and move the folder's away or replace it by the Hub's; "
            "or replace the Hub's with force=True (--force)."
        )


@contextmanager
def _naming(staging: Path, drafter: Drafter | str | os.PathLike) -> Iterator[None]:
    """Errors name the user's folder, not the one in which the files are put together."""
    name = drafter.config.name_or_path or "The drafter" if isinstance(drafter, Drafter) else str(drafter)
    try:
        yield
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        if type(error) not in (FileNotFoundError, FileExistsError, ValueError) or str(staging) not in str(error):
            raise
        raise type(error)(str(error).replace(str(staging), name)) from None


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
        for file in ("config.json", "generation_config.json"):
            _hide_paths(staging / file)
        yield staging, left_out


def _link(source: Path, staging: Path) -> list[str]:
    require_drafter(source)
    read_object(source / "config.json")
    published = {file for pattern in PUBLISHED for file in source.glob(pattern) if file.is_file()}
    published |= set(_weights(source))
    for file in published:
        place = staging / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        if file.suffix in (".safetensors", ".bin"):
            _link_file(file.resolve(), place)
        else:
            shutil.copyfile(file, place)
    rewritten = {source / name for name in ("custom_generate", PLOTS, RESULTS_FILE, TRAINING_RECORD)}
    return sorted(entry.name for entry in source.iterdir() if entry not in published | rewritten)


def _weights(source: Path) -> list[Path]:
    """The files that loading reads, and their index."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (source / single).is_file():
            return [source / single]
        if (source / index).is_file():
            shards = read_object(source / index).get("weight_map")
            names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
            return [file for file in (source / Path(name).name for name in {index, *names}) if file.is_file()]
    return []


def _link_file(file: Path, place: Path) -> None:
    try:
        place.symlink_to(file)
    except OSError:  # not every system lets everyone make links
        shutil.copyfile(file, place)


def _hide_paths(file: Path) -> None:
    """A folder of this machine says nothing to others, and is none of their business."""
    if file.is_file():
        stored = read_object(file)
        shown = without_paths(stored)
        if shown != stored:
            file.write_text(json.dumps(shown, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON knows no NaN, which a loss may be."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _loaded(folder: Path, drafter: Drafter | str | os.PathLike) -> Drafter:
    """The drafter as others will load it: what can't be loaded is not published."""
    from ..auto import AutoDrafter

    loaded = AutoDrafter.from_pretrained(folder)
    loaded.config.name_or_path = drafter.config.name_or_path if isinstance(drafter, Drafter) else str(drafter)
    return loaded


def _files(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


@contextmanager
def _told_plainly(api: HfApi, is_upload: bool = True) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 401:
            raise PermissionError(f"{NOT_LOGGED_IN} ({one_line(error.server_message or error)})") from error
        raise  # says what the Hub says
    except (EntryNotFoundError, HTTPError, RuntimeError) as error:
        # Of a broken upload huggingface_hub makes a RuntimeError, of a failed read that of a file that is not cached.
        why = error.__cause__ or error
        if not is_upload:
            raise ConnectionError(f"{api.endpoint} could not be read: {why}") from error
        raise ConnectionError(
            f"The upload to {api.endpoint} broke off: {why}. Run it again: what has been uploaded is not sent twice."
        ) from error
