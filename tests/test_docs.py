"""
Every snippet of README.md and docs/*.md runs, top to bottom, as a reader would paste it.

A page's Python and bash blocks run in one folder, Python in one namespace. The folder holds a pair by the names that
pages use, `my-target` and `my-drafter`; the embedded pair is the same. What a reader does not need to see can be put
in front in `<!-- python` ... `-->`. `<!-- slow -->` on the line before a block keeps it for the slow tests, and
`<!-- not run: REASON -->` for none. In bash, `hf-dspark` runs here, scripts of this repository run in the slow tests,
and of what only exists elsewhere the names are checked.
"""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import make_target
from typer.testing import CliRunner


ROOT = Path(__file__).resolve().parents[1]
README, GUIDES = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *GUIDES]
TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

BLOCK = re.compile(
    r"^<!-- python\n(?P<hidden>.*?)^-->"
    r"|(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^(?P<indent> *)```(?P<language>python|bash)[^\n]*\n(?P<code>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"slow|not run: .+")
# Commands that a page may show although they can't run here.
ELSEWHERE = ("cd", "curl", "docker", "export", "git", "hf", "mkdocs", "vllm")


@dataclass
class Block:
    name: str
    language: str
    code: str
    mark: str = ""


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        name = f"{page.name}, line {text.count(chr(10), 0, match.start()) + 1}"
        if match["hidden"]:
            found.append(Block(name, "python", match["hidden"]))
            continue
        mark = match["mark"] or ""
        code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(name, match["language"], code, mark if MARK.fullmatch(mark) else ""))
    return found


def commands(code: str) -> list[list[str]]:
    """The commands of a bash block as words, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [
        words for line in lines for command in line.split(" && ") if (words := shlex.split(command, comments=True))
    ]


class Reader:
    """Somebody who pastes the blocks of a page one after the other."""

    def __init__(self, folder: Path, target: Path, slow: bool) -> None:
        self.folder, self.target, self.slow = folder, target, slow
        self.names: dict = {"__name__": "__main__"}

    def read(self, page: Path) -> None:
        for block in blocks(page):
            if block.mark.startswith("not run") or (block.mark == "slow" and not self.slow):
                continue
            code = block.code.replace(TARGET_ID, str(self.target))
            if block.language == "python":
                exec(compile(code, block.name, "exec"), self.names)
                continue
            for words in commands(code):
                self.run(words, block.name)

    def run(self, words: list[str], where: str) -> None:
        program, *arguments = words
        if program == "hf-dspark":
            self.run_command(arguments, where)
        elif program == "make":
            self.check_targets(arguments, where)
        elif program == "pip":
            self.check_extras(arguments, where)
        elif any(word.endswith(".py") for word in arguments):
            self.run_script(words, where)
        else:
            known = program in ELSEWHERE or words[:3] == ["python", "-m", "sglang.launch_server"]
            assert known, f"{where}: nothing says how `{program}` is to be tested; see {Path(__file__).name}"

    def run_command(self, arguments: list[str], where: str) -> None:
        from hf_dspark.cli import build_app

        result = CliRunner().invoke(build_app(), arguments)
        said = f"{result.output}\n{result.exception}"
        # The real pair has Llama layers, which not every format carries; the tiny one carries them all.
        refused = self.slow and arguments[0] == "convert" and "can't carry this drafter" in said
        assert result.exit_code == 0 or refused, f"{where}: {' '.join(arguments)}\n{said}"

    def run_script(self, words: list[str], where: str) -> None:
        script = next(word for word in words if word.endswith(".py"))
        if (self.folder / script).is_file():  # one that the page itself has written
            path = self.folder / script
        else:
            path = ROOT / script
            assert path.is_file(), f"{where}: there is no {script}"
        if words[0] == "python" and self.slow and not any(re.fullmatch(r"[A-Z][A-Z_]{3,}", word) for word in words):
            command = [sys.executable, *(str(path) if word == script else word for word in words[1:])]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{where}: {done.stderr[-2000:]}"

    def check_targets(self, arguments: list[str], where: str) -> None:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in arguments if "=" not in word):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"{where}: no `make {target}`"

    def check_extras(self, arguments: list[str], where: str) -> None:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        for extra in re.findall(r"hf-dspark\[([^]]+)\]", " ".join(arguments)):
            for name in extra.split(","):
                assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"{where}: there is no extra {name!r}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    return tmp_path / "page"


@pytest.fixture(scope="module")
def tiny_qwen3_pair(tmp_path_factory, tiny_tokenizer) -> tuple[Path, Path]:
    """Like the tiny pair, with Qwen3 layers: every format carries a drafter that has those."""
    from hf_dspark import DSparkDrafter

    root = tmp_path_factory.mktemp("pair_of_pages")
    target = make_target("qwen3", vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id)
    target.save_pretrained(root / "target")
    tiny_tokenizer.save_pretrained(root / "target")
    DSparkDrafter.from_target(target, tokenizer=tiny_tokenizer).save_pretrained(root / "drafter")
    return root / "target", root / "drafter"


@pytest.fixture
def tiny_reader(tiny_qwen3_pair, folder, monkeypatch) -> Reader:
    """Reads the pages with a tiny pair in place of the embedded one."""
    target, drafter = tiny_qwen3_pair
    monkeypatch.setenv("HF_DSPARK_EMBEDDED_TARGET", str(target))
    monkeypatch.setenv("HF_DSPARK_EMBEDDED_DRAFTER", str(drafter))
    return reader(folder, target, drafter, slow=False)


def reader(folder: Path, target: Path, drafter: Path, slow: bool) -> Reader:
    (folder / "my-target").symlink_to(target)
    shutil.copytree(drafter, folder / "my-drafter")
    return Reader(folder, target, slow)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guide_on_a_tiny_pair(page, tiny_reader):
    tiny_reader.read(page)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guide_on_the_real_pair(page, folder):
    from hf_dspark.hub import embedded_drafter, embedded_target

    reader(folder, embedded_target(), embedded_drafter(), slow=True).read(page)


def test_readme_on_a_tiny_pair(tiny_reader, folder, capsys):
    tiny_reader.read(README)
    assert "tokens per target forward" in capsys.readouterr().out
    assert tiny_reader.names["trainer"].state.global_step == 2
    assert (folder / "my-drafter" / "config.json").is_file()


@pytest.mark.real
@pytest.mark.slow
def test_readme_on_the_real_pair(folder, capsys):
    from hf_dspark.hub import embedded_drafter, embedded_target

    reader(folder, embedded_target(), embedded_drafter(), slow=True).read(README)
    per_forward = re.search(r"(\d+\.\d+) tokens per target forward", capsys.readouterr().out)
    assert float(per_forward[1]) > 1.2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left_in_text(page):
    """Only comments may say that something is still to be filled."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "TO FILL" not in text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Links to files of this repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_reader_notices():
    """What a page gets wrong is told."""
    unlucky = Reader(Path("."), Path("."), slow=False)
    for command, complaint in (
        ("pip install hf-dspark[moon]", "no extra 'moon'"),
        ("make moon", "no `make moon`"),
        ("python examples/moon.py", "no examples/moon.py"),
        ("moon landing", "nothing says how `moon`"),
        ("hf-dspark inspect nowhere-at-all", "nowhere-at-all"),
    ):
        with pytest.raises(AssertionError, match=re.escape(complaint)):
            unlucky.run(shlex.split(command), "page")
