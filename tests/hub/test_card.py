"""The model card: facts and nothing but facts, metadata that the Hub reads, and text that stays text."""

import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from conftest import make_target
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from hf_dspark import AutoDrafter, DraftConfig, DraftTrainer, DSparkDrafter, Eagle3Drafter
from hf_dspark.evaluation.results import write_results
from hf_dspark.hub.card import CardFacts, copy_results, make_card, write_card
from hf_dspark.hub.card_facts import learning_curves, losses_table
from hf_dspark.hub.escaping import code, markdown, one_line, printable
from hf_dspark.hub.names import hub_id, without_paths


ROOT = Path(__file__).resolve().parents[2]
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "[click](javascript:alert(1)) ![x](http://evil.example/x.png) http://evil.example www.evil.example @everyone",
    "a | b | c\n\n# Heading\n---\nlicense: mit\n---\n- list\n```python\nprint()\n```",
    "{{ 7 * 7 }} {% for x in range(9) %}{{ self }}{% endfor %} {# gone #} ${x} <%= 1 %>",
    "שלום عربي \u202e evil \u2066 x",
    "👩‍👩‍👧‍👦 🎉 日本語 ﷽",
    "\x1b[31mred\x1b[0m \x07 \x00 \x9b2J \r gone",
    "**bold** _it_ `code` ~~gone~~ $math$ \\ &amp; <!-- by hand: notes -->",
    "x" * 100_000,
)


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture
def folder(target, tmp_path):
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, block_size=4, target_name_or_path="some/target-4B")
    drafter.save_pretrained(tmp_path / "my-drafter")
    return tmp_path / "my-drafter"


def estimate(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def make_results(
    model,
    task="gsm8k",
    source="openai/gsm8k",
    device="A processor",
    complete=True,
    kind="dspark",
    target="some/target-4B",
):
    """Results of one drafter under two schedules on one task, as `hf-dspark evaluate` writes them."""
    entries = [
        {
            "contender": name,
            "task": which,
            "rows": rows,
            "prompts": 5,
            "accepted_length": estimate(2.5),
            "tokens_per_forward": estimate(2.4),
            "speedup": estimate(1.7),
            "positions": [{"position": 1, "marginal": 0.8, "conditional": 0.8}],
            "equality": {"checked": 5, "equal": 4, "ties": 1, "different": 0},
        }
        for name in ("fixed", "confidence")
        for which in (task, "all")
        for rows in (1, 4)
    ]
    contender = {"kind": "drafter", "model": str(model), "drafter_type": kind, "num_drafts": 4}
    calibration = {"position": 1, "rounds": 9, "predicted": 0.7, "observed": 0.8, "ece": 0.1, "auc": None}
    return {
        "complete": complete,
        "created": "2026-01-01T00:00:00+00:00",
        "target": {"name": target, "dtype": "float32"},
        "settings": {"max_new_tokens": 64, "temperature": 0.0, "enable_thinking": False},
        "versions": {"torch": "2.13.0"},
        "hardware": {"device": "cpu", "device_name": device, "threads": 2},
        "tasks": [{"name": task, "source": source, "prompts": 5, "turns": 5, "skipped": []}],
        "contenders": {
            "plain": {"kind": "plain", "model": None},
            "fixed": contender | {"schedule": "fixed", "num_assistant_tokens": 4},
            "confidence": contender | {"schedule": "confidence", "assistant_confidence_threshold": 0.5},
        },
        "results": entries,
        "calibration": [{"contender": "fixed", "rounds": 9, "positions": [calibration]}],
        "cost_model": None,
    }


# ---------------------------------------------------------------------- facts


def test_missing_facts_are_said_to_be_missing(folder):
    text = make_card(folder).text
    for sentence in (
        "No record of the training came with the checkpoint.",
        "No results of `hf-dspark evaluate` came with the checkpoint.",
        "Trained on sequences of a length that is not recorded.",
        "Languages: not recorded.",
        "Licence: not recorded.",
        "Rows decoded at once in the evaluation: not recorded.",
    ):
        assert sentence in text, sentence


def test_facts_of_the_checkpoint(folder):
    card = make_card(folder, CardFacts(repo_id="you/mine", license="mit", languages="en", datasets="openai/gsm8k"))
    data = card.data.to_dict()
    assert data == {
        "base_model": "some/target-4B",
        "base_model_relation": "adapter",
        "datasets": ["openai/gsm8k"],
        "language": ["en"],
        "library_name": "hf-dspark",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "dspark", "hf-dspark", "custom_generate"],
    }
    assert "| Drafts | 4 a round, at once (block of 4, every slot proposes) |" in card.text
    assert 'AutoDrafter.from_pretrained("you/mine")' in card.text
    assert 'custom_generate="you/mine", trust_remote_code=True' in card.text
    # Commands of engines are those of checkpoints.engines, after a conversion.
    assert "hf-dspark convert you/mine mine-speculators --to speculators --target some/target-4B" in card.text
    assert '"method": "dspark", "model": "mine-speculators", "num_speculative_tokens": 4' in card.text
    assert "python -m sglang.launch_server --model-path some/target-4B" in card.text
    assert "2607.05147" in card.text


