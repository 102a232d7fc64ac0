"""Examples come from whatever holds a dataset."""

import json

import pytest
from datasets import Dataset, DatasetDict

from hf_dspark.training.sources import load_examples


ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_files(tmp_path, kind):
    path, data = tmp_path / f"data.{kind}", Dataset.from_list(ROWS)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        {"json": data.to_json, "parquet": data.to_parquet, "csv": data.to_csv}[kind](path)
    assert load_examples(path).to_list() == ROWS


@pytest.mark.parametrize(
    "line, said",
    [(b'{"prompt": "oops', "Not JSON: .* at column 12"), (b'{"prompt": "caf\xe9"}', "Not UTF-8")],
    ids=["json", "encoding"],
)
def test_a_broken_line_is_named(tmp_path, line, said):
    file = tmp_path / "files" / "train.jsonl"
    file.parent.mkdir()
    file.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    for source in (file, file.parent):
        with pytest.raises(ValueError, match=said) as error:
            load_examples(source)
        assert str(error.value).startswith(f"{file}:2: ") and "\n" not in str(error.value)


def test_lines_of_text(tmp_path):
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    assert load_examples(str(tmp_path / "lines.txt"))["text"] == ["one", "two"]


def test_folders(tmp_path):
    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "several")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert load_examples(tmp_path / "one").to_list() == ROWS
    assert load_examples(tmp_path / "several", "test").to_list() == ROWS[1:]
    assert load_examples(tmp_path / "files").to_list() == ROWS[:1]


def test_a_split_that_is_not_there_is_named(tmp_path):
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "several")
    with pytest.raises(ValueError, match="has no split 'test', only 'train'"):
        load_examples(tmp_path / "several", "test")


@pytest.mark.parametrize("name", ["nowhere/to/be/found", "missing.jsonl", "~/missing.parquet"])
def test_nothing_there(name):
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        load_examples(name)
