"""A drafter's Space: what is sent, in which order, and what is refused before anything is."""

import fnmatch
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import metadata_load
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from typer.testing import CliRunner

import hf_dspark
from hf_dspark.cli import build_app
from hf_dspark.hub.space import publish_space, space_folder


COLOURS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")


class FakeHub:
    """Stands in for `HfApi`: keeps what it is sent, and fails where it is told to."""

    def __init__(self):
        self.calls, self.spaces, self.variables, self.drafters = [], {}, {}, {"user/drafter": False}
        self.fails_at = None

    def __call__(self, token=None, library_name=None):
        self.token = token
        return self

    def _call(self, name):
        self.calls.append(name)
        if self.fails_at == name:
            raise HfHubHTTPError("503 Service Unavailable", response=SimpleNamespace(headers={}, request=None))

    def model_info(self, repo_id):
        self._call("model_info")
        if repo_id not in self.drafters:
            raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
        return SimpleNamespace(private=self.drafters[repo_id])

    def create_repo(self, repo_id, *, repo_type, space_sdk, private, exist_ok):
        self._call("create_repo")
        assert (repo_type, space_sdk, exist_ok) == ("space", "gradio", True)
        self.spaces.setdefault(repo_id, {"private": private, "files": {}})
        return f"https://huggingface.co/spaces/{repo_id}"

    def add_space_variable(self, repo_id, key, value):
        self._call("add_space_variable")
        self.variables[key] = value

    def get_space_variables(self, repo_id):
        self._call("get_space_variables")
        return {name: SimpleNamespace(key=name, value=value) for name, value in self.variables.items()}

    def delete_space_variable(self, repo_id, key):
        self._call("delete_space_variable")
        del self.variables[key]

    def upload_folder(self, *, repo_id, repo_type, folder_path, commit_message):
        self._call("upload_folder")
        assert repo_type == "space"
        folder = Path(folder_path)
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.spaces[repo_id]["files"] = files


@pytest.fixture
def hub(monkeypatch):
    fake = FakeHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(build_app(), ["space", *args], catch_exceptions=False)


def written_metadata(files, tmp_path):
    (tmp_path / "README.md").write_bytes(files["README.md"])
    return metadata_load(tmp_path / "README.md")


def test_the_space_as_it_stands_is_what_the_hub_asks_for():
    """Its front matter, by the Hub's reference of Space configuration."""
    folder = space_folder()
    metadata = metadata_load(folder / "README.md")
    assert metadata["sdk"] == "gradio"
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["sdk_version"])
    assert (folder / metadata["app_file"]).is_file()
    assert metadata["colorFrom"] in COLOURS
    assert metadata["colorTo"] in COLOURS
    assert len(metadata["short_description"]) <= 60
    assert not metadata["emoji"].isascii()
    assert (folder / "requirements.txt").read_text().startswith("hf-dspark")