def test_what_an_engine_refuses_is_told(target, tmp_path):
    Eagle3Drafter.from_target(target, target_layer_ids=[0, 1, 2]).save_pretrained(tmp_path)
    text = make_card(tmp_path).text
    assert "can't serve this drafter: its EAGLE-3 drafters have llama layers, this one has qwen3 layers" in text
    assert "its target (not recorded, not known on the Hub)" in text


def test_training_is_recorded_and_told(target, tiny_tokenizer, tmp_path):
    target = make_target(vocab_size=len(tiny_tokenizer))
    rows = [{"prompt": f"{i} + 1?", "completion": f"That is {i + 1}."} for i in range(8)]
    args = DraftConfig(
        output_dir=str(tmp_path / "run"), max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2,
        per_device_train_batch_size=2, num_anchors=4, report_to="none", save_strategy="no",
    )  # fmt: skip
    drafter = DSparkDrafter.from_target(target, tokenizer=tiny_tokenizer, block_size=3)
    trainer = DraftTrainer(drafter, target, args, rows, rows[:2], tiny_tokenizer)
    trainer.train()
    drafter.save_pretrained(tmp_path / "mine")
    record = json.loads((tmp_path / "mine" / "training_record.json").read_text())
    tokens = [len(tiny_tokenizer(row["prompt"] + row["completion"])["input_ids"]) + 1 for row in rows]
    supervised = sum(len(tiny_tokenizer(row["completion"])["input_ids"]) + 1 for row in rows)
    assert record["data"] == {
        "supervised": "the completions; prompts are not",
        "datasets": [],
        "thinking": None,
        "examples": 8,
        "tokens": sum(tokens),
        "supervised_tokens": supervised,
        "longest": max(tokens),
    }
    assert (record["updates"], record["arguments"]["num_anchors"]) == (4, 4)
    assert str(tmp_path) not in json.dumps(record)

    text = write_card(tmp_path / "mine", CardFacts(thinking=False)).read_text()
    assert f"of which supervised: {supervised}" in text
    assert "Supervised: the completions; prompts are not. Thinking mode: off." in text
    assert "Datasets that it was loaded from: not recorded." in text
    assert "| `num_anchors` | 4 |" in text
    terms = "| Update | loss | cross entropy | l1 | confidence | acceptance |"
    assert f"Training:\n\n{terms}\n" in text
    assert f"Held-out examples:\n\n{terms} accepted length |\n" in text
    assert "![Training curves](plots/training_loss.png)" in text
    assert (tmp_path / "mine" / "plots" / "training_loss.png").read_bytes().startswith(b"\x89PNG")

    # What was learned before stays told when the drafter is trained on.
    again = AutoDrafter.from_pretrained(tmp_path / "mine")
    DraftTrainer(again, target, args, rows, rows[:2], tiny_tokenizer).train()
    assert [earlier["updates"] for earlier in again.training_record["earlier"]] == [4]
    trainer.hub_model_id = "you/run"
    trainer.save_model()
    trainer.create_model_card(license="mit")
    assert ModelCard.load(tmp_path / "run" / "README.md").data.license == "mit"
    assert "DRAFTER = 'you/run'" in (tmp_path / "run" / "custom_generate" / "generate.py").read_text()


