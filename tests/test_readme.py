"""Every Python snippet of the README runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest


README = Path(__file__).resolve().parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_snippets(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    for number, snippet in enumerate(SNIPPETS, 1):
        exec(compile(snippet, f"README.md, Python snippet {number}", "exec"), names)
    return names


def test_snippets_on_a_tiny_pair(tiny_embedded_pair, tmp_path, monkeypatch, capsys):
    names = run_snippets(tmp_path, monkeypatch)
    assert "tokens per target forward" in capsys.readouterr().out
    assert names["trainer"].state.global_step == 2
    assert (tmp_path / "my-drafter" / "config.json").is_file()


@pytest.mark.real
@pytest.mark.slow
def test_snippets_on_the_real_pair(tmp_path, monkeypatch, capsys):
    run_snippets(tmp_path, monkeypatch)
    per_forward = re.search(r"(\d+\.\d+) tokens per target forward", capsys.readouterr().out)
    assert float(per_forward[1]) > 1.2


def test_no_placeholder_is_left_in_text():
    """Only comments may say that something is still to be filled."""
    text = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "TO FILL" not in text
