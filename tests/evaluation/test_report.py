"""The report and its plots, and comparisons of two runs."""

import copy
import json
import struct

import pytest

from hf_dspark.evaluation import plots
from hf_dspark.evaluation.comparison import compare_results, pair_contenders
from hf_dspark.evaluation.figures import write_plots
from hf_dspark.evaluation.log import LOG_FILE, read_log
from hf_dspark.evaluation.report import few_prompts_text, recommendation, table, write_report
from hf_dspark.evaluation.results import FIELDS, RESULTS_FILE, entry, read_results, write_results


PLOTS = {
    "accepted_histogram",
    "accepted_length",
    "conditional_acceptance",
    "predicted",
    "reliability",
    "thresholds",
    "time",
}


def test_report_has_the_numbers_and_the_plots(finished):
    folder, results = finished
    text = (folder / "report.md").read_text(encoding="utf-8")
    length = entry(results, "drafter fixed")["accepted_length"]
    assert f"{length['value']:.2f} [{length['low']:.2f}, {length['high']:.2f}]" in text
    for name in results["contenders"]:
        assert f"| {name} |" in text
    for version in results["versions"].values():
        assert version in text
    assert "## Which setting to use" in text
    assert {file.stem for file in (folder / "plots").iterdir()} == PLOTS
    for name in PLOTS:
        assert f"(plots/{name}.png)" in text
        header = (folder / "plots" / f"{name}.png").read_bytes()[:24]
        width, height = struct.unpack(">II", header[16:24])
        assert header.startswith(b"\x89PNG")
        assert min(width, height) > 150
    assert not list(folder.glob("*.tmp"))


def test_several_rows_get_a_plot_of_throughput(finished, tmp_path):
    folder, results = finished
    results = copy.deepcopy(results)
    results["settings"]["rows"] = [1, 4]
    results["results"] += [each | {"rows": 4} for each in results["results"]]
    files = write_plots(tmp_path, results, read_log(folder))
    assert files["Throughput against rows"] == "plots/throughput.png"
    assert (tmp_path / "plots" / "throughput.png").stat().st_size > 5000


def test_interrupted_run_says_so(finished, tmp_path):
    _, results = finished
    text = write_report(tmp_path, results | {"complete": False}, {}).read_text(encoding="utf-8")
    assert "**This run was interrupted" in text


def test_skipped_prompts_are_named(finished, tmp_path):
    _, results = finished
    results = copy.deepcopy(results)
    results["tasks"][0]["skipped"] = [{"where": "maths.jsonl:7", "why": "Not JSON: a | b\nat column 3."}]
    text = write_report(tmp_path, results, {}).read_text(encoding="utf-8")
    assert "## Left out: 1" in text
    assert "| maths.jsonl:7 | Not JSON: a \\| b at column 3. |" in text


def test_text_does_not_break_a_table():
    assert table(["a"], [["x | y\nz"]]).splitlines()[2] == "| x \\| y z |"


