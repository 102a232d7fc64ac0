"""The demonstration page of a drafter: a Gradio Space on the Hub."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from huggingface_hub import HfApi


FOLDER_NAME = "dspark-demo"
_IGNORED = ("__pycache__", "*.pyc", ".*")
_ARGUMENTS = {"DSPARK_DRAFTER": "drafter", "DSPARK_TARGET": "target", "DSPARK_TITLE": "title"}


@dataclass
class SpacePlan:
    """
    What a Space is made of.

    Args:
        repo_id (`str`): The Space's id.
        files (`dict[str, int]`): Its files and their sizes in bytes.
        variables (`dict[str, str]`): Its variables.
        readme (`str`): Its README, with the metadata that the Hub reads.
        requirements (`str`): What pip installs there.
        url (`str`, *optional*): Where it is; `None` while nothing was sent.
        needs_token (`bool`): Whether the drafter is private, so that the Space needs a secret `HF_TOKEN` to load it.
        removed (`list[str]`): Variables of an earlier call that were removed, as they are not among these.
    """

    repo_id: str
    files: dict[str, int]
    variables: dict[str, str]
    readme: str
    requirements: str
    url: str | None = None
    needs_token: bool = False
    removed: list[str] = field(default_factory=list)


def space_folder() -> Path:
    """
    Find the page's files, which ship inside the package (in a checkout: under `spaces/`).

    Returns:
        `pathlib.Path`: the folder; `python app.py` in it runs the page.

    Raises:
        FileNotFoundError: If it is not there.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "spaces" / FOLDER_NAME, here.parents[3] / "spaces" / FOLDER_NAME):
        if (folder / "app.py").is_file():
            return folder
    raise FileNotFoundError(
        "The Space's files are missing from this installation. Install a released wheel (`pip install hf-dspark`) or "
        "check out the repository with its spaces/ folder."
    )


def publish_space(
    drafter: str,
    repo_id: str | None = None,
    target: str | None = None,
    title: str | None = None,
    variables: dict[str, str] | None = None,
    package: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    dry_run: bool = False,
) -> SpacePlan:
    """
    Create a drafter's Space, or bring it up to date. Whatever fails, the call can be made again. An update removes
    the Space's variables of the page, `DSPARK_...`, that are no longer given.

    Args:
        drafter (`str`): Hub id of the drafter.
        repo_id (`str`, *optional*): Id of the Space; `DRAFTER-demo` by default.
        target (`str`, *optional*): Hub id of the target; the one that the drafter's config names by default.
        title (`str`, *optional*): Heading of the page; names the drafter by default.
        variables (`dict[str, str]`, *optional*): More of the page's variables, such as
            `{"DSPARK_MAX_NEW_TOKENS": "512"}`; the Space's README lists them.
        package (`str`, *optional*): What pip installs as hf-dspark, if not the release of this version on PyPI: for
            example `"hf-dspark @ git+https://..."`.
        private (`bool`, *optional*): Whether a new Space is private; the account's default if not given.
        token (`str`, *optional*): The token to write with; the stored one by default.
        dry_run (`bool`, *optional*, defaults to `False`): Send nothing; only tell what would be sent.

    Returns:
        [`SpacePlan`]: what the Space is made of.

    Raises:
        ValueError: If an id or a variable won't do.
        OSError: If the Hub refuses, or has no such drafter.

    Example:

    ```python
    >>> from hf_dspark.hub.space import publish_space

    >>> plan = publish_space("user/my-drafter", dry_run=True)
    >>> plan.variables["DSPARK_DRAFTER"]
    'user/my-drafter'
    ```
    """
    for what, name in (("drafter", drafter), ("target", target), ("Space", repo_id)):
        _check_id(what, name)
    repo_id = repo_id or f"{drafter}-demo"
    title = title or f"{drafter.split('/')[-1]}, token by token"
    values = {"DSPARK_DRAFTER": drafter, "DSPARK_TITLE": title}
    if target:
        values["DSPARK_TARGET"] = target
    values |= variables or {}
    _check_variables(variables or {}, values)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / FOLDER_NAME
        shutil.copytree(space_folder(), folder, ignore=shutil.ignore_patterns(*_IGNORED))
        _fill_in(folder, title, [name for name in (drafter, target) if name], package)
        plan = _plan(folder, repo_id, values)
        if not dry_run:
            _send(folder, plan, drafter, private, token)
    return plan


def _check_id(what: str, name: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name is None:
        return
    try:
        validate_repo_id(name)
        valid = "/" in name
    except HFValidationError:
        valid = False
    if not valid:
        raise ValueError(
            f"The {what} {name!r} is no Hub id of the form owner/name. A Space can only load what is on the Hub: "
            "publish the drafter first."
        )


def _check_variables(given: dict[str, str], values: dict[str, str]) -> None:
    # The page's own rules, which are not part of the package.
    settings = runpy.run_path(str(space_folder() / "settings.py"))["Settings"]
    known = sorted(set(settings.variables()) - set(_ARGUMENTS))
    for name in given:
        if argument := _ARGUMENTS.get(name):
            raise ValueError(f"{name} is set by the argument {argument!r}, not as a variable.")
        if name not in known:
            raise ValueError(f"The page knows no variable {name}; known are {', '.join(known)}.")
    settings.from_environment(values)


def _fill_in(folder: Path, title: str, models: list[str], package: str | None) -> None:
    """Write into the copied files what belongs to this drafter."""
    from huggingface_hub import metadata_load, metadata_save

    from .. import __version__

    readme = folder / "README.md"
    metadata_save(readme, {**metadata_load(readme), "title": title, "models": models})
    # The page goes with the library that it came with.
    (folder / "requirements.txt").write_text(f"{package or f'hf-dspark=={__version__}'}\n", encoding="utf-8")


def _plan(folder: Path, repo_id: str, variables: dict[str, str]) -> SpacePlan:
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    readme, requirements = ((folder / name).read_text(encoding="utf-8") for name in ("README.md", "requirements.txt"))
    return SpacePlan(repo_id, dict(sorted(files.items())), variables, readme, requirements)


def _send(folder: Path, plan: SpacePlan, drafter: str, private: bool | None, token: str | None) -> None:
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="hf-dspark")
    plan.needs_token = _is_private(api, drafter)
    url = api.create_repo(plan.repo_id, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
    present = api.get_space_variables(plan.repo_id)
    plan.removed = sorted(name for name in present if name.startswith("DSPARK_") and name not in plan.variables)
    # Before the files: the Space starts as soon as it has them.
    for name in plan.removed:
        api.delete_space_variable(plan.repo_id, name)
    for name, value in plan.variables.items():
        api.add_space_variable(plan.repo_id, name, value)
    api.upload_folder(
        repo_id=plan.repo_id, repo_type="space", folder_path=folder, commit_message="Page made by hf-dspark"
    )
    plan.url = str(url)


def _is_private(api: HfApi, drafter: str) -> bool:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return bool(api.model_info(drafter).private)
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no model {drafter} on the Hub that you can see. Publish it first: hf-dspark publish FOLDER "
            f"{drafter}"
        ) from error