def test_learning_is_told_by_the_tokens_seen_in_all_trainings():
    first = {"data": {"supervised_tokens": 1000}, "epochs": 2.0, "log": [{"epoch": 1.0, "eval_accepted_length": 1.5}]}
    second = {"data": {"supervised_tokens": 500}, "epochs": 1.0, "log": [{"epoch": 0.5, "eval_accepted_length": 2}]}
    (start, gap, end) = learning_curves(second | {"earlier": [first]})[""]
    assert (start, gap[0], end) == ((1000, 1.5), 2000, (2250, 2.0))
    assert math.isnan(gap[1])  # other prompts may have been held out
    assert learning_curves(second | {"earlier": [{"epochs": 2.0}]}) == {}  # nobody knows how many were seen before

    log = [{"epoch": 1, "eval_on_accepted_length": 3.0, "eval_off_accepted_length": 2.0, "eval_on_loss": 1.0}]
    assert learning_curves(first | {"log": log}) == {"on": [(1000, 3.0)], "off": [(1000, 2.0)]}


def test_several_held_out_sets_are_told_apart():
    log = [
        {"step": 5, "eval_direct_loss": 2.0, "eval_l1": 0.5, "eval_direct_accepted_length": 3.25},
        {"step": 5, "eval_thinking_loss": 1.0, "eval_l1": 0.25, "eval_thinking_accepted_length": 1.75},
        {"step": 5, "eval_accepted_length": 2.5},
    ]
    text = losses_table(log)
    assert text.count("| Update | loss | l1 | accepted length |") == 2
    assert "Held-out examples (direct):" in text and "| 5 | 2 | 0.5 | 3.25 |" in text
    assert "Held-out examples (thinking):" in text and "| 5 | 1 | 0.25 | 1.75 |" in text


def test_the_last_of_several_trainings_is_told_by_its_own_length(folder):
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.config.max_trained_length = 409
    drafter.training_record = {"data": {"longest": 57}, "earlier": [{"updates": 3}]}
    drafter.save_pretrained(folder)
    told = "Trained on sequences of up to 409 tokens, those of its last training of up to 57."
    assert told in make_card(folder).text


# ---------------------------------------------------------------------- results


def test_results_are_metadata_both_ways(folder):
    write_results(folder, make_results(folder))
    card = make_card(folder, CardFacts(repo_id="you/mine"))
    again = ModelCard(str(card))
    assert again.data.to_dict() == card.data.to_dict()
    assert ModelCardData(**again.data.to_dict()).to_dict() == card.data.to_dict()
    (index,) = card.data.to_dict()["model-index"]
    name, results = model_index_to_eval_results([index])
    assert (name, results) == ("mine", card.data.eval_results)
    assert eval_results_to_model_index(name, results) == [index]

    # The documented fields, and no others.
    (result,) = index["results"]
    assert result.keys() == {"task", "dataset", "metrics", "source"}
    assert result["task"] == {"type": "text-generation", "name": "Speculative decoding"}
    assert result["dataset"] == {"type": "openai/gsm8k", "name": "gsm8k"}
    assert all(metric.keys() == {"type", "value", "name"} for metric in result["metrics"])
    assert len({metric["name"] for metric in result["metrics"]}) == len(result["metrics"]) == 12
    assert {metric["type"] for metric in result["metrics"]} == {"accepted_length", "tokens_per_forward", "speedup"}
    assert all(isinstance(metric["value"], float) for metric in result["metrics"])


def test_results_are_tables(folder, tmp_path):
    run = tmp_path / "run"
    (run / "plots").mkdir(parents=True)
    (run / "plots" / "accepted_length.png").write_bytes(b"\x89PNG")
    write_results(run, make_results(folder, source="/home/me/gsm8k.jsonl"))
    copy_results(run, folder)
    copy_results(folder, folder)
    with pytest.raises(FileNotFoundError, match="holds no drafter"):
        copy_results(run, tmp_path / "nowhere")
    text = make_card(folder).text
    assert "fixed schedule, 4 drafts, 4 rows:" in text
    row = "| gsm8k | 5 | 2.50 (2.40 to 2.60) | 2.40 (2.30 to 2.50) | 1.70 (1.60 to 1.80) | 4 of 5, 1 near-ties |"
    assert row in text
    assert "| 1 | 0.80 | 0.80 |" in text
    assert "| 1 | 0.70 | 0.80 | 0.10 | – |" in text
    assert "Target: some/target-4B in float32. Decoding: greedy, at most 64 new tokens, thinking mode off." in text
    assert "Machine: A processor, 2 threads. Versions: torch 2.13.0." in text
    assert "Rows decoded at once in the evaluation: 1, 4." in text
    assert "![accepted length](plots/accepted_length.png)" in text
    assert "/home/me" not in (folder / "results.json").read_text()


