"""The Space without a browser: its settings, what it shows, how replies are written and stopped, whom it loads."""

import copy
import json
import re
import shutil
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import replies
import torch
import views
from chat_template import ChatTemplate, TemplateError
from hostile import HOSTILE
from huggingface_hub import constants
from pairs import PairError, Pairs
from replies import Brake, Lane, PromptError, Turns, count, encode, watch
from settings import Settings
from simulator import Load, simulate


# ---------------------------------------------------------------------- settings


def test_settings_come_from_variables():
    assert Settings.from_environment({"HOME": "/x", "DSPARK_TITLE": " "}) == Settings()
    given = {"DSPARK_DRAFTER": "user/drafter", "DSPARK_MAX_NEW_TOKENS": "32", "DSPARK_DOWNLOAD_LIMIT_GB": "0"}
    settings = Settings.from_environment(given)
    assert (settings.drafter, settings.max_new_tokens, settings.download_limit_gb) == ("user/drafter", 32, 0.0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DSPARK_MAX_NEW_TOKENS": "many"}, "DSPARK_MAX_NEW_TOKENS must be a whole number, 1 or more, not 'many'"),
        ({"DSPARK_CONCURRENCY": "0"}, "DSPARK_CONCURRENCY must be a whole number, 1 or more"),
        ({"DSPARK_DTYPE": "float99"}, "DSPARK_DTYPE must be one of auto, float32, bfloat16, not 'float99'"),
        ({"DSPARK_TIME_LIMIT": "nan"}, "DSPARK_TIME_LIMIT must be a number, 0 or more"),
        ({"DSPARK_TARGET": "user/target"}, "DSPARK_TARGET is set without DSPARK_DRAFTER"),
        ({"DSPARK_MAX_TOKENS": "5"}, "Unknown variables DSPARK_MAX_TOKENS; known are DSPARK_CONCURRENCY"),
    ],
)
def test_senseless_variables_are_refused(environment, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Settings.from_environment(environment)


# ---------------------------------------------------------------------- texts


class Reader(HTMLParser):
    """What a browser makes of a page: tags and text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text):
    page = views.conversation(
        [views.Message("user", [(text, "plain")]), views.Message("assistant", [(text, "bonus")])]
    )
    reader = Reader(page)
    assert reader.text.count(text) == 2
    assert set(reader.tags) <= {"div", "article", "h2", "span"}
    for sign in ("${", "{{", "@", "`"):
        assert sign not in page
    assert Reader(views.notice(text, "error")).text == text
    assert Reader(views.runs_table([{"Schedule": text}])).text == "Schedule" + text
    assert text in Reader(views.heading(text)).text


def test_tokens_tell_where_they_come_from():
    page = views.marked([("a", "plain"), ("b", "accepted"), ("c", "accepted"), ("d", "correction"), ("e", "bonus")])
    spans = [
        f"<span class='token {o}'>{t}</span>" for t, o in zip("bcde", ("accepted",) * 2 + ("correction", "bonus"))
    ]
    assert page == "a" + "".join(spans)
    legend = views.legend()
    assert all(f"token {origin}" in legend for origin in ("accepted", "correction", "bonus"))


# ---------------------------------------------------------------------- replies


def lane_for(pair, text="hello", drafted=True, brake=None, **settings):
    inputs, _ = encode(pair, [{"role": "user", "content": text}], 200)
    brake = brake or Brake(60)
    return Lane(pair, inputs, drafted, brake, do_sample=False, **settings)


def test_a_reply_is_what_plain_decoding_writes(small_pair):
    plain, drafted = (lane_for(small_pair, drafted=drafted, max_new_tokens=40) for drafted in (False, True))
    for lane in (plain, drafted):
        frames = list(watch([lane]))
        assert lane.done
        assert frames
    assert drafted.ids == plain.ids
    assert drafted.text == plain.text
    assert plain.target_forwards == len(plain.ids) == 40
    assert drafted.seconds > 0


def test_a_long_text_is_drawn_less_often():
    assert replies._frame(0) == replies._frame(200) == replies.FRAME
    assert replies.FRAME < replies._frame(1000) < replies._frame(2000) < replies._frame(10**6) == 1.0


def test_live_counts_are_those_of_the_run(small_pair):
    lane = lane_for(small_pair, max_new_tokens=40)
    for _ in watch([lane]):
        pass
    live, final = count(lane.recorder), lane.speculation
    assert live is not final
    for name in ("accepted_lengths", "proposed", "verified", "accepted", "target_forwards", "generated_tokens"):
        assert getattr(live, name) == getattr(final, name), name


def test_lanes_take_turns_and_only_their_own_time_counts():
    turns = Turns(2)
    running, most, order = [], [], []

    def work(lane, pause):
        for _ in range(4):
            turns.take(lane)
            running.append(lane)
            most.append(len(running))
            order.append(lane)
            time.sleep(pause)
            running.remove(lane)
        turns.leave(lane)

    threads = [threading.Thread(target=work, args=(0, 0.06)), threading.Thread(target=work, args=(1, 0.02))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(most) == 1
    # The quick lane gets on while the slow one has used more of the processor.
    assert order[:3] == [0, 1, 1]
    assert turns.seconds[0] > turns.seconds[1] >= 0.08


def test_a_brake_ends_both_kinds_of_decoding_at_once(small_pair):
    for drafted in (False, True):
        brake = Brake(60)
        lane = lane_for(small_pair, drafted=drafted, brake=brake, max_new_tokens=5000)
        for _ in watch([lane]):
            brake.stop()
        assert 0 < len(lane.ids) < 5000
        assert lane.ended == "Stopped"
    lane = lane_for(small_pair, brake=Brake(0.0), max_new_tokens=5000)
    for _ in watch([lane]):
        pass
    assert lane.ended == "Cut off at the time limit"
    assert len(lane.ids) < 5000


def test_nobody_watching_ends_the_reply(small_pair):
    lane = lane_for(small_pair, max_new_tokens=5000)
    frames = watch([lane])
    next(frames)
    frames.close()
    assert lane.done
    assert len(lane.ids) < 5000


def test_what_the_library_refuses_reaches_the_reader(small_pair):
    lane = lane_for(small_pair, max_new_tokens=5, num_assistant_tokens=99)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        list(watch([lane]))


def test_long_conversations_lose_their_beginning(small_pair):
    turns = [{"role": role, "content": "x" * 60} for role in ("user", "assistant") * 2] + [
        {"role": "user", "content": "the last"}
    ]
    whole, left_out = encode(small_pair, turns, 10_000)
    assert left_out == 0
    length = whole["input_ids"].shape[1]
    inputs, left_out = encode(small_pair, turns, length - 1)
    assert left_out == 2
    assert torch.equal(inputs["input_ids"][0], whole["input_ids"][0, -inputs["input_ids"].shape[1] :])
    with pytest.raises(PromptError, match="tokens, and 5 is the most"):
        encode(small_pair, turns, 5)
    with pytest.raises(PromptError, match="Write a message first"):
        encode(small_pair, [{"role": "user", "content": " \n"}], 100)


def test_one_piece_of_work_a_visitor():
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "hf-dspark[space]"')
    from work import Work

    work = Work(Settings(), None)
    one, two = SimpleNamespace(session_hash="1"), SimpleNamespace(session_hash="2")
    assert "Write a message first" in work.begin(" ", "1")
    assert "Shorten it" in work.begin("x" * 30_000, "1")
    assert work.begin("hello", "1") == work.begin("hello", "2") == ""
    assert "not over yet" in work.begin("again", "1")
    brake = work.claim(one)
    # Only one handler gets it, so an impatient second message can't have the first answered twice.
    assert work.claim(one) is None
    work.stop(one)
    assert brake.reason == "Stopped"
    assert work.claim(two).reason == ""
    work.release(one)
    assert work.stop(one) == {"status": "Nothing is being written."}
    # Given up before its turn came.
    assert work.begin("hello", "1") == ""
    work.stop(one, unwanted=True)
    assert work.claim(one) is None
    assert work.begin("hello", "1") == ""
    work.leave(one)
    assert work.begin("hello", "1") == ""


# ---------------------------------------------------------------------- the race's verdict


@pytest.mark.parametrize(
    ("plain", "drafted", "words", "kind"),
    [
        ((40, ""), (40, ""), "Same text, all 40 tokens, in 40 forwards", "good"),
        ((40, ""), (12, "Stopped"), "Stopped. As far as both got (12 tokens), the text is the same.", "info"),
        ((10, "Stopped"), (40, ""), "Stopped. As far as both got (10 tokens), the text is the same.", "info"),
        ((12, ""), (40, "Stopped"), "The texts part at token 13.", "error"),
        ((40, ""), (12, ""), "The texts part at token 13. In float32 that must not happen", "error"),
    ],
)
def test_the_verdict_looks_at_how_both_ended(small_pair, plain, drafted, words, kind):
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "hf-dspark[space]"')
    from race import _verdict

    lanes = [
        SimpleNamespace(ids=[*range(length)], ended=ended, target_forwards=length, tokens_per_second=1.0)
        for length, ended in (plain, drafted)
    ]
    verdict, found = _verdict(*lanes, small_pair)
    assert verdict.startswith(words)
    assert found == kind


# ---------------------------------------------------------------------- the page


@pytest.mark.parametrize("longest", [1, 2, 8, 9])
def test_the_page_stands_whatever_the_owner_sets(tiny_embedded_pair, longest):
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "hf-dspark[space]"')
    import app

    settings = Settings(max_new_tokens=longest)
    blocks = app.build(settings, Pairs(settings))
    (slider,) = (block for block in blocks.blocks.values() if block.elem_id == "length")
    assert slider.value == longest
    assert slider.interactive == (longest > 1)


@pytest.mark.parametrize("num_drafts", [1, 2, 16])
def test_the_page_stands_whatever_the_drafter_drafts(num_drafts):
    pytest.importorskip("gradio", reason='the page needs gradio: pip install "hf-dspark[space]"')
    import app
    from pair_choice import PairChoice

    pair = SimpleNamespace(num_drafts=num_drafts, target_name="t", drafter_name="d", place="", is_measured=False)
    pairs = SimpleNamespace(own=pair)
    blocks = app.build(Settings(), pairs)
    (slider,) = (block for block in blocks.blocks.values() if block.elem_id == "drafts")
    changed = PairChoice(pairs).reset()["drafts"]
    for each in (slider, changed):
        assert (each.minimum, each.maximum, each.value) == (1, max(num_drafts, 2), num_drafts)
        assert each.interactive == (num_drafts > 1)


# ---------------------------------------------------------------------- the simulator


ROOMY = Load(rows=8, drafts=5, acceptance=0.8, free_tokens=512, draft_cost=0.1)


def test_the_simulated_schedule_checks_what_the_load_allows():
    free, scarce, none = (simulate(replace(ROOMY, free_tokens=tokens)) for tokens in (512, 24, 1))
    assert free.mean_length == 5
    assert free.scheduled == pytest.approx(free.all_checked)
    assert free.scheduled > 2 * free.plain
    assert 0.5 < scarce.mean_length < 4
    assert scarce.scheduled > scarce.all_checked
    assert len(set(scarce.lengths)) > 1
    assert (none.mean_length, none.scheduled) == (0, none.plain)
    assert none.paused > 40


def test_the_simulator_asks_the_librarys_own_schedule(monkeypatch):
    """With a schedule that checks everything in its place, both ways come out the same."""
    import simulator

    from hf_dspark.generation.scheduling import Schedule

    monkeypatch.setattr(simulator, "ThroughputSchedule", lambda settings, profile: Schedule(settings))
    outcome = simulate(replace(ROOMY, free_tokens=1))
    assert outcome.mean_length == 5
    assert outcome.scheduled == outcome.all_checked


@pytest.mark.parametrize("rows", [1, 64])
def test_what_the_simulator_shows(rows):
    load = replace(ROOMY, rows=rows)
    outcome = simulate(load)
    reader = Reader(views.simulation(load, outcome))
    assert f"{outcome.scheduled / outcome.plain:.2f}×" in reader.text
    assert f"without drafts: {rows} tokens" in reader.text
    assert f"By request: {', '.join(map(str, outcome.lengths))}." in reader.text
    assert len(outcome.lengths) == rows


# ---------------------------------------------------------------------- pairs


@pytest.fixture
def pairs(tiny_embedded_pair, tiny_hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tiny_hub))
    return Pairs(Settings())


def test_visitors_pairs_are_loaded_once_and_kept_apart(pairs):
    pair = pairs.load("tiny/target", " tiny/drafter ")
    assert pair is pairs.load("tiny/target", "tiny/drafter")
    assert pair is not pairs.own
    assert (pair.target_name, pair.drafter_name) == ("tiny/target", "tiny/drafter")
    assert pairs.get(None) is pairs.own
    assert pairs.get(("tiny/target", "tiny/drafter")) is pair


@pytest.mark.parametrize(
    ("target", "drafter", "words"),
    [
        ("", "", "Name the drafter: its id on the Hub"),
        ("tiny/target", "../../etc/passwd", "is no Hub id"),
        ("tiny/target", "/etc", "is no Hub id"),
        *[("tiny/target", text, "is no Hub id") for text in HOSTILE],
        (HOSTILE[0], "tiny/drafter", "The target's id looks like user/model"),
        ("tiny/target", "nobody/nothing", "The drafter nobody/nothing can't be had"),
        ("tiny/target", "tiny/target", "The drafter tiny/target can't be loaded."),
        ("tiny/drafter", "tiny/drafter", "The target tiny/drafter can't be loaded. It has no tokenizer."),
    ],
)
def test_pairs_that_will_not_do_are_refused_in_words(pairs, target, drafter, words):
    with pytest.raises(PairError, match=words) as refusal:
        pairs.load(target, drafter)
    assert len(str(refusal.value)) < 500


def edited(name, **changes):
    """Breaks a repository by other values in one of its files."""

    def edit(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return edit


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("what", "harm", "words"),
    [
        ("drafter", written("model.safetensors", b"\x01" * 90), "damaged or cut off"),
        ("drafter", edited("config.json", block_size="x"), "`block_size` 'x' must be of the type int"),
        ("target", written("model.safetensors", b"\x01" * 90), "damaged or not what they should be (SafetensorError"),
        ("target", edited("config.json", hidden_size="x"), "expected int, got str"),
        ("target", edited("config.json", num_attention_heads=0), "damaged or not what they should be (ZeroDivision"),
        ("target", edited("config.json", hidden_act="nope"), "damaged or not what they should be (KeyError: 'nope')"),
        ("target", written("config.json", b"[]"), "Unrecognized model in tiny/harmed"),
        ("target", written("tokenizer.json", b"{}"), "damaged or not what they should be (KeyError: 'added_tokens')"),
        ("target", written("tokenizer_config.json", b"[]"), "damaged or not what they should be (AttributeError"),
        ("target", written("generation_config.json", b'{"max_new_tokens": "a"}'), "should be (TypeError"),
        ("target", lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
        ("target", lambda folder: (folder / "tokenizer.json").unlink(), "It has no tokenizer."),
    ],
)
def test_damaged_repositories_get_one_notice(pairs, tiny_hub, tiny_pair, place_in_cache, tmp_path, what, harm, words):
    shutil.copytree(tiny_pair[what == "drafter"], tmp_path / "harmed")
    harm(tmp_path / "harmed")
    place_in_cache(tiny_hub, "tiny/harmed", tmp_path / "harmed")
    try:
        asked = {"target_id": "tiny/target", "drafter_id": "tiny/drafter", f"{what}_id": "tiny/harmed"}
        with pytest.raises(PairError, match=f"^The {what} tiny/harmed can't be loaded. ") as refusal:
            pairs.load(**asked)
    finally:
        shutil.rmtree(tiny_hub / "models--tiny--harmed")
    assert words in str(refusal.value)
    assert not re.search(r"(^|[\s'\"])/\w", str(refusal.value))  # a path of this machine


def test_a_drafter_whose_target_has_no_name(pairs, tiny_hub, tiny_pair, place_in_cache, tmp_path):
    shutil.copytree(tiny_pair[1], tmp_path / "drafter")
    edited("config.json", target_name_or_path=None)(tmp_path / "drafter")
    place_in_cache(tiny_hub, "tiny/unnamed", tmp_path / "drafter")
    with pytest.raises(PairError, match="does not say which target"):
        pairs.load("", "tiny/unnamed")


# ---------------------------------------------------------------------- chat templates of visitors


def template_of(pair, template):
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.chat_template = template
    return replace(pair, tokenizer=tokenizer, chat_template=ChatTemplate(tokenizer, "user/target"))


def test_a_visitors_target_gets_its_own_chat_template(pairs):
    turns = [
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    (ours, _), (theirs, _) = (encode(pairs.get(key), turns, 1000) for key in (None, ("tiny/target", "tiny/drafter")))
    assert pairs.own.chat_template is None
    assert pairs.get(("tiny/target", "tiny/drafter")).chat_template is not None
    assert torch.equal(ours["input_ids"], theirs["input_ids"])


def test_templates_that_fail_are_told_of(small_pair):
    """And the next message may be better."""
    failures = {
        "raise": ("{{ raise_exception('only turns of two') }}", "TemplateError: only turns of two"),
        "divide": ("{{ 1 / 0 }}", "ZeroDivisionError"),
        "write": ("{{ text * 2000000 }}", "it writes too much"),
        "fill": ("{{ text * 20000000000 }}", "it takes too much memory"),
    }
    cases = "".join(f"{{% if text == '{text}' %}}{code}{{% endif %}}" for text, (code, _) in failures.items())
    pair = template_of(small_pair, f"{{% set text = messages[0]['content'] %}}{cases}fine")
    for text, (_, words) in failures.items():
        with pytest.raises(TemplateError, match=f"The chat template of user/target can't be used: {words}"):
            encode(pair, [{"role": "user", "content": text}], 100)
    assert encode(pair, [{"role": "user", "content": "hello"}], 100)[0]["input_ids"].shape[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = 10 ** 8 %}{{ 10 ** n }}",
    ],
)
def test_endless_templates_are_ended(small_pair, endless):
    """The second is one instruction to Python, which no flag and no other thread could end."""
    pair = template_of(small_pair, f"{{% if messages[0]['content'] == 'bad' %}}{endless}{{% endif %}}fine")
    with pytest.raises(TemplateError, match="it takes more than 5 seconds"):
        encode(pair, [{"role": "user", "content": "bad"}], 100)
    assert encode(pair, [{"role": "user", "content": "good"}], 100)[0]["input_ids"].shape[1] > 0


def test_a_folder_of_the_machine_is_no_hub_id(pairs, tiny_pair, monkeypatch, tmp_path):
    """`from_pretrained` would take a folder that happens to lie there for the id."""
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "drafter").symlink_to(tiny_pair[1])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PairError, match="can't be had"):
        pairs.load("tiny/target", "local/drafter")


def test_code_in_a_repository_is_not_run(pairs, tiny_hub, tiny_pair, place_in_cache, tmp_path):

    folder = tmp_path / "target"
    shutil.copytree(tiny_pair[0], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "hostile", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'harmed')!r}, 'w')")
    place_in_cache(tiny_hub, "tiny/hostile", folder)
    with pytest.raises(PairError, match="The target tiny/hostile can't be loaded"):
        pairs.load("tiny/hostile", "tiny/drafter")
    assert not (tmp_path / "harmed").exists()


def test_the_owner_can_keep_visitors_pairs_out(tiny_embedded_pair):
    with pytest.raises(PairError, match="its own pair only"):
        Pairs(Settings(download_limit_gb=0.0)).load("tiny/target", "tiny/drafter")
