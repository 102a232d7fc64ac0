"""Files appear whole or not at all."""

import pytest

from hf_dspark import files


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_whole(path, "before")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.write_whole(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