def test_headline_is_what_generate_does_by_default(folder):
    results = make_results(folder)
    results["contenders"]["confidence"]["schedule"] = "own"
    write_results(folder, results)
    card = make_card(folder)
    assert {result.metric_name.split("(")[1].split(" schedule")[0] for result in card.data.eval_results} == {"own"}
    assert len(card.data.eval_results) == 6
    assert "fixed schedule, 4 drafts, 4 rows:" in card.text


def test_one_task_is_not_repeated_and_few_prompts_are_said(folder):
    results = make_results(folder)
    write_results(folder, results)
    text = make_card(folder).text
    assert "| gsm8k | 5 |" in text and "| all |" not in text
    assert "Too few prompts (gsm8k): intervals from fewer than 20 prompts" in text
    for each in results["results"]:
        each["prompts"] = 80
    write_results(folder, results)
    assert "Too few prompts" not in make_card(folder).text


def test_results_of_a_part_are_said_to_be(folder):
    write_results(folder, make_results(folder, complete=False))
    assert "**The evaluation was not finished: these numbers are of a part of it.**" in make_card(folder).text


def test_results_of_another_drafter_are_refused(folder):
    write_results(folder, make_results(folder, kind="eagle3"))
    with pytest.raises(ValueError, match=r"of a EAGLE-3 drafter, .* holds a DSpark drafter"):
        make_card(folder)
    results = make_results("first/one")
    results["contenders"]["confidence"] |= {"model": "second/one"}
    write_results(folder, results)
    with pytest.raises(ValueError, match=r"of other drafters than .*evaluated: first/one, second/one"):
        make_card(folder)


def test_results_of_a_stranger_are_refused(folder, tmp_path):
    """Another drafter, or another target; what is there already stays."""
    write_results(folder, make_results(folder))
    before = (folder / "results.json").read_text()
    for results, complaint in (
        (make_results("someone/else"), "of other drafters than"),
        (make_results(folder, target="other/target-70B"), "made with the target other/target-70B"),
    ):
        write_results(tmp_path / "run", results)
        with pytest.raises(ValueError, match=complaint):
            write_card(folder, results=tmp_path / "run")
    assert (folder / "results.json").read_text() == before
    write_results(tmp_path / "run", make_results("you/mine"))
    write_card(folder, CardFacts(repo_id="you/mine"), results=tmp_path / "run")  # evaluated by its Hub id


def test_drafters_of_one_name_stay_apart(folder, tmp_path):
    results = make_results(folder)
    results["contenders"]["confidence"]["model"] = str(tmp_path / "elsewhere" / folder.name)
    write_results(tmp_path / "run", results)
    copy_results(tmp_path / "run", folder)
    metrics = make_card(folder).data.eval_results
    assert metrics and all("(fixed schedule" in metric.metric_name for metric in metrics)


def test_plots_are_of_the_results_beside_them(folder, tmp_path):
    (folder / "plots").mkdir()
    for name in ("reliability", "training_loss"):
        (folder / "plots" / f"{name}.png").write_bytes(b"old")
    (tmp_path / "run" / "plots").mkdir(parents=True)
    hostile = "q) [c](javascript:alert(1)) <b>.png"
    (tmp_path / "run" / "plots" / hostile).write_bytes(b"new")
    write_results(tmp_path / "run", make_results(folder))
    copy_results(tmp_path / "run", folder)
    assert sorted(file.name for file in (folder / "plots").iterdir()) == [hostile, "training_loss.png"]
    text = make_card(folder).text
    assert "](plots/q%29%20%5Bc%5D%28javascript%3Aalert%281%29%29%20%3Cb%3E.png)" in text
    assert "training_loss" not in text  # nothing was recorded of a training


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("settings",), None, "settings"),
        (("tasks", 0, "source"), None, r"tasks\[0\].source"),
        (("results", 0, "rows"), "x", r"results\[0\].rows"),
        (("results", 0, "speedup"), {"value": "x"}, r"results\[0\].speedup.value"),
        (("calibration", 0), [], r"calibration\[0\]"),
    ],
)
def test_damaged_results_are_named(path, value, field, folder):
    results = make_results(folder)
    place = results
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_results(folder, results)
    with pytest.raises(ValueError, match=rf"results.json is damaged: `{field}`"):
        make_card(folder)