def test_the_readme_lists_every_variable():
    source = (space_folder() / "settings.py").read_text()
    fields = re.findall(r"^    (\w+): \w+ = ", source, re.MULTILINE)
    listed = re.findall(r"^\| `DSPARK_(\w+)`", (space_folder() / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(field.upper() for field in fields)


def test_create_and_update(hub, tmp_path):
    for title in ("First", "Second: # ${x} {{y}}"):
        plan = publish_space("user/drafter", title=title, variables={"DSPARK_TIME_LIMIT": "30"}, token="hf_x")
    assert hub.token == "hf_x"
    space = hub.spaces["user/drafter-demo"]
    assert plan.url == "https://huggingface.co/spaces/user/drafter-demo"
    assert plan.files == {name: len(content) for name, content in sorted(space["files"].items())}
    assert {"app.py", "style.css", "README.md", "requirements.txt"} <= set(space["files"])
    assert not fnmatch.filter(space["files"], "*pycache*")
    assert hub.variables == {"DSPARK_DRAFTER": "user/drafter", "DSPARK_TITLE": title, "DSPARK_TIME_LIMIT": "30"}
    assert space["files"]["requirements.txt"].decode() == f"hf-dspark=={hf_dspark.__version__}\n"
    metadata = written_metadata(space["files"], tmp_path)
    assert (metadata["title"], metadata["models"], metadata["sdk"]) == (title, ["user/drafter"], "gradio")
    # The variables are there before the Space starts with its files.
    assert hub.calls.index("add_space_variable") < hub.calls.index("upload_folder")


def test_target_package_and_name_of_its_own(hub, tmp_path):
    publish_space(
        "user/drafter", "team/page", target="org/target", package="hf-dspark @ git+https://example.org/x", private=True
    )
    space = hub.spaces["team/page"]
    assert space["private"] is True
    assert hub.variables["DSPARK_TARGET"] == "org/target"
    assert written_metadata(space["files"], tmp_path)["models"] == ["user/drafter", "org/target"]
    assert space["files"]["requirements.txt"] == b"hf-dspark @ git+https://example.org/x\n"


def test_an_update_removes_what_is_no_longer_given(hub, run):
    """Else the target of an earlier drafter would stay."""
    hub.variables = {"THEIR_OWN": "1", "DSPARK_OF_AN_OLD_VERSION": "1"}
    variables = {"DSPARK_TIME_LIMIT": "30", "DSPARK_DTYPE": "auto"}
    assert publish_space("user/drafter", target="org/target", variables=variables).removed == [
        "DSPARK_OF_AN_OLD_VERSION"
    ]
    plan = publish_space("user/drafter", variables={"DSPARK_DTYPE": "float32"})
    assert plan.removed == ["DSPARK_TARGET", "DSPARK_TIME_LIMIT"]
    assert hub.variables == {"THEIR_OWN": "1", **plan.variables}
    result = run("user/drafter")
    assert "Removed from the Space, as no longer given: DSPARK_DTYPE." in result.stdout
    assert "Removed" not in run("user/drafter").stdout


def test_a_failure_is_told_and_mended_by_running_again(hub):
    hub.fails_at = "upload_folder"
    with pytest.raises(OSError, match="503"):
        publish_space("user/drafter")
    hub.fails_at = None
    publish_space("user/drafter")
    assert hub.spaces["user/drafter-demo"]["files"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"drafter": "./my-drafter"}, "The drafter './my-drafter' is no Hub id"),
        ({"drafter": "drafter"}, "publish the drafter first"),
        ({"drafter": "user/drafter", "repo_id": "a b"}, "The Space 'a b' is no Hub id"),
        ({"drafter": "user/drafter", "target": "<b>"}, "The target '<b>' is no Hub id"),
        ({"drafter": "user/drafter", "variables": {"DSPARK_TOKENS": "1"}}, "knows no variable DSPARK_TOKENS"),
        *[
            ({"drafter": "user/drafter", "variables": {name: value}}, words)
            for name, value, words in (
                ("PATH", "/x", "knows no variable PATH"),
                ("DSPARK_TIME_LIMIT", "abc", "DSPARK_TIME_LIMIT must be a number, 0 or more, not 'abc'"),
                ("DSPARK_CONCURRENCY", "0", "DSPARK_CONCURRENCY must be a whole number, 1 or more"),
                ("DSPARK_DTYPE", "float99", "DSPARK_DTYPE must be one of auto, float32, bfloat16"),
                ("DSPARK_DRAFTER", "other/x", "DSPARK_DRAFTER is set by the argument 'drafter'"),
                ("DSPARK_TITLE", "Other", "DSPARK_TITLE is set by the argument 'title'"),
                ("DSPARK_TARGET", "not an id", "DSPARK_TARGET is set by the argument 'target'"),
            )
        ],
        ({"drafter": "user/missing"}, "There is no model user/missing on the Hub that you can see"),
    ],
)
def test_refusals(hub, arguments, words):
    with pytest.raises((ValueError, OSError), match=re.escape(words)):
        publish_space(**arguments)
    assert hub.spaces == {}


def test_dry_run_sends_nothing(hub, run):
    result = run("user/drafter", "--dry-run", "--title", "Mine", "--variable", "DSPARK_MAX_NEW_TOKENS=512")
    assert result.exit_code == 0, result.output
    assert hub.calls == []
    for words in (
        "Nothing is sent. To the Space user/drafter-demo would go:",
        "app.py",
        "DSPARK_DRAFTER='user/drafter'",
        "DSPARK_MAX_NEW_TOKENS='512'",
        "Other DSPARK_ variables that the Space has by now would be removed.",
        "title: Mine",
        "sdk: gradio",
    ):
        assert words in result.stdout


def test_command(hub, run):
    hub.drafters["user/drafter"] = True
    result = run("user/drafter", "--to", "team/page")
    assert result.exit_code == 0, result.output
    assert "variables are at https://huggingface.co/spaces/team/page" in result.stdout
    assert "give the Space a secret HF_TOKEN" in result.stdout
    assert run("user/drafter", "--variable", "nonsense").exit_code == 2
