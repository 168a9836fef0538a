"""A file is as it was or as it should be, whenever the writer dies."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from eagle3.files import PRIVATE, sync, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("a long text, with \u00fc\n", "short\n", ""):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_writer_that_dies_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "before")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, call, die)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "a longer text than before")
    assert path.read_text() == "before"
    assert (tmp_path / "state.tmp").exists()
    write_whole(path, "after")  # what was left over does not matter
    assert path.read_text() == "after"
    assert not (tmp_path / "state.tmp").exists()


def test_the_mode_is_the_umasks_or_private(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "run.json", "")
        write_whole(tmp_path / "manifest.json", "", mode=PRIVATE)
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir()}
    assert modes == {"run.json": "0o640", "manifest.json": "0o600"}


def test_the_contents_reach_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def record(name: str) -> None:
        whole = getattr(os, name)

        def call(*args: Any) -> None:
            calls.append(name)
            whole(*args)

        monkeypatch.setattr(os, name, call)

    record("fsync")
    record("replace")
    write_whole(tmp_path / "state.json", "text")
    assert calls == ["fsync", "replace", "fsync"]  # file, rename, directory
    sync(tmp_path / "state.json")
    assert calls == ["fsync", "replace", "fsync", "fsync"]