# ---------------------------------------------------------------------- what is written by hand


def test_what_is_written_by_hand_stays(folder):
    file = write_card(folder, CardFacts(repo_id="you/mine", license="mit", tags="fast", thinking=True))
    mine = "My *own* words, {{ braces }} and `code`.\n\n- a list\n"
    text = file.read_text().replace("by hand: limits -->\n", f"by hand: limits -->\n{mine}")
    text = text.replace("license: mit", "license: mit\nwidget:\n- text: Hello")
    extra = "\n\n<!-- by hand: thanks -->\nThank you.\n<!-- end of thanks -->\n"
    file.write_text(text.replace("<!-- end of notes -->", f"<!-- end of notes -->{extra}"))
    write_card(folder, force=True)  # a new region stands outside the old ones
    write_card(folder, CardFacts(languages="en"))
    text = file.read_text()
    assert f"<!-- by hand: limits -->\n{mine}<!-- end of limits -->" in text
    assert "Thank you." in text
    data = ModelCard(text).data
    assert (data.license, data.widget, data.language) == ("mit", [{"text": "Hello"}], ["en"])
    assert data.tags.count("fast") == 1
    assert 'from_pretrained("you/mine")' in text
    assert write_card(folder).read_text() == text  # nothing left to change


def test_a_card_that_would_be_lost_is_refused(folder):
    file = folder / "README.md"
    file.write_text("# Mine\n")
    with pytest.raises(FileExistsError, match="was not made by hf-dspark"):
        write_card(folder)
    assert file.read_text() == "# Mine\n"
    write_card(folder, force=True)
    file.write_text(file.read_text().replace("It cannot generate alone.", "It can."))
    with pytest.raises(FileExistsError, match="was edited outside its regions"):
        write_card(folder)
    write_card(folder, force=True)
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))  # an editor's line ends are no edit
    write_card(folder)


def test_what_the_checkpoint_says_now_is_told(folder, target):
    """What an earlier card took from the checkpoint is taken anew; what its owner wrote stays."""
    drafter = AutoDrafter.from_pretrained(folder)
    drafter.training_record = {"data": {"datasets": ["old/data"]}}
    drafter.save_pretrained(folder)
    write_card(folder, CardFacts(datasets="extra/data", tags="fast"))
    drafter = Eagle3Drafter.from_target(target, target_layer_ids=[0, 1, 2], target_name_or_path="new/target-8B")
    drafter.training_record = {"data": {"datasets": ["new/data"]}}
    drafter.save_pretrained(folder)
    data = make_card(folder).data
    assert (data.base_model, data.datasets) == ("new/target-8B", ["new/data", "extra/data"])
    assert "dspark" not in data.tags and {"eagle3", "fast"} <= {*data.tags}
    write_card(folder, CardFacts(base_model="given/base"))
    assert write_card(folder).read_text().count("base_model: given/base") == 1


BY_HAND = {
    "license": "license: mit\nlicense_name: foo",
    "base_model": "base_model:\n- some/target-4B\n- other/x",
    "base_model_relation": "base_model_relation: finetune",
    "pipeline_tag": "pipeline_tag: image-text-to-text",
    "language": "language:\n- no",
    "model-index": "model-index:\n- name: m\n  results:\n  - task:\n      type: text-generation\n"
    "    dataset:\n      type: a/b\n      name: b\n    metrics:\n    - type: acc\n      value: 1.0",
}


@pytest.mark.parametrize("field", BY_HAND)
def test_metadata_of_the_owner_stays(field, folder):
    file = write_card(folder)
    text = re.sub(rf"^{field}: .*\n", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(text.replace("---\n", f"---\n{BY_HAND[field]}\n", 1))
    before = ModelCard(file.read_text()).data.to_dict()
    if field == "language":
        before["language"] = ["no"]  # which YAML reads as a truth value
    write_card(folder)
    assert ModelCard(file.read_text()).data.to_dict() == before
    write_card(folder)
    assert ModelCard(file.read_text()).data.to_dict() == before


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("license: [mit, apache-2.0]", "README.md: `license`"),
        ("language: English", "README.md: `language`"),
        ("base_model: [5]", "README.md: `base_model`"),
        ("title: a: b", "README.md: its metadata is no YAML in line 2"),
        ("model-index: 5", "README.md: its metadata can't be read"),
    ],
)
def test_metadata_that_no_card_can_have(line, complaint, folder):
    file = write_card(folder)
    text = re.sub(rf"^{line.split(':')[0]}: .*\n", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(text.replace("---\n", f"---\n{line}\n", 1))
    with pytest.raises(ValueError, match=re.escape(complaint)):
        write_card(folder)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"license": "MIT License"}, "no licence identifier"),
        ({"languages": ["English"]}, "no language code"),
        ({"license": 5}, "no licence identifier"),
        ({"datasets": "a b"}, "no Hub id"),
        ({"base_model": "gpt2"}, "no Hub id of a base model"),
        ({"repo_id": "../x"}, "no Hub id"),
        ({"base_model": "<script>"}, "no Hub id"),
    ],
)
def test_metadata_that_the_hub_refuses(facts, complaint):
    with pytest.raises(ValueError, match=complaint):
        CardFacts(**facts)


