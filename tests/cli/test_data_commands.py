"""`regenerate` and `show-data`: from prompts to what a drafter would learn."""

import json

import pytest
from chat_server import ChatServer
from typer.testing import CliRunner

from hf_dspark.cli import build_app
from hf_dspark.cli.show_data import harmless


CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is [bold]4[/bold]."}]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *args: CliRunner().invoke(build_app(), [str(arg) for arg in args])


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (CHAT, CHAT[:1], CHAT)))
    return path


def write_prompts(path, *texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_answers_then_what_is_supervised(run, tiny_embedded_pair, tmp_path):
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", "one", "two", "three"), tmp_path / "answers"
    options = ("--max-new-tokens", 5, "--temperature", 1.0, "--seed", 3, "--batch-size", 2, "--limit", 2)
    result = run("regenerate", "--prompts", prompts, "--output", output, *options)
    assert result.exit_code == 0, result.output
    assert "2 answers in" in result.stdout and "10 tokens, 2 cut off at the length limit" in result.stdout
    shown = run("show-data", output, "--plain")
    assert "5 supervised, cut off at the length limit" in shown.stdout
    assert "10 of " in shown.stdout and "2 of 2 examples shown" in shown.stdout
    other = run("regenerate", "--prompts", prompts, "--output", output, *options[:-2])
    assert other.exit_code == 1
    assert "prompts given: 2 there, 3 now" in str(other.exception)


def test_through_an_endpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", "one", "two"), tmp_path / "answers"
    with ChatServer() as server:
        options = ("--endpoint", server.url, "--target", "m", "--no-enable-thinking", "--extra-body", '{"min_p": 0.1}')
        result = run("regenerate", "--prompts", prompts, "--output", output, *options)
    assert result.exit_code == 0, result.output
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert server.requests[0]["min_p"] == 0.1
    rows = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [row["completion"][0]["content"] for row in rows] == ["You said: one", "You said: two"]


def test_supervised_text_stands_between_signs(run, tiny_embedded_pair, chats):
    result = run("show-data", chats, "--plain", "-n", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("--- example 0, ")
    # Markup in the data is text.
    assert "<|im_start|>assistant\n‹It is [bold]4[/bold].<|im_end|>›\n" in result.stdout


def test_in_frames_without_colour(run, tiny_embedded_pair, chats):
    result = run("show-data", chats, "--start", 1)
    assert "╭─ example 1" in result.stdout and "‹It is" in result.stdout
    assert "0 supervised" in result.stdout and "2 of 3 examples shown" in result.stdout


def test_nothing_supervised_is_an_error(run, tiny_embedded_pair, chats):
    result = run("show-data", chats, "--start", 1, "-n", 1)
    assert result.exit_code == 1
    assert "Nothing of what was shown is supervised" in str(result.exception)


def test_an_example_that_can_not_be_told_apart_is_named(run, tiny_embedded_pair, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a"}\n')
    assert "Example 0: An example has the columns ['question']" in str(run("show-data", path).exception)


def test_data_can_not_command_the_terminal(run, tiny_embedded_pair, tmp_path):
    path = tmp_path / "data.jsonl"
    evil = "a\x1b[2J\x07\x9b31m\r\u202eb"
    path.write_text(json.dumps({"prompt": "x", "completion": evil}) + "\n")
    for options in ((), ("--plain",)):
        shown = run("show-data", path, *options).stdout
        assert not any(c in shown for c in "\x1b\x07\x9b\r\u202e")
        assert "a\\x1b[2J\\x07" in shown


def test_what_can_be_printed_is_left_alone():
    text = "é 東京 🎉 a\u200db\n\u00a0c\td"
    assert harmless(text) == text.replace("\t", "    ")
    assert harmless("\u2028\x00\U000e0001") == "\\u2028\\x00\\U000e0001"


@pytest.mark.parametrize(
    "arguments,told",
    [
        (("regenerate", "--output", "x", "--endpoint", "http://localhost:1/v1"), "--target"),
        (("regenerate", "--output", "x", "--chat-template-kwargs", "[1]"), "must be a JSON object"),
        (("regenerate", "--output", "x", "--chat-template-kwargs", "{"), "is no JSON"),
        (("regenerate",), "Missing option '--output'"),
        (("show-data",), "Missing argument 'DATA'"),
    ],
)
def test_wrong_usage(run, arguments, told):
    result = run(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_what_is_not_there(run, tiny_embedded_pair, tmp_path):
    missing = tmp_path / "nothing.jsonl"
    assert f"There is no file or folder {missing}" in str(run("show-data", missing).exception)
    note = tmp_path / "note.docx"
    note.touch()
    assert "can't read a .docx file" in str(run("show-data", note).exception)
