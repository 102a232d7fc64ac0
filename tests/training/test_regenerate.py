"""The target answers prompts: exactly as it generates, and the same after a kill as without one."""

import json

import pytest
import torch
from chat_server import ChatServer
from conftest import make_target, make_tokenizer
from datasets import Dataset, load_dataset

from hf_dspark import Endpoint, regenerate
from hf_dspark.training.data import prepare_dataset, tokenize_example
from hf_dspark.training.journal import Journal
from hf_dspark.training.local_target import LocalTarget


PROMPTS = [f"Question {i}: {'why? ' * (i % 4)}" for i in range(7)]
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools[0]['function']['name'] }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


class KilledError(BaseException):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer):
    return make_target(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )


@pytest.fixture
def answer(target, tokenizer, tmp_path):
    """Answers with small settings."""

    def run(prompts=PROMPTS, output=tmp_path / "answers", **settings):
        defaults = {"tokenizer": tokenizer, "max_new_tokens": 8, "batch_size": 3, "progress": False}
        return regenerate(settings.pop("target", target), prompts, output, **defaults | settings)

    return run


def test_greedy_answers_are_those_of_generate(answer, target, tokenizer):
    found = answer()
    assert found["prompt"] == [[{"role": "user", "content": text}] for text in PROMPTS]
    for row in found:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        plain = target.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert row["prompt_ids"] == ids
        assert row["completion_ids"] == plain.tolist()
        assert row["finished"] is (plain[-1] == tokenizer.eos_token_id).item()
        assert tokenizer.decode(plain, skip_special_tokens=True) == row["completion"][0]["content"]


def test_the_trainer_sees_exactly_the_target_s_tokens(answer, tokenizer):
    found = answer()
    prepared = prepare_dataset(found, tokenizer, 500)
    assert prepared["input_ids"] == [row["prompt_ids"] + row["completion_ids"] for row in found]
    assert [sum(mask) for mask in prepared["loss_mask"]] == [len(ids) for ids in found["completion_ids"]]


def test_an_answer_that_ends_is_finished(answer, tokenizer, monkeypatch):
    end = tokenizer.eos_token_id
    monkeypatch.setattr(
        LocalTarget, "continue_all", lambda self, prompts, *_: [[70, end], *[[70, 71]] * 2][: len(prompts)]
    )
    assert answer(PROMPTS[:3])["finished"] == [False, False, True]  # the longest prompt comes first


def test_answers_that_are_cut_off_can_be_left_out(answer, tmp_path, tokenizer, monkeypatch):
    end = tokenizer.eos_token_id
    monkeypatch.setattr(LocalTarget, "continue_all", lambda self, prompts, *_: [[70, end], [70, 71], [70, 71]])
    found = answer(PROMPTS[:3], drop_unfinished=True)
    assert [row["completion"][0]["content"] for row in found] == [tokenizer.decode([70])]
    result = json.loads((tmp_path / "answers" / "regenerate.json").read_text())["result"]
    assert result == {"answers": 1, "cut_off": 2, "refused": 0, "answer_tokens": 2}


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_killed_run_goes_on_to_the_same_dataset(answer, tmp_path, monkeypatch, batches):
    settings = {"temperature": 1.0, "seed": 5}
    whole = answer(output=tmp_path / "whole", **settings)
    generate, calls = LocalTarget.continue_all, []

    def killed(self, *args):
        if len(calls) == batches:
            raise KilledError
        calls.append(1)
        return generate(self, *args)

    monkeypatch.setattr(LocalTarget, "continue_all", killed)
    with pytest.raises(KilledError):
        answer(**settings)
    # The line that was being written when the power went.
    with (tmp_path / "answers" / ".answers.jsonl").open("a") as file:
        file.write('[[3, {"completion": "ha')
    counted = []
    monkeypatch.setattr(
        LocalTarget, "continue_all", lambda self, prompts, *args: counted.append(1) or generate(self, prompts, *args)
    )
    assert answer(**settings).to_list() == whole.to_list()
    assert len(counted) == 3 - batches
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == ["regenerate.json", "train.jsonl"]


def test_a_finished_run_is_read_again(answer, monkeypatch):
    first = answer()
    monkeypatch.setattr(LocalTarget, "continue_all", lambda *_: pytest.fail("answered again"))
    assert answer().to_list() == first.to_list()


