"""A target behind a server: what is asked of it, and what happens when it fails."""

from threading import Event

import pytest
from chat_server import ChatServer

from hf_dspark import Endpoint
from hf_dspark.training.endpoint import RefusedError


CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(server, messages=CHAT, tools=None, stop=None, **options):
    endpoint = Endpoint(server.url, "my-model", **{"timeout": 0.3, "backoff": 0.001, "retries": 3, **options})
    return endpoint.answer(messages, tools, {"max_tokens": 7, "temperature": None}, stop or Event())


def test_an_answer_is_a_message():
    with ChatServer() as server:
        answer = ask(server)
    assert answer == {"completion": [{"role": "assistant", "content": "You said: hello"}], "finished": True}
    (request,) = server.requests
    assert request["model"] == "my-model" and request["messages"] == CHAT and request["max_tokens"] == 7
    assert "temperature" not in request  # not given: the server's own


@pytest.mark.parametrize("failure", [500, 503, 429, "timeout", "malformed", "empty", "hang up"])
def test_what_may_pass_is_tried_again(failure):
    with ChatServer(failures=[failure, failure]) as server:
        assert ask(server)["completion"][0]["content"] == "You said: hello"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "failure,told",
    [
        (500, "status 500: .*failure 500"),
        ("timeout", "no answer within 0.1 s"),
        ("malformed", "an answer that is no chat completion"),
    ],
)
def test_a_failure_that_lasts_is_told(failure, told):
    told = f"no usable answer in 2 attempts; the last problem: {told}.*again"
    with ChatServer(failures=[failure] * 9) as server, pytest.raises(ConnectionError, match=told):
        ask(server, retries=1, timeout=0.1 if failure == "timeout" else 2.0)
    assert len(server.requests) == 2


def test_a_refused_request_is_not_repeated():
    with ChatServer(failures=[400]) as server, pytest.raises(RefusedError, match=r"answers 400: .*failure 400"):
        ask(server)
    assert len(server.requests) == 1


def test_a_server_that_is_not_there():
    with ChatServer() as server:
        pass
    with pytest.raises(ConnectionError, match="Is the server up, and does it serve my-model"):
        ask(server, retries=1)


def test_nothing_is_tried_again_when_no_answer_is_wanted():
    stop = Event()
    stop.set()
    with ChatServer(failures=[500] * 9) as server, pytest.raises(ConnectionError):
        ask(server, stop=stop)
    assert len(server.requests) == 1


def test_tool_calls_thinking_and_exact_tokens_are_kept():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    message = {"content": None, "reasoning_content": "I should add.", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

    def answer(body):
        return ChatServer.message(message, "tool_calls", token_ids=[5, 6]) | {"prompt_token_ids": [1, 2, 3]}

    with ChatServer(answer=answer) as server:
        found = ask(server, tools=tools, extra_body={"return_token_ids": True})
    assert server.requests[0]["return_token_ids"] is True
    assert server.requests[0]["tools"][0]["function"]["name"] == "add"
    (completion,) = found["completion"]
    assert completion["reasoning_content"] == "I should add."
    assert completion["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    ]
    assert found["prompt_ids"] == [1, 2, 3] and found["completion_ids"] == [5, 6]


def test_an_answer_cut_off_is_marked():
    with ChatServer(answer=lambda body: ChatServer.message({"content": "and then"}, "length")) as server:
        assert ask(server)["finished"] is False


def test_a_hub_token_is_never_sent(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with ChatServer() as server:
        ask(server)
        ask(server, api_key="mine")
        monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
        ask(server)
    assert server.keys == ["Bearer none", "Bearer mine", "Bearer from-environment"]
    assert "mine" not in repr(Endpoint(server.url, "m", api_key="mine"))


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with ChatServer() as server, pytest.raises(ValueError, match="Set HF_HUB_OFFLINE=0 for this command"):
        ask(server)


def test_what_is_no_address_is_refused():
    with pytest.raises(ValueError, match="begins with http"):
        Endpoint("localhost:8000", "m")
    with pytest.raises(ValueError, match="`concurrency` must be at least 1"):
        Endpoint("http://localhost", "m", concurrency=0)
