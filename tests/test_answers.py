"""Logged answers come back as they were, whatever a kill did to the end of the file."""

import stat
from pathlib import Path

import pytest

from eagle3.capture.answers import AnswerLog
from eagle3.capture.regenerate import Answered
from eagle3.config import UserError
from eagle3.prompts.conversations import BadRow, Conversation

CONVERSATIONS = [
    Conversation(f"id {number} \u00e9", ({"role": "user", "content": "?"},), line=number) for number in range(4)
]
RESULTS: list[Answered | BadRow] = [
    Answered("id 0 \u00e9", [1, 2, 3, 4], [(1, 2), (3, 4)], num_unfinished=1, num_looped=2, num_reencoded=3),
    BadRow(line=1, reason="the template refuses it"),
    Answered("id 2 \u00e9", [5], [(0, 1)], num_turns_dropped=1),
    Answered("id 3 \u00e9", [6], [(0, 1)]),
]


def test_answers_survive_reopening(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    log.append(CONVERSATIONS[:2], RESULTS[:2])
    log.append(CONVERSATIONS[2:3], RESULTS[2:3])
    for opened in (log, AnswerLog(tmp_path)):
        assert [opened.read(conversation) for conversation in CONVERSATIONS[:3]] == RESULTS[:3]
        assert CONVERSATIONS[3].id not in opened
        opened.close()
    assert stat.S_IMODE((tmp_path / "answers.jsonl").stat().st_mode) == 0o600


def test_a_line_that_was_cut_short_goes(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    log.append(CONVERSATIONS, RESULTS)
    log.close()
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    log = AnswerLog(tmp_path)
    assert CONVERSATIONS[2].id in log
    assert CONVERSATIONS[3].id not in log
    log.append(CONVERSATIONS[3:], RESULTS[3:])
    log.close()
    assert [AnswerLog(tmp_path).read(conversation) for conversation in CONVERSATIONS] == RESULTS


def test_a_later_answer_replaces_an_earlier_one(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    log.append(CONVERSATIONS[:1], [Answered(CONVERSATIONS[0].id, [9], [(0, 1)])])
    log.append(CONVERSATIONS[:1], RESULTS[:1])
    assert log.read(CONVERSATIONS[0]) == AnswerLog(tmp_path).read(CONVERSATIONS[0]) == RESULTS[0]


@pytest.mark.parametrize("damage", [b"\0" * 50, b"5", b"{}", b"{"])
def test_a_damaged_line_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "answers.jsonl").write_bytes(damage + b"\n")
    with pytest.raises(UserError, match=r"must be an answer as it was written, got .* at byte 0 \(.*answers.jsonl\)"):
        AnswerLog(tmp_path)


def test_an_answer_without_its_fields_is_named(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    log.append(CONVERSATIONS, RESULTS)
    log.close()
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"spans"', b'"spanz"'))
    with pytest.raises(UserError, match=r"got KeyError\('spans'\) at byte 0 .*delete it: what is not stored yet is"):
        AnswerLog(tmp_path).read(CONVERSATIONS[0])