def test_results_are_whole_or_refused(tmp_path):
    fields = dict.fromkeys(FIELDS[1:])
    write_results(tmp_path, fields | {"complete": True, "cost_model": {"nothing": float("nan"), "much": float("inf")}})
    assert read_results(tmp_path)["cost_model"] == {"nothing": None, "much": None}
    assert [file.name for file in tmp_path.iterdir()] == [RESULTS_FILE]
    with pytest.raises(ValueError, match=r"missing or unknown: \['target'\]"):
        write_results(tmp_path, {name: None for name in FIELDS[1:] if name != "target"})
    assert read_results(tmp_path / RESULTS_FILE)["complete"] is True

    file = tmp_path / RESULTS_FILE
    for text, message in (
        ("{", "is no JSON file"),
        ("{}", "was not written by"),
        (json.dumps({"schema_version": 99}), "schema version 99"),
        ("[" * 100_000, "is no JSON file"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_results(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No results\.json in"):
        read_results(tmp_path / "elsewhere")


def test_entry_takes_the_fewest_rows(finished):
    _, results = finished
    more = [each | {"rows": 4} for each in results["results"]]
    assert entry({"results": more + results["results"]}, "plain")["rows"] == 1
    assert entry({"results": more + results["results"]}, "plain", rows=4)["rows"] == 4
    with pytest.raises(KeyError, match="No results of nobody on all"):
        entry(results, "nobody")


def _renamed(record, number):
    rows, task, ids = record["unit"]
    return copy.deepcopy(record) | {"unit": [rows, task, [f"{id_}-{number}" for id_ in ids]]}


@pytest.fixture
def changed(finished, tmp_path):
    """A copy of the finished run in which the drafter `fixed` accepted `more` drafts in each of its rounds."""

    def change(more: int, copies: int = 1):
        folder, results = finished
        write_results(tmp_path, {name: results[name] for name in FIELDS[1:]} | {"hardware": {"device": "cuda"}})
        lines = (folder / LOG_FILE).read_text().splitlines()
        records = [json.loads(line) for line in lines[1:]]
        # The same prompts under other names, in both runs.
        records = [_renamed(record, i) for i in range(copies) for record in records]
        folder = tmp_path / "unchanged"
        write_results(folder, {name: results[name] for name in FIELDS[1:]})
        (folder / LOG_FILE).write_text("\n".join([lines[0], *map(json.dumps, records)]) + "\n")
        for record in records:
            for turn in record["turns"]:
                for row in turn["contenders"]["drafter fixed"]["rows"]:
                    row["rounds"] = [[p, v, a + more, c + more] for p, v, a, c in row["rounds"]]
        text = "\n".join([lines[0], *map(json.dumps, records)]) + "\n"
        (tmp_path / LOG_FILE).write_text(text)
        return folder, tmp_path

    return change


def rows_of(comparison, name, task="all"):
    return next(row for row in comparison["rows"] if (row["first"], row["task"]) == (name, task))


def test_a_run_compared_with_itself_is_noise(finished):
    folder, _ = finished
    comparison = compare_results(folder, folder)
    assert comparison["facts"] == []
    for row in comparison["rows"]:
        for metric in row["metrics"].values():
            assert metric["difference"] == {"value": 0, "low": 0, "high": 0}
            assert metric["noise"] is True


def test_a_difference_is_told_from_noise(changed):
    comparison = compare_results(*changed(more=1, copies=7))
    fixed, other = rows_of(comparison, "drafter fixed"), rows_of(comparison, "drafter fixed:2")
    assert fixed["prompts"] == 42
    difference = fixed["metrics"]["accepted_length"]["difference"]
    # Every prompt differs by one: resampling them changes nothing.
    assert difference["value"] == pytest.approx(1)
    assert (difference["low"], difference["high"]) == pytest.approx((1, 1))
    assert fixed["metrics"]["accepted_length"]["noise"] is False
    assert fixed["metrics"]["speedup"]["noise"] is True
    assert other["metrics"]["accepted_length"]["noise"] is True
    assert "accepted_length" not in rows_of(comparison, "prompt_lookup")["metrics"]
    assert {"name": "hardware.device", "first": "cpu", "second": "cuda"} in comparison["facts"]


def test_few_prompts_call_no_difference_real(changed):
    metrics = rows_of(compare_results(*changed(more=1)), "drafter fixed")["metrics"]
    assert metrics["accepted_length"]["difference"]["low"] == pytest.approx(1)
    assert metrics["accepted_length"]["noise"] is None
    assert metrics["speedup"]["noise"] is True


def test_one_task_is_compared_once(finished, evaluate_tiny, tasks, tmp_path):
    evaluate_tiny(tmp_path, tasks=[tasks / "maths.jsonl"], schedules=["fixed"])
    comparison = compare_results(finished[0], tmp_path)
    assert [row["task"] for row in comparison["rows"]] == ["maths"]


def test_few_prompts_are_said_in_the_report(finished, tmp_path):
    folder, results = finished
    assert few_prompts_text(results).startswith("Too few prompts (")
    assert few_prompts_text(results) in (folder / "report.md").read_text(encoding="utf-8")
    enough = copy.deepcopy(results)
    for each in enough["results"]:
        if each["task"] != "macro":
            each["prompts"] = 20
    assert few_prompts_text(enough) == ""
    # Eight decoded at once are drawn together.
    assert few_prompts_text({**enough, "results": [each | {"rows": 8} for each in enough["results"]]}) != ""


def test_a_gain_within_the_margin_is_none():
    advice = {"drafter": "x", "rows": 1, "schedule": "fixed:2", "speedup": 1.0, "plain": True}
    assert "decode plainly" in recommendation(advice | {"speedup": 0.9})
    assert "plain decoding is as good here" in recommendation(advice | {"speedup": 1.004})
    assert "use `fixed:2`, predicted to be 1.20 times" in recommendation(advice | {"speedup": 1.2, "plain": False})


def test_contenders_are_paired_by_name_or_else_by_schedule():
    def drafter(schedule):
        return {"kind": "drafter", "schedule": schedule}

    first = {"plain": {"kind": "plain"}, "old fixed": drafter("fixed"), "old fixed:2": drafter("fixed:2")}
    second = {"plain": {"kind": "plain"}, "new fixed:2": drafter("fixed:2"), "new fixed": drafter("fixed")}
    assert pair_contenders(first, second) == [("old fixed", "new fixed"), ("old fixed:2", "new fixed:2")]
    assert pair_contenders(first, first) == [("old fixed", "old fixed"), ("old fixed:2", "old fixed:2")]


def test_nothing_in_common(finished, evaluate_tiny, tmp_path):
    folder, _ = finished
    evaluate_tiny(tmp_path, schedules=["fixed"], prompts=["Hello."], tasks=[])
    with pytest.raises(ValueError, match="no contender, or no prompt, in common"):
        compare_results(folder, tmp_path)


def test_the_same_id_is_not_the_same_prompt(finished, evaluate_tiny, tmp_path):
    folder, _ = finished
    (tmp_path / "maths.jsonl").write_text(
        "".join(json.dumps({"id": i, "turns": [f"What is {i} + {i or 7}?"]}) + "\n" for i in range(3))
    )
    evaluate_tiny(tmp_path / "run", schedules=["fixed"], tasks=[tmp_path / "maths.jsonl"])
    comparison = compare_results(folder, tmp_path / "run")
    assert rows_of(comparison, "drafter fixed", "maths")["prompts"] == 2
    assert comparison["alone"] == {
        "first": {
            "complete": True,
            "contenders": ["drafter confidence:0.5", "drafter fixed:2", "prompt_lookup"],
            "prompts": {"chat": 3, "maths": 1},
        },
        "second": {"complete": True, "contenders": [], "prompts": {"maths": 1}},
    }


def test_names_are_no_mathematics(finished, tmp_path):
    """Dollar signs in names, and names that matplotlib would leave out of a legend."""
    folder, results = finished
    results = copy.deepcopy(results)
    name, task = "_best$^{ fixed", "cost_$5_and_$x^{"
    results["contenders"] = {"plain": results["contenders"]["plain"], name: results["contenders"]["drafter fixed"]}
    results["contenders"]["other fixed"] = results["contenders"][name] | {"drafter": "other"}
    results["calibration"] = []
    kept = [e for e in results["results"] if e["contender"] in ("plain", "drafter fixed") and e["task"] != "maths"]
    renamed = {"chat": task}
    results["results"] = [
        e | {"contender": who, "task": renamed.get(e["task"], e["task"])}
        for e in kept
        for who in (["plain"] if e["contender"] == "plain" else [name, "other fixed"])
    ]
    results["tasks"][0]["name"] = task
    figure = plots.accepted_length_by_task(results)
    assert [text.get_text().strip().replace("\\", "") for text in figure.legends[0].get_texts()] == [
        name,
        "other fixed",
    ]
    plots.save(figure, tmp_path / "length.png")
    assert len(write_plots(tmp_path, results, read_log(folder))) >= 4


def test_points_are_told_apart_when_colors_come_twice(finished):
    _, results = finished
    (measured, *_) = [e for e in results["cost_model"]["predictions"] if e["measured_speedup"]]
    run = [measured | {"schedule": f"fixed:{n}"} for n in range(1, 10)]
    axes = plots.predicted_against_measured({"predictions": run}).axes[0]
    looks = {(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() not in ("None", "|")}
    assert len(looks) == 9
