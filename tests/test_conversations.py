"""Rows that are right come out as messages; rows that are wrong come out with their line and reason."""

import datetime
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.config import UserError
from eagle3.prompts.conversations import BadRow, Conversation, read_conversations

QUESTION = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Air scatters blue light most."}


def rows_of(tmp_path: Path, *rows: Any) -> list[Conversation | BadRow]:
    """Reads rows back from a file; a str or bytes is a raw line, anything else is written as JSON."""
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return list(read_conversations(path))


def test_openai_and_sharegpt_rows_give_the_same_messages(tmp_path: Path) -> None:
    openai = [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, QUESTION]
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": QUESTION["content"]},
        {"from": "gpt", "value": ANSWER["content"]},
        {"from": "user", "value": QUESTION["content"]},
    ]
    mixed = [{"from": turn["role"], "content": turn["content"]} for turn in openai]
    rows = rows_of(
        tmp_path,
        {"id": "a", "messages": openai},
        {"id": "b", "conversations": sharegpt},
        {"id": "c", "conversations": openai},
        {"id": "d", "conversations": mixed},
    )
    assert [row.messages for row in rows if isinstance(row, Conversation)] == [tuple(openai)] * 4


def calling(function: Any) -> dict[str, Any]:
    return {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"prompt": "One?", "prompt": "Two?"}', "row must have each field once, got 'prompt' twice in one object"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "got 'content' twice in one object"),
        (calling({"name": "f", "arguments": '{"a": 1, "a": 2}'}), "each field once, got 'a' twice in one object"),
        (calling({"name": " ", "arguments": "{}"}), r"tool_calls\[0\] must have a function with a name, got"),
        (calling({"name": "f\ud800"}), r"messages\[1\]\.tool_calls must be valid Unicode, got half of a surrogate"),
        (
            calling({"name": "f", "arguments": '{"a": NaN}'}),
            r"tool_calls must hold what JSON has, got \[.* not JSON comp",
        ),
        ({"messages": [QUESTION, ANSWER], "tools": [{"name": "\udc00"}]}, "tools must be valid Unicode"),
        ({"prompt": "One?", "chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs must be valid Unicode"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, r"messages\[1\]\.weight must be 0 or 1, got 0\.5"),
    ],
)
def test_what_no_request_could_hold_is_refused(tmp_path: Path, row: Any, reason: str) -> None:
    (read,) = rows_of(tmp_path, row)
    assert isinstance(read, BadRow), read
    assert re.search(reason, read.reason), read.reason


