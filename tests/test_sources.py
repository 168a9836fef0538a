"""Rows come out of every container one at a time, whatever it is compressed with."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from eagle3.config import UserError
from eagle3.prompts.conversations import BadRow, Conversation, read_conversations
from eagle3.prompts.sources import RawRow, digest_sources, find_sources, read_rows

ROWS: list[dict[str, Any]] = [
    {"id": f"row-{i}", "messages": [{"role": "user", "content": f"Question {i}? \u4f60\u597d " + "x" * 50}]}
    for i in range(300)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())


def ids_of(pattern: Path | str) -> list[str]:
    return [row.id for row in read_conversations(pattern) if isinstance(row, Conversation)]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return path


ALL_IDS = [row["id"] for row in ROWS]
CONTENTS = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "a": LINES,
    "a.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "marked.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    "lines.json": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "two-members.jsonl.gz": gzip.compress(LINES[:20_000]) + gzip.compress(LINES[20_000:]),
    "a.jsonl.zst": zstd(LINES),
    "two-frames.jsonl.zst": zstd(LINES[:20_000]) + zstd(LINES[20_000:]),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_every_container_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = [row for row in read_conversations(write(tmp_path / name, CONTENTS[name]))]
    assert [row.id if isinstance(row, Conversation) else row for row in rows] == ALL_IDS
    first = rows[0]
    assert isinstance(first, Conversation)
    assert first.messages == tuple(ROWS[0]["messages"])


def test_parquet_and_saved_data_sets_give_the_same_rows(tmp_path: Path) -> None:
    rows = [ROWS[0] | {"tools": None}, ROWS[1] | {"messages": [*ROWS[1]["messages"], {"role": "assistant",
             "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "splits"))
    for name in ("a.parquet", "saved", "splits"):
        read = list(read_conversations(tmp_path / name))
        assert [type(row) for row in read] == [Conversation, Conversation], read
        assert [row.messages[-1]["role"] for row in read if isinstance(row, Conversation)] == ["user", "assistant"]
        # What a table fills with nulls is no field of the row.
        assert [set(row.messages[0]) for row in read if isinstance(row, Conversation)] == [{"role", "content"}] * 2


def test_folders_and_globs_are_read_in_order_of_names_and_rows_say_their_file(tmp_path: Path) -> None:
    write(tmp_path / "b" / "1.jsonl", b'{"prompt": "One?"}\n{}\n')
    write(tmp_path / "a.jsonl", b'{"prompt": "Two?"}\n')
    write(tmp_path / "notes.txt", b"not a row\n")
    for pattern in (str(tmp_path), f"{tmp_path}/**/*.jsonl"):
        rows = list(read_conversations(pattern))
        assert [Path(str(row.file)).name for row in rows] == ["a.jsonl", "1.jsonl", "1.jsonl"]
        assert [row.line for row in rows] == [1, 1, 2]
        assert [type(row) for row in rows] == [Conversation, Conversation, BadRow]


def test_rows_above_the_limit_are_not_read_into_memory(tmp_path: Path) -> None:
    long = json.dumps({"prompt": "x" * 5000})
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "One?"}}\n{long}\n{{"prompt": "Two?"}}\n{long}'.encode())
    rows = list(read_rows(find_sources(str(path)), 1000))
    assert [row.content is None for row in rows] == [False, True, False, True]
    assert [row.line for row in rows] == [1, 2, 3, 4]
    assert rows[1].problem is not None
    assert rows[1].problem.startswith(f"row must have at most 1000 bytes, got {len(long)}; cut it, or raise prompts.")
    table = pyarrow.Table.from_pylist([{"prompt": "One?"}, {"prompt": "x" * 5000}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    first, second = read_rows(find_sources(str(tmp_path / "a.parquet")), 1000)
    assert first == RawRow(1, {"prompt": "One?"})
    assert second.content is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1} {"b": 2}]', r"must be a JSON list of rows, got b'\{' behind row 1; correct the file"),
        ('[{"a": 1}, {"b": ', "must be a JSON list of rows of at most 99 bytes, got none that ends behind row 1"),
        ('[{"a": 1}, {"b": "' + "x" * 200 + '"}]', "got none that ends behind row 1; correct the file, or raise"),
    ],
)
def test_a_broken_list_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "a.json", text.encode())
    with pytest.raises(UserError, match=said):
        list(read_rows(find_sources(str(path)), 99))


def test_an_empty_list_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(find_sources(str(write(tmp_path / "a.json", b" [ ] "))), 99)) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_data_that_is_not_compressed_or_cut_short_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, LINES)
    with pytest.raises(UserError, match=r"must be whole (gzip|zstd) data, got .*; compress the file again"):
        list(read_conversations(path))
    whole = CONTENTS[name]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"must be whole (gzip|zstd) data, got .*; compress the file again"):
        list(read_conversations(path))


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet must be a Parquet file, got .*; write it again"):
        list(read_conversations(write(tmp_path / "a.parquet", LINES)))


def test_a_pattern_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts must match at least one file, got none for '.*\*\.jsonl'; check"):
        read_conversations(f"{tmp_path}/*.jsonl")


def test_a_data_set_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = r"must be a data set that opens, got 'hf:me/mine@test' \(no network\); check its name and split"
    with pytest.raises(UserError, match=said):
        list(read_conversations("hf:me/mine@test"))


def test_a_data_set_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*arguments: Any, **settings: Any) -> list[dict[str, Any]]:
        asked.append((arguments, settings))
        return ROWS[:2]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert ids_of("hf:me/mine:english@test") == ALL_IDS[:2]
    assert ids_of("hf:me/mine") == ALL_IDS[:2]
    assert asked == [
        (("me/mine", "english"), {"split": "test", "streaming": True}),
        (("me/mine", None), {"split": "train", "streaming": True}),
    ]


def test_the_digest_moves_with_the_bytes_of_every_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b"1")
    write(tmp_path / "b.jsonl", b"2")
    before = digest_sources(find_sources(str(tmp_path)))
    assert digest_sources(find_sources(f"{tmp_path}/*.jsonl")) == before
    write(tmp_path / "b.jsonl", b"3")
    assert digest_sources(find_sources(str(tmp_path))) != before
    assert digest_sources(find_sources("hf:a/b")) != digest_sources(find_sources("hf:a/c"))
