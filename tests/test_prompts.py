"""The example prompts are what the demo's settings and the README say of them."""

import json
from collections import Counter
from pathlib import Path

from eagle3.features.record import is_held_out
from eagle3.prompts.conversations import Conversation, read_conversations

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
NUM_PER_CATEGORY = {"chat": 100, "code": 75, "math": 65, "summary": 60, "extract": 60}


def prompts() -> list[Conversation]:
    rows = list(read_conversations(PROMPTS))
    bad = [row for row in rows if not isinstance(row, Conversation)]
    assert not bad, bad
    return [row for row in rows if isinstance(row, Conversation)]


def test_every_row_parses_and_only_users_speak() -> None:
    assert len(prompts()) == 360
    assert {message["role"] for row in prompts() for message in row.messages} == {"user"}


def test_ids_and_texts_are_unique_and_texts_are_trimmed() -> None:
    texts = [message["content"] for row in prompts() for message in row.messages]
    assert len({row.id for row in prompts()}) == 360
    assert [text for text, count in Counter(text.lower() for text in texts).items() if count > 1] == []
    assert [text for text in texts if text != text.strip()] == []


def test_300_are_trained_on_and_60_are_held_out_over_all_categories() -> None:
    held_out = Counter(row.id.split("-")[0] for row in prompts() if is_held_out(row.id, 1 / 6))
    assert held_out == {"chat": 17, "code": 12, "math": 11, "summary": 10, "extract": 10}
    assert sum(held_out.values()) == 60


def test_categories_match_the_ids() -> None:
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="ascii").splitlines()]
    assert Counter(row["category"] for row in rows) == NUM_PER_CATEGORY
    assert all(row["id"].rpartition("-")[0] == row["category"] and row["id"][-3:].isdigit() for row in rows)
    assert {tuple(row) for row in rows} == {("id", "category", "messages")}


def test_the_first_prompts_are_a_mixture() -> None:
    # A run that takes the first prompts only, as max_prompts does, sees every category.
    assert {row.id.split("-")[0] for row in prompts()[:10]} == set(NUM_PER_CATEGORY)


def test_turns_are_single_mostly() -> None:
    turns = Counter(len(row.messages) for row in prompts())
    assert turns == {1: 319, 2: 38, 3: 3}


def test_characters_are_ascii() -> None:
    text = PROMPTS.read_text(encoding="ascii")
    assert text.endswith("}\n")
    assert all(ord(character) < 128 for row in prompts() for m in row.messages for character in m["content"])
