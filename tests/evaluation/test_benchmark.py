"""The run: what it measures, that it can be interrupted, and that a seed gives the same numbers again."""

import copy
import json

import pytest

from hf_dspark.evaluation.benchmark import EvaluationConfig
from hf_dspark.evaluation.contenders import parse_schedule
from hf_dspark.evaluation.log import LOG_FILE, read_log
from hf_dspark.evaluation.results import FIELDS, entry, read_results
from hf_dspark.generation import lookup


TIMES = ("seconds", "speedup", "tokens_per_second", "created")


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if not key.endswith(TIMES)}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def numbers(folder):
    return without_times({**read_results(folder), "cost_model": None}), without_times(read_log(folder))


def test_results(finished):
    folder, results = finished
    assert list(results) == list(FIELDS)
    assert results == read_results(folder)
    assert results["complete"] is True
    assert [task["turns"] for task in results["tasks"]] == [6, 3]
    names = ["plain", "drafter fixed", "drafter fixed:2", "drafter confidence:0.5", "prompt_lookup"]
    assert list(results["contenders"]) == names
    assert {e["task"] for e in results["results"]} == {"chat", "maths", "all", "macro"}
    whole = entry(results, "drafter fixed")
    assert (whole["prompts"], whole["turns"], whole["new_tokens"]) == (6, 9, 9 * 12)
    # Some drafts are right and some are not, or these tests would show little.
    assert 1.2 < whole["accepted_length"]["value"] < 3.8
    assert whole["accepted_length"]["low"] <= whole["accepted_length"]["value"] <= whole["accepted_length"]["high"]
    for name in names[1:4]:
        each = entry(results, name)
        assert each["target_forwards"] == each["rounds"] + each["turns"]
        assert each["new_tokens"] == each["turns"] + sum(
            n * count for n, count in enumerate(each["accepted_histogram"], start=1)
        )
        assert sum(position["verified"] for position in each["positions"]) == each["drafts"]["verified"]
        assert each["seconds"]["total"] > each["seconds"]["target"] > 0
    assert len(entry(results, "drafter fixed:2")["positions"]) == 2
    plain = entry(results, "plain")
    assert plain["target_forwards"] == plain["new_tokens"]
    assert plain["accepted_length"] is plain["drafts"] is plain["equality"] is None
    assert plain["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_outputs_are_those_of_plain_decoding(finished):
    _, results = finished
    for each in results["results"]:
        if each["task"] == "all" and each["contender"] != "plain":
            assert each["equality"] == {"checked": 9, "equal": 9, "ties": 0, "different": 0}


@pytest.fixture
def another_text(monkeypatch):
    """The drafter's answers differ from plain decoding's at one token."""
    from hf_dspark.evaluation import benchmark

    decode = benchmark.decode

    def wrong(target, contender, prompts, pad_token_id, **settings):
        decoded = decode(target, contender, prompts, pad_token_id, **settings)
        if contender.name == "drafter fixed":
            decoded.new_ids[0][5] ^= 1
        return decoded

    monkeypatch.setattr(benchmark, "decode", wrong)


def test_another_text_is_told(evaluate_tiny, tmp_path, another_text):
    """A contender that writes something else is caught."""
    results = evaluate_tiny(tmp_path, schedules=["fixed"], samples=1)
    assert entry(results, "drafter fixed")["equality"] == {"checked": 3, "equal": 0, "ties": 0, "different": 3}


def test_in_16_bits_a_near_tie_is_told_apart(evaluate_tiny, pair, tmp_path, another_text):
    target, _ = pair
    weights = copy.deepcopy(target.state_dict())
    target.bfloat16()
    try:
        results = evaluate_tiny(tmp_path / "apart", schedules=["fixed"], samples=1)
        assert entry(results, "drafter fixed")["equality"] == {"checked": 3, "equal": 0, "ties": 0, "different": 3}
        target.lm_head.weight.data.zero_()  # now all tokens are equally likely
        results = evaluate_tiny(tmp_path / "tied", schedules=["fixed"], samples=1)
        assert entry(results, "drafter fixed")["equality"] == {"checked": 3, "equal": 0, "ties": 3, "different": 0}
    finally:
        target.float().load_state_dict(weights)


def test_second_turn_follows_the_models_own_answer(evaluate_tiny, pair, tasks, tiny_tokenizer, tmp_path, monkeypatch):
    from hf_dspark.evaluation import benchmark

    seen, decode = [], benchmark.decode

    def watched(target, contender, prompts, pad_token_id, **settings):
        decoded = decode(target, contender, prompts, pad_token_id, **settings)
        seen.append((contender.name, prompts[0], decoded.new_ids[0]))
        return decoded

    monkeypatch.setattr(benchmark, "decode", watched)
    evaluate_tiny(tmp_path, tasks=[tasks / "chat.jsonl"], schedules=["fixed"], samples=1)
    (first_prompt, answer), (second_prompt, _) = [(prompt, new) for name, prompt, new in seen if name == "plain"][-2:]
    text = tiny_tokenizer.decode(answer, skip_special_tokens=True)
    messages = [
        {"role": "user", "content": tiny_tokenizer.decode(first_prompt).split("user\n")[1].split("<|im_end|>")[0]},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And then?"},
    ]
    expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert second_prompt == expected["input_ids"]
    # All contenders answer the same.
    assert [prompt for name, prompt, _ in seen if name == "drafter fixed"][-1] == second_prompt


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_and_resumed_is_as_one_run(evaluate_tiny, tmp_path, temperature):
    settings = {"temperature": temperature, "schedules": ["fixed", "confidence:0.5"], "samples": 2}
    evaluate_tiny(tmp_path / "whole", **settings)

    def interrupt(done, of):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_tiny(tmp_path / "parts", progress=interrupt, **settings)
    partial = read_results(tmp_path / "parts")
    assert partial["complete"] is False
    assert entry(partial, "drafter fixed")["prompts"] == 2
    # A kill can leave half a line behind.
    with (tmp_path / "parts" / LOG_FILE).open("a") as stream:
        stream.write('{"unit": [1, "maths", ["2"')
    counts = []
    evaluate_tiny(tmp_path / "parts", progress=lambda *count: counts.append(count), **settings)
    assert counts == [(3, 4), (4, 4)]
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


def test_a_seed_gives_the_same_numbers_again(evaluate_tiny, tmp_path):
    settings = {"temperature": 1.0, "schedules": ["fixed"], "samples": 2}
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        evaluate_tiny(tmp_path / name, seed=seed, **settings)
    first, again, other = (numbers(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first[1] != other[1]
    assert entry(first[0], "drafter fixed")["equality"] is None  # samples differ from each other


def test_folder_of_another_run_is_refused(evaluate_tiny, tmp_path):
    evaluate_tiny(tmp_path, schedules=["fixed"], samples=1)
    before = (tmp_path / LOG_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"holds another evaluation: it differs in .*settings\.max_new_tokens"):
        evaluate_tiny(tmp_path, schedules=["fixed"], samples=1, max_new_tokens=8)
    assert (tmp_path / LOG_FILE).read_bytes() == before


def test_order_of_contenders_changes_from_prompt_to_prompt(evaluate_tiny, tmp_path, monkeypatch):
    from hf_dspark.evaluation import benchmark

    order, decode = [], benchmark.decode

    def watched(target, contender, *args, **settings):
        order.append(contender.name)
        return decode(target, contender, *args, **settings)

    monkeypatch.setattr(benchmark, "decode", watched)
    evaluate_tiny(tmp_path, schedules=["fixed"], prompts=["a", "b"], tasks=[])
    # The first pair warms up.
    assert order[2:] == ["plain", "drafter fixed", "drafter fixed", "plain"]


def test_small_model_as_assistant(evaluate_tiny, pair, tmp_path):
    results = evaluate_tiny(
        tmp_path, schedules=["fixed"], prompts=["Hello."], tasks=[], assistant=copy.deepcopy(pair[0])
    )
    (name,) = (name for name, each in results["contenders"].items() if each["kind"] == "assistant")
    each = entry(results, name)
    # The assistant is the target itself: it is always right.
    assert each["tokens_per_forward"]["value"] > 1.5
    assert each["equality"]["equal"] == 1


def test_several_drafters(evaluate_tiny, pair, tmp_path):
    pair[1].save_pretrained(tmp_path / "mine")
    drafters = [str(tmp_path / "mine"), pair[1]]
    results = evaluate_tiny(tmp_path / "run", drafter=drafters, schedules=["fixed"], samples=1)
    ours, theirs = (entry(results, f"{name} fixed") for name in ("mine", "drafter"))
    assert without_times(ours) | {"contender": ""} == without_times(theirs) | {"contender": ""}


def test_several_rows(evaluate_tiny, tmp_path):
    """Prompts decoded together: what runs alone only is left out, and rows are what they are alone."""
    results = evaluate_tiny(tmp_path, rows=[1, 3], schedules=["fixed", "confidence:0.5"], baselines=["prompt_lookup"])
    alone, together = (entry(results, "drafter fixed", rows=rows) for rows in (1, 3))
    assert {e["rows"] for e in results["results"] if e["contender"] == "prompt_lookup"} == {1}
    for name in ("new_tokens", "rounds", "accepted_histogram"):
        assert together[name] == alone[name]
    for name in ("verified", "reached", "accepted"):
        assert [p[name] for p in together["positions"]] == [p[name] for p in alone["positions"]]
    assert together["equality"] == {"checked": 9, "equal": 9, "ties": 0, "different": 0}
    assert together["accepted_length"]["value"] == alone["accepted_length"]["value"]
    assert together["target_forwards"] < alone["target_forwards"]


def test_own_schedule_is_the_drafters(evaluate_tiny, tmp_path):
    results = evaluate_tiny(tmp_path, schedules=["own"], prompts=["Hello."], tasks=[])
    assert results["contenders"]["drafter own"]["schedule"] == "own"
    assert results["contenders"]["drafter own"]["num_assistant_tokens"] == 4


def test_copies_are_a_contender_of_their_own(evaluate_tiny, pair, tmp_path, monkeypatch):
    """A named schedule runs the drafter alone, whatever its checkpoint says, unless it is asked to copy."""
    monkeypatch.setattr(lookup, "MATCHED", 1)
    monkeypatch.setattr(pair[1].generation_config, "prompt_lookup_num_tokens", 3)
    results = evaluate_tiny(
        tmp_path, schedules=["own", "fixed", "fixed:2", "fixed:2+lookup:6"], tasks=[], prompts=["ababab"]
    )
    copied = {name: each.get("prompt_lookup_num_tokens") for name, each in results["contenders"].items()}
    assert copied == {
        "plain": None,
        "drafter own": 3,
        "drafter fixed": None,
        "drafter fixed:2": None,
        "drafter fixed:2+lookup:6": 6,
    }
    for name, most in copied.items():
        found = entry(results, name, task="all")
        if name != "plain":
            assert found["equality"]["equal"] == found["equality"]["checked"] == 1
            assert (found["drafts"]["copied"] > 0) == (most is not None)
            assert found["drafts"]["copied_accepted"] <= found["drafts"]["copied"]
    assert "up to 6 tokens copied from the text" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    "text", ["fixd", "fixed:x", "confidence:", "throughput:3", "fixed:", "fixed:2+lookup:", "own+lookup:2"]
)
def test_unknown_schedule(text):
    with pytest.raises(ValueError, match="There is no schedule"):
        parse_schedule(text)


def test_refused_before_anything_is_decoded(evaluate_tiny, tmp_path):
    for settings, message in (
        ({"schedules": ["fixed:9"]}, "out of reach"),
        ({"schedules": ["fixed", "fixed"]}, "would be run twice"),
        ({"baselines": ["magic"]}, "no baseline 'magic'"),
        ({"enable_thinking": True}, "knows no `enable_thinking`"),
        ({"tasks": []}, "nothing to evaluate on"),
        ({"drafter": []}, "name a drafter"),
        ({"rows": [2], "baselines": ["prompt_lookup"]}, "prompt_lookup can decode one row only"),
        ({"rows": [1, 4]}, r"The task chat has 3 prompts, too few for 4 `rows`"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_tiny(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
    for settings, message in (
        ({"rows": []}, "`rows` must be at least 1"),
        ({"rows": [1.5]}, "`rows` must be a list of whole numbers"),
        ({"rows": 2}, "`rows` must be a list of whole numbers"),
        ({"seed": -1}, "`seed` must be at least 0"),
        ({"seed": 1.5}, "`seed` must be a whole number"),
        ({"temperature": float("inf")}, "`temperature` must be finite"),
        ({"temperature": float("nan")}, "`temperature` must be finite"),
        ({"schedules": []}, "`schedules` is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            EvaluationConfig(**settings)
    assert EvaluationConfig(schedules="fixed", baselines="fast_layers").schedules == ["fixed"]


def test_log_holds_counters_and_no_text(finished):
    folder, _ = finished
    for record in read_log(folder):
        assert "What is" not in json.dumps(record)
        rounds = record["turns"][0]["contenders"]["drafter fixed"]["rows"][0]["rounds"]
        assert all(proposed >= verified >= accepted for proposed, verified, accepted, _ in rounds)


def test_weights_are_part_of_the_run(evaluate_tiny, pair, tmp_path):
    """A model that was trained further, in the same place: its numbers are others."""
    settings = {"schedules": ["fixed"], "tasks": [], "prompts": ["Hello."]}
    first = evaluate_tiny(tmp_path, **settings)
    for model, named in zip(pair, ("target.weights", "contenders.drafter fixed.weights")):
        weight = next(parameter for parameter in model.parameters() if parameter.dim() > 1)
        before = weight.detach().clone()
        try:
            weight.data *= 1.01
            with pytest.raises(ValueError, match=rf"holds another evaluation: it differs in {named}.*Name another"):
                evaluate_tiny(tmp_path, **settings)
        finally:
            weight.data.copy_(before)
    assert evaluate_tiny(tmp_path, **settings)["results"] == first["results"]


def test_one_text_and_one_file_need_no_list(evaluate_tiny, tasks, tmp_path):
    results = evaluate_tiny(
        tmp_path, schedules=["fixed"], tasks=str(tasks / "maths.jsonl"), prompts="Hello.", samples=1
    )
    assert [(task["name"], task["prompts"]) for task in results["tasks"]] == [("maths", 1), ("prompts", 1)]


def test_rows_are_as_many_as_they_are_said_to_be(evaluate_tiny, tmp_path):
    """The third prompt has no partner, and is left out where two are decoded at once."""
    results = evaluate_tiny(tmp_path, rows=[1, 2], schedules=["fixed"], tasks=[], prompts=["a", "b", "c"])
    assert [entry(results, "plain", rows=rows)["prompts"] for rows in (1, 2)] == [3, 2]
    assert all(len(record["unit"][2]) == record["unit"][0] for record in read_log(tmp_path))


def test_cutoffs_of_the_target_are_off(evaluate_tiny, pair, tmp_path, monkeypatch):
    """With `min_p` of 1 only the likeliest token would be left."""
    target, _ = pair
    settings = {"schedules": ["fixed"], "tasks": [], "prompts": ["Hello."], "temperature": 1.0}
    evaluate_tiny(tmp_path / "without", **settings)
    for name, value in (("min_p", 1.0), ("typical_p", 0.1), ("epsilon_cutoff", 0.9), ("eta_cutoff", 0.9)):
        monkeypatch.setattr(target.generation_config, name, value)
    evaluate_tiny(tmp_path / "with", **settings)
    assert numbers(tmp_path / "with")[1] == numbers(tmp_path / "without")[1]
    monkeypatch.setattr(target.generation_config, "top_h", 0.5)
    with pytest.raises(ValueError, match="sets `top_h`"):
        evaluate_tiny(tmp_path / "refused", **settings)


def test_a_conversation_ends_where_the_context_does(evaluate_tiny, pair, tasks, tmp_path, monkeypatch):
    """Answers that take more tokens when they are read again than when they were written."""
    target, _ = pair
    settings = {"schedules": ["fixed"], "tasks": [tasks / "chat.jsonl"], "samples": 1}
    assert entry(evaluate_tiny(tmp_path / "fits", **settings), "plain")["turns"] == 2
    second = read_log(tmp_path / "fits")[0]["turns"][1]["prompt_tokens"][0]
    from hf_dspark.evaluation import benchmark

    monkeypatch.setattr(benchmark, "fit_to_context", lambda *_: None)
    for limit, turns in ((second + 12, 2), (second + 11, 1)):
        monkeypatch.setattr(target.config, "max_position_embeddings", limit)
        results = evaluate_tiny(tmp_path / str(limit), **settings)
        assert entry(results, "drafter fixed")["turns"] == turns
