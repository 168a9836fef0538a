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
from eagle3.prompts.raw_rows import RawRow
from eagle3.prompts.sources import digest_sources, find_sources, read_rows, unread_files

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
    "lost-its-ending": gzip.compress(LINES),
    "unpacked.jsonl.gz": LINES,
    "unpacked.jsonl.zst": LINES,
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
        ('[{"a": 1}, {"b": ', "of at most 99 bytes, got no JSON value that ends within them behind row 1"),
        ('[{"a": 1},]', "got no JSON value that ends within them behind row 1"),
        ('[{"a": 1}', "must be a JSON list of rows, got its end behind row 1; correct the file"),
        ('[{"a": 1}] {"a": 2}', r"must end with its list of rows, got b'\{' behind it; correct the file"),
        ("[] []", r"must end with its list of rows, got b'\[' behind it; correct the file"),
        ('{\n "data": [{"a": 1}]\n}', "got one object over several lines; write the rows in it as a list"),
        ('[{"a": 1}, {"b": "' + "x" * 200 + '"}]', "ends within them behind row 1; correct the file, or raise"),
    ],
)
def test_a_broken_list_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "a.json", text.encode())
    with pytest.raises(UserError, match=said):
        list(read_rows(find_sources(str(path)), 99))


def test_an_empty_list_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(find_sources(str(write(tmp_path / "a.json", b" [ ] "))), 99)) == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_data_that_is_cut_short_is_named(tmp_path: Path, name: str) -> None:
    whole = CONTENTS[name]
    path = write(tmp_path / name, whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"must be whole (gzip|zstd) data, got .*; compress the file again"):
        list(read_conversations(path))


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet must be a Parquet file, got .*; write it again"):
        list(read_conversations(write(tmp_path / "a.parquet", LINES)))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"prompt": f"Question {i}?"} for i in range(10)])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:10] + b"\xff" * 30 + whole[40:])  # the footer is whole, a page is not
    with pytest.raises(UserError, match=r"a\.parquet must be a Parquet file, got .* \(behind row 0\); write it again"):
        list(read_conversations(path))


def test_parquet_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:3]), tmp_path / "without-ending")
    assert ids_of(tmp_path / "without-ending") == ALL_IDS[:3]


def test_a_value_that_python_cannot_hold_is_a_problem_of_its_row(tmp_path: Path) -> None:
    text = pyarrow.array([b"One?", b"\xff\xfe", b"Two?"]).view(pyarrow.string())  # not UTF-8, as a writer may leave it
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "a.parquet")
    rows = list(read_conversations(tmp_path / "a.parquet"))
    assert [type(row) for row in rows] == [Conversation, BadRow, Conversation]
    assert isinstance(rows[1], BadRow)
    assert rows[1].reason.startswith("row must have values that can be read, got 'utf-8' codec can't decode")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", b"prompt,completion\n", "a table of text"),
        ("a.txt", b"Why?\n", "plain text"),
        ("a.jsonl.bz2", b"BZh91AY", "bzip2"),
        ("a.zip", b"PK\x03\x04", "zip"),
    ],
)
def test_a_file_in_a_form_that_is_not_read_is_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(UserError, match=rf"compressed by gzip or zstd, got {said} \('.*'\); write each row as JSON"):
        read_conversations(path)


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(UserError, match="prompts must be a file, a folder or a data set, got an empty name; name one"):
        read_conversations("")


def test_a_folder_is_read_without_what_describes_it_and_says_what_else_is_there(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[:2]) for name in ("test", "train")})
    saved.save_to_disk(str(tmp_path / "saved"))
    write(tmp_path / "data" / "more.jsonl", b'{"prompt": "One?"}\n')
    write(tmp_path / "dataset_infos.json", b"{}")
    write(tmp_path / ".cache" / "old.jsonl", b'{"prompt": "Two?"}\n')
    for name in ("README.md", "table.csv"):
        write(tmp_path / name, b"x")
    assert [Path(source.name).name for source in find_sources(str(tmp_path))] == ["more.jsonl", "saved"]
    assert len(ids_of(tmp_path)) == 3
    unread = [str(Path(name).relative_to(tmp_path)) for name in unread_files(str(tmp_path))]
    assert unread == ["README.md", "table.csv", "saved/test"]
    assert unread_files(str(tmp_path / "data" / "more.jsonl")) == []


def test_a_saved_data_set_without_training_split_names_its_splits(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[:2]) for name in ("train_sft", "test_sft")})
    saved.save_to_disk(str(tmp_path / "saved"))
    said = (
        r"must be a data set with a split 'train', got 'train_sft', 'test_sft' \(.*\); name the folder of one, such as"
    )
    with pytest.raises(UserError, match=said):
        list(read_conversations(tmp_path / "saved"))
    assert ids_of(tmp_path / "saved" / "train_sft") == ALL_IDS[:2]


def test_a_pattern_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompts must match at least one file, got none for '.*\*\.jsonl'; check"):
        read_conversations(f"{tmp_path}/*.jsonl")


def test_a_data_set_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = r"must be a data set that can be read, got 'hf:me/mine@test' \(no network, behind row 0\); check its name"
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