def test_what_a_table_holds_and_json_does_not_is_refused(tmp_path: Path) -> None:
    day = datetime.date(2026, 11, 30)
    rows: list[dict[str, Any]] = [
        {"prompt": b"One?", "chat_template_kwargs": None},
        {"prompt": b"One?", "chat_template_kwargs": {"day": day}},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "bytes.parquet")
    (first, _) = read_conversations(tmp_path / "bytes.parquet")
    assert isinstance(first, BadRow)
    assert first.reason == "prompt must be a string, got a bytes"
    rows = [{**row, "prompt": "One?"} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dates.parquet")
    (first, second) = read_conversations(tmp_path / "dates.parquet")
    assert isinstance(first, Conversation)
    assert isinstance(second, BadRow)
    assert second.reason.startswith("chat_template_kwargs must hold what JSON has, got {'day': datetime.date(")


def test_prompts_without_answers_keep_every_user_turn(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": text} for text in ("One.", "Two.", "Three.")]
    (row,) = rows_of(tmp_path, {"messages": turns})
    assert isinstance(row, Conversation)
    assert row.messages == tuple(turns)


def test_fields_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    row = {
        "id": 1,
        "source": "x",
        "tools": [],
        "system": "",
        "messages": [{**QUESTION, "weight": 1, "tool_calls": None}],
    }
    assert rows_of(tmp_path, row) == [Conversation(id="1", messages=(QUESTION,), line=1)]


def test_whitespace_and_line_ends_of_text_are_kept(tmp_path: Path) -> None:
    text = "  two spaces\r\n\tand a tab \n"
    (row,) = rows_of(tmp_path, {"messages": [{"role": "user", "content": text}]})
    assert isinstance(row, Conversation)
    assert row.messages[0]["content"] == text


def test_lines_are_counted_from_one_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    good = json.dumps({"messages": [QUESTION]})
    rows = rows_of(tmp_path, "", good, "   ", "oops\r", "")
    assert [(type(row), row.line) for row in rows] == [(Conversation, 2), (BadRow, 4)]


def test_a_byte_order_mark_is_not_part_of_the_row(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, b"\xef\xbb\xbf" + json.dumps({"id": "a", "messages": [QUESTION]}).encode())
    assert row == Conversation(id="a", messages=(QUESTION,), line=1)


def test_id_is_the_rows_own_or_depends_on_the_messages_alone(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        {"id": "chat-001", "messages": [QUESTION]},
        {"id": 7, "messages": [QUESTION]},
        {"messages": [QUESTION]},
        {"id": None, "messages": [QUESTION, ANSWER]},
    )
    ids = [row.id for row in rows if isinstance(row, Conversation)]
    assert ids[:2] == ["chat-001", "7"]
    assert [len(sample_id) for sample_id in ids[2:]] == [32, 32]
    again = rows_of(tmp_path, {"conversations": [{"from": "human", "value": QUESTION["content"]}], "source": "other"})
    assert isinstance(again[0], Conversation)
    assert again[0].id == ids[2] != ids[3]


def test_duplicate_ids_name_the_first_line(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        {"id": 7, "messages": [QUESTION]},
        "",
        {"id": "7", "messages": [ANSWER, QUESTION]},
        {"id": "7", "messages": [QUESTION, ANSWER]},
        {"messages": [QUESTION]},
        {"messages": [QUESTION]},
    )
    reasons = {row.line: row.reason for row in rows if isinstance(row, BadRow)}
    assert sorted(reasons) == [3, 4, 6]
    assert reasons[4] == "id must be unique, got '7' again (first on line 1; a row without one goes by its content)"
    assert reasons[6].endswith("again (first on line 5; a row without one goes by its content)")


BAD_ROWS: dict[str, tuple[Any, str]] = {
    "cut-off JSON": ('{"messages": [', "row must be JSON in UTF-8, got b'{\"messages\": [' (Expecting value"),
    "not UTF-8": (b'{"messages": "\xff"}', 'row must be JSON in UTF-8, got b\'{"messages": "\\xff"}\' ('),
    "nested too deep": ("[" * 200_000, "row must be JSON in UTF-8, got b'[[["),
    "a list": ([QUESTION], "row must be a JSON object, got a list"),
    "a string": ('"text"', "row must be a JSON object, got a string"),
    "no messages": (
        {"texts": "x", "id": 1},
        "row must have messages, conversations, prompt and completion",
    ),
    "both forms": (
        {"messages": [QUESTION], "conversations": [QUESTION]},
        "row must have either 'messages' or 'conversations', got the fields ['conversations', 'messages']",
    ),
    "messages of the wrong type": ({"messages": "x"}, "messages must be a list, got a string"),
    "no turns": ({"conversations": []}, "conversations must have at least one turn, got an empty list"),
    "a turn of the wrong type": ({"messages": [QUESTION, "x"]}, "messages[1] must be an object, got a string"),
    "no role": (
        {"messages": [{"content": "x"}]},
        "messages[0] must have role and content (or from and value), got the fields ['content']",
    ),
    "no content": (
        {"messages": [{"role": "user"}]},
        "messages[0] must have role and content (or from and value), got the fields ['role']",
    ),
    "unknown role": (
        {"conversations": [{"from": "moderator", "value": "x"}]},
        "conversations[0].from must be one of system, developer, user, assistant, tool or ShareGPT's names for them, ",
    ),
    "role of the wrong type": (
        {"messages": [{"role": ["user"], "content": "x"}]},
        "messages[0].role must be one of system, developer, user, assistant, tool or ShareGPT's names for them, ",
    ),
    "content is null": (
        {"messages": [QUESTION, {"role": "assistant", "content": None}]},
        "messages[1].content must be an assistant turn with text, got ''",
    ),
    "a question of null": (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content must be a string, got null",
    ),
    "content has an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0] must be a part of type 'text', got 'image_url'",
    ),
    "content is a number": (
        {"messages": [{"role": "user", "content": 3.5}]},
        "messages[0].content must be a string, got a number",
    ),
    "content is a boolean": (
        {"messages": [{"role": "user", "content": True}]},
        "messages[0].content must be a string, got a boolean",
    ),
    "content is an object": (
        {"messages": [{"role": "user", "content": {}}]},
        "messages[0].content must be a string, got an object",
    ),
    "empty question": (
        {"messages": [{"role": "user", "content": " \n"}]},
        "messages[0].content must be a user turn with text, got ' \\n'",
    ),
    "empty answer": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]},
        "conversations[1].value must be a gpt turn with text, got ''",
    ),
    "only system turns": (
        {"messages": [{"role": "system", "content": "x"}]},
        "messages must have a user turn, got only system turns",
    ),
    "answer before any question": (
        {"messages": [ANSWER, QUESTION]},
        "messages must have a user turn before the first answer, got the roles assistant, user",
    ),
    "half of a surrogate pair": (
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        "messages[0].content must be valid Unicode, got half of a surrogate pair",
    ),
    "functions": (
        {"functions": [{"name": "f"}], "messages": [QUESTION]},
        "row must have tools instead of the old 'functions' field, got [{'name': 'f'}]",
    ),
    "tools without a name": (
        {"tools": [{"function": {}}], "messages": [QUESTION]},
        "tools[0] must have a name, got {'function': {}}",
    ),
    "id of the wrong type": (
        {"id": ["a" * 80], "messages": [QUESTION]},
        f"id must be a string with text, or an integer, got ['{'a' * 55}...",
    ),
    "id is a boolean": (
        {"id": True, "messages": [QUESTION]},
        "id must be a string with text, or an integer, got True",
    ),
    "id is empty": ({"id": "", "messages": [QUESTION]}, "id must be a string with text, or an integer, got ''"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_says_what_was_expected_and_seen_and_stops_nothing(tmp_path: Path, name: str) -> None:
    row, reason = BAD_ROWS[name]
    bad, good = rows_of(tmp_path, row, {"id": "good", "messages": [QUESTION]})
    assert isinstance(bad, BadRow)
    assert bad.line == 1
    assert bad.reason.startswith(reason)
    assert len(bad.reason) < 200
    assert good == Conversation(id="good", messages=(QUESTION,), line=2)


def test_a_bad_row_does_not_take_its_id(tmp_path: Path) -> None:
    bad, good = rows_of(tmp_path, {"id": "a", "messages": []}, {"id": "a", "messages": [QUESTION]})
    assert isinstance(bad, BadRow)
    assert good == Conversation(id="a", messages=(QUESTION,), line=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nothing.jsonl"
    with pytest.raises(UserError, match=r"prompts must be a file, got no file at '.*nothing\.jsonl'; check"):
        read_conversations(path)


def test_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a directory with files of .*, got a directory without any \('.*'\)"):
        read_conversations(tmp_path)


def test_a_device_is_no_directory() -> None:
    with pytest.raises(UserError, match=r"must be a file, got a device or a pipe, which cannot be read twice"):
        read_conversations(Path("/dev/null"))


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(
        UserError, match=r"prompts must have at least one row, got an empty file \('.*prompts\.jsonl'\)"
    ):
        list(read_conversations(path))


def test_rows_stream(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "x" * 100_000
    with path.open("w") as file:
        for i in range(200):
            file.write(json.dumps({"id": i, "messages": [{"role": "user", "content": text}]}) + "\n")
    tracemalloc.start()
    try:
        num_rows = sum(1 for _ in read_conversations(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_rows == 200
    assert peak < 20 * len(text), f"{peak} bytes at peak for a file of {path.stat().st_size}"