def test_seeds_give_other_answers_and_leave_the_caller_s_randomness_alone(answer, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = answer(output=tmp_path / "a", temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert first["completion_ids"] != answer(output=tmp_path / "b", temperature=1.0, seed=1)["completion_ids"]


@pytest.mark.parametrize(
    "change,told",
    [
        ({"temperature": 0.7}, "sampling temperature: None there, 0.7 now"),
        ({"prompts": PROMPTS[:2]}, "prompts given: 7 there, 2 now"),
        ({"seed": 9}, "seed: 0 there, 9 now"),
        ({"target": make_target(vocab_size=261, seed=1)}, "weights: "),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs enable_thinking: None there, False now",
        ),
    ],
    ids=["sampling", "prompts", "seed", "fine-tuned target", "template arguments"],
)
def test_answers_of_other_settings_are_not_mixed(answer, change, told):
    answer()
    with pytest.raises(ValueError, match=f"holds answers of another run .*{told}.*or another output folder"):
        answer(**change)


def test_memory_too_small_names_the_way_on(answer, monkeypatch, target):
    def too_much(**_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(target, "generate", too_much)
        with pytest.raises(ValueError, match=r"Out of memory with 3 prompts .* smaller batch size"):
            answer()
    assert len(answer(batch_size=1)) == 7


def test_sampling_settings_and_versions_are_recorded(answer, tmp_path):
    answer(temperature=0.6, top_p=0.9, top_k=20, seed=4)
    record = json.loads((tmp_path / "answers" / "regenerate.json").read_text())
    sampling = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert record["sampling"].items() >= sampling.items()
    assert record["seed"] == 4 and record["versions"]["torch"] == torch.__version__
    assert record["result"]["answers"] == 7 and record["result"]["answer_tokens"] > 7


def test_the_target_s_own_settings_are_the_default(target, tokenizer, monkeypatch):
    monkeypatch.setattr(target.generation_config, "do_sample", True)
    monkeypatch.setattr(target.generation_config, "temperature", 0.6)
    local = LocalTarget(target, tokenizer)
    own = local.generation_config(8, None, None, None)
    assert (own.do_sample, own.temperature) == (True, 0.6)
    wide = local.generation_config(8, 1.0, None, None)
    assert (wide.temperature, wide.top_p, wide.top_k) == (1.0, 1.0, 0)
    assert local.generation_config(8, 0, None, None).do_sample is False


def test_chats_tools_and_template_arguments_reach_the_template(answer, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING_TEMPLATE)
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "not the target's"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    found = answer(
        [{"messages": chat, "tools": [tool], "domain": "x"}, "d"], chat_template_kwargs={"enable_thinking": False}
    )
    text = tokenizer.decode(found[0]["prompt_ids"])
    assert text.endswith("c<|im_end|>\nTOOLS add\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "not the target's" not in text
    assert found["domain"] == ["x", None]
    assert found[1]["chat_template_kwargs"] == {"enable_thinking": False}
    for row in found:
        ids, mask = tokenize_example(row, tokenizer)
        assert [i for i, flag in zip(ids, mask) if flag] == row["completion_ids"]


def test_text_prompts_of_a_target_without_chat_template(answer, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    found = answer([{"prompt": "once upon"}])
    assert found[0]["prompt"] == "once upon" and isinstance(found[0]["completion"], str)
    with pytest.raises(ValueError, match="no chat template: give prompts as text"):
        answer([{"prompt": [{"role": "user", "content": "a"}]}], output=tmp_path / "unused")


def test_prompts_too_long_for_the_target_are_counted(answer, tmp_path, target):
    found = answer([PROMPTS[0], "long " * 200])
    assert len(found) == 1
    record = json.loads((tmp_path / "answers" / "regenerate.json").read_text())
    assert record["result"]["refused"] == 1
    with pytest.raises(ValueError, match="None of the 1 prompts has an answer: longer than the target's 512 tokens"):
        answer(["long " * 200], output=tmp_path / "long")


def test_another_s_dataset_is_not_taken_for_answers(answer, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "mine"}\n')
    with pytest.raises(ValueError, match=r"train.jsonl is not of `regenerate`.*another output folder"):
        answer(output=folder)
    assert [file.name for file in folder.iterdir()] == ["train.jsonl"]


def test_the_folder_is_a_dataset(answer, tmp_path):
    found = answer()
    assert (
        load_dataset(str(tmp_path / "answers"), split="train", cache_dir=str(tmp_path / "cache")).to_list()
        == found.to_list()
    )


def test_a_target_by_its_folder(tiny_pair, tmp_path):
    folder, _ = tiny_pair
    found = regenerate(str(folder), ["hi"], tmp_path / "answers", max_new_tokens=4, progress=False)
    assert len(found[0]["completion_ids"]) == 4


@pytest.mark.parametrize(
    "prompts,told",
    [
        ([], "no prompts to answer"),
        ([{"question": "a"}], "columns question"),
        ([""], "`prompt` must hold texts that are not empty"),
        ([{"prompt": "a", "picture": b"png"}], "can't be written as JSON .*bytes.*: leave it out"),
    ],
)
def test_prompts_of_no_use_are_refused(answer, prompts, told):
    with pytest.raises(ValueError, match=told):
        answer(prompts)


# ---------------------------------------------------------------------- prompts of its own


@pytest.fixture
def scripted(monkeypatch, tokenizer):
    """A target that writes `Question <number>?` from a short list, and sometimes does not end."""

    def write(self, prompts, config, seed):
        chance = torch.Generator().manual_seed(seed)
        numbers = torch.randint(0, 12, (len(prompts),), generator=chance).tolist()
        texts = [tokenizer(f"Question {n}?")["input_ids"] for n in numbers]
        return [ids + [tokenizer.eos_token_id] * (n != 0) for ids, n in zip(texts, numbers)]

    monkeypatch.setattr(LocalTarget, "continue_all", write)


def test_the_target_writes_prompts_once_each_and_answers_them(answer, scripted):
    found = answer(["given"], self_prompts=9)
    texts = [row["prompt"][0]["content"] for row in found]
    assert texts[0] == "given" and len(set(texts)) == 10
    assert all(text.startswith("Question ") and text != "Question 0?" for text in texts[1:])
    assert found["source"] == [None] + ["self-written"] * 9


def test_openers_begin_its_prompts(answer, scripted):
    found = answer(None, self_prompts=8, openers=["Why ", "Say "])
    texts = [row["prompt"][0]["content"] for row in found]
    assert {text[:4] for text in texts} == {"Why ", "Say "}


def test_killed_while_it_writes_prompts(answer, scripted, monkeypatch, tmp_path):
    whole = answer(None, output=tmp_path / "whole", self_prompts=9)
    write, calls = LocalTarget.continue_all, []

    def killed(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise KilledError
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTarget, "continue_all", killed)
        with pytest.raises(KilledError):
            answer(None, self_prompts=9)
    assert answer(None, self_prompts=9).to_list() == whole.to_list()


def test_a_prompt_ends_where_a_user_turn_does(target, tokenizer):
    """Which need be none of the ends of an answer."""
    mine = LocalTarget(target, tokenizer)
    config = mine.generation_config(6, temperature=0, top_p=None, top_k=None)
    prompt = tokenizer("Why", add_special_tokens=False)["input_ids"]
    whole = mine.continue_all([prompt], config, 0)[0]
    config.eos_token_id = [whole[2]]
    first = whole.index(whole[2])
    assert mine.continue_all([prompt, prompt[:1] * 5], config, 0)[0] == whole[: first + 1]


def test_a_target_with_nothing_more_to_say(answer, scripted):
    with pytest.raises(ValueError, match="wrote 11 different prompts of the 20 asked for"):
        answer(None, self_prompts=20)


def test_what_it_writes_is_its_continuation_of_a_user_turn(answer, target, tokenizer, monkeypatch):
    begun, generate = [], LocalTarget.continue_all
    monkeypatch.setattr(
        LocalTarget, "continue_all", lambda self, ids, *args: begun.append(ids) or generate(self, ids, *args)
    )
    found = answer(None, self_prompts=2, openers=["Why "])
    assert tokenizer.decode(begun[0][0]) == "<|im_start|>user\nWhy "
    assert all(row["prompt"][0]["content"].startswith("Why") for row in found)


# ---------------------------------------------------------------------- through a server


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def through(server, **options):
    return Endpoint(server.url, "my-model", **{"backoff": 0.001, "timeout": 2.0, "concurrency": 3, **options})


def test_a_server_answers_in_any_order_and_fails_at_times(answer, online):
    with ChatServer(failures=[500, "malformed", 429]) as server:
        found = answer(
            target=through(server), temperature=0.7, top_k=20, chat_template_kwargs={"enable_thinking": False}
        )
    assert [row["completion"][0]["content"] for row in found] == [f"You said: {text}" for text in PROMPTS]
    assert found["finished"] == [True] * 7
    body = server.requests[-1]
    assert body["temperature"] == 0.7 and body["max_tokens"] == 8 and body["top_k"] == 20
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({request["seed"] for request in server.requests}) == 7


def test_what_a_server_answered_is_not_asked_again(answer, online):
    failing = ChatServer(failures=[500] * 50)
    with failing as server, pytest.raises(ConnectionError, match="start the same command again"):
        answer(target=through(server, retries=1))
    with ChatServer() as server:
        server.answer = lambda body: ChatServer.echo(body) if len(server.requests) < 4 else 503
        with pytest.raises(ConnectionError):
            answer(target=through(server, retries=0, concurrency=1))
        server.answer, before = ChatServer.echo, len(server.requests)
        found = answer(target=through(server, concurrency=1))
        assert len(server.requests) - before == 4
    assert [row["completion"][0]["content"] for row in found] == [f"You said: {text}" for text in PROMPTS]


def test_a_prompt_that_a_server_refuses_is_left_out_and_counted(answer, online, tmp_path):
    def refuse_one(body):
        return 400 if "Question 3" in body["messages"][-1]["content"] else ChatServer.echo(body)

    with ChatServer(answer=refuse_one) as server:
        assert len(answer(target=through(server, concurrency=1))) == 6
    assert json.loads((tmp_path / "answers" / "regenerate.json").read_text())["result"]["refused"] == 1


def test_a_server_that_refuses_everything_is_an_error(answer, online):
    with ChatServer(answer=lambda body: 404) as server, pytest.raises(ValueError, match=r"refuses every prompt.*404"):
        answer(target=through(server))
    with ChatServer() as server:  # mended
        assert len(answer(target=through(server))) == 7


def test_a_run_that_never_began_does_not_hold_the_folder(answer, online):
    """Settings can be corrected in the same command."""
    with ChatServer(answer=lambda body: 404) as server, pytest.raises(ValueError, match="refuses every prompt"):
        answer(target=through(server), temperature=9.0)
    with ChatServer() as server:
        assert len(answer(target=through(server), temperature=0.9)) == 7
        with pytest.raises(ValueError, match="holds answers of another run"):
            answer(target=through(server), temperature=0.5)


def test_a_server_writes_no_prompts(answer):
    with pytest.raises(ValueError, match="An endpoint can't continue a user turn"):
        answer(target=Endpoint("http://localhost:1/v1", "m"), self_prompts=3)


def test_tool_calls_of_a_server_are_data(answer, online):
    def call(body):
        name = body["messages"][-1]["content"]
        function = {"name": name, "arguments": json.dumps({name: 1})}
        return ChatServer.message({"content": None, "tool_calls": [{"id": "1", "function": function}]}, "tool_calls")

    with ChatServer(answer=call) as server:
        found = answer(["add", "multiply"], target=through(server))
    calls = [row["completion"][0]["tool_calls"][0]["function"] for row in found]
    assert calls == [{"name": n, "arguments": {n: 1}} for n in ("add", "multiply")]


# ---------------------------------------------------------------------- files


def test_a_journal_drops_what_a_kill_tore_off(tmp_path):
    path = tmp_path / "journal"
    for entry in ({"a": 1}, ["b", "é\n"]):
        Journal(path).add(entry)
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert Journal(path).entries() == [{"a": 1}]
        Journal(path).add("c")
        assert Journal(path).entries() == [{"a": 1}, "c"]


def test_prompts_from_a_dataset(answer):
    found = answer(Dataset.from_list([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}]))
    assert found["id"] == [1, 2]