# ---------------------------------------------------------------------- hostile text


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.found.append(tag)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(text, target, tmp_path):
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, block_size=4, target_name_or_path=text)
    drafter.config.assumed = {"markov_rank": text}
    drafter.training_record = {"data": {"supervised": text, "datasets": [text]}, "arguments": {text: text}}
    drafter.training_record |= {"updates": text, "machine": {"device_name": text}, "versions": {text: text}}
    drafter.save_pretrained(tmp_path)
    write_results(tmp_path, make_results(tmp_path, task=text, source=text, device=text, target=text))
    harmless = make_card_of("harmless", target, tmp_path / "harmless")
    card = make_card(tmp_path, CardFacts(tags=text))
    body = card.text

    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    assert yaml.safe_load(str(card).split("\n---\n")[0]) is not None
    assert Tags(body).found == Tags(harmless).found == []
    assert len(body) < len(harmless) + 20_000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066\u2067]", body)
    # As many headings, tables, fences, links and regions as without it.
    for structure in (r"^#+ ", r"^\|", r"^```", r"(?<!\\)\]\(", r"^<!--", r"^- ", r"^---$"):
        count = [len(re.findall(structure, page, re.MULTILINE)) for page in (body, harmless)]
        assert count[0] == count[1], structure
    for line in body.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert cells in (3, 4, 6, 7), line


def make_card_of(text, target, folder):
    drafter = DSparkDrafter.from_target(target, mask_token_id=63, block_size=4, target_name_or_path=text)
    drafter.config.assumed = {"markov_rank": text}
    drafter.training_record = {"data": {"supervised": text, "datasets": [text]}, "arguments": {text: text}}
    drafter.training_record |= {"updates": text, "machine": {"device_name": text}, "versions": {text: text}}
    drafter.save_pretrained(folder)
    write_results(folder, make_results(folder, task=text, source=text, device=text, target=text))
    return make_card(folder, CardFacts(tags=text)).text


def test_escapes_show_what_was_meant():
    assert markdown("smollm2_135m-instruct") == "smollm2_135m-instruct"
    assert html.unescape(markdown("<b> & _x_ *y*")) == r"<b> & \_x\_ \*y\*"
    assert markdown("http://x.example") == "http&#58;//x.example"
    assert code("a_b") == "`a_b`"
    assert code("a`b|c") == r"a\`b\|c"
    assert one_line("a\n b\x1b[31m\u202e", 4) == "a b…"
    assert markdown("שלום") == "\u2068שלום\u2069"
    assert printable("a\x1b[31m\nb\u202e") == "a\ufffd[31m\nb"


def test_names_of_the_hub_and_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "folder").mkdir(parents=True)
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-4B/snapshots/abc123"
    assert [hub_id(name) for name in ("Qwen/Qwen3-4B", cached)] == ["Qwen/Qwen3-4B"] * 2
    assert [hub_id(name) for name in ("some/folder", "/home/me/x", "gpt2", "a/b/c", None)] == [None] * 5
    assert without_paths({"a": ["/home/me/x", cached, "a/b"]}) == {"a": ["x", "Qwen/Qwen3-4B", "a/b"]}


@pytest.mark.parametrize("folder", sorted((ROOT / "model_cards").iterdir()), ids=lambda folder: folder.name)
def test_published_cards_are_up_to_date(folder):
    """Made by `hf-dspark card FOLDER`; run that again where this fails."""
    assert make_card(folder).content == (folder / "README.md").read_text(encoding="utf-8")
