"""Conversations are asked turn by turn, on the answerer's own words."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.capture.generation import Generation
from eagle3.capture.regenerate import answer_conversations
from eagle3.config import EvaluateConfig, PromptsConfig, UserError
from eagle3.evaluation.turns import ask_all, select_conversations
from eagle3.features.record import is_held_out
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

END_IDS = frozenset([2])  # <|im_end|> of the tiny target


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tiny_target), trust_remote_code=False)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_prompts(path: Path, rows: list[Any]) -> EvaluateConfig:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return EvaluateConfig(prompts=PromptsConfig(path=str(path)))


def test_answers_become_history_and_recorded_answers_do_not(tokenizer: PreTrainedTokenizerBase) -> None:
    conversations = [
        Conversation("a", ({"role": "system", "content": "S"}, user("1"), assistant("recorded"), user("2")), 1),
        Conversation("b", (user("only"), assistant("recorded")), 2),
        Conversation("c", (user("x"), user("y"), user("z")), 3),
    ]
    asked: list[list[str]] = []

    def answer(prompts: list[list[int]]) -> list[Reply]:
        asked.append([str(tokenizer.decode(ids)) for ids in prompts])
        return [Reply([*tokenizer(f"reply {len(asked)}")["input_ids"], 2]) for _ in prompts]

    turns = ask_all(conversations, tokenizer, EvaluateConfig(), answer, END_IDS)
    assert [turn.sample_id for turn in turns] == ["a", "b", "c", "a", "c", "c"]
    opening = "<|im_start|>assistant\n"
    said = opening + "reply {}<|im_end|>\n"
    system, u = "<|im_start|>system\nS<|im_end|>\n", "<|im_start|>user\n{}<|im_end|>\n"
    assert asked == [
        [system + u.format("1") + opening, u.format("only") + opening, u.format("x") + opening],
        [
            system + u.format("1") + said.format(1) + u.format("2") + opening,
            u.format("x") + said.format(1) + u.format("y") + opening,
        ],
        [u.format("x") + said.format(1) + u.format("y") + said.format(2) + u.format("z") + opening],
    ]


@pytest.mark.parametrize("ends", [[2], [], [0]], ids=["finished", "at the limit", "at a token that ends nothing"])
def test_later_turns_are_asked_as_they_were_when_features_were_captured(tiny_target: Path, ends: list[int]) -> None:
    tokenizer = load_tokenizer(str(tiny_target), trust_remote_code=False)
    tokenizer.clean_up_tokenization_spaces = True  # as many configs ask, for display
    answer_ids = [*tokenizer("is it , or is n't it ?")["input_ids"], 0, *tokenizer(" so .")["input_ids"], *ends]
    conversation = Conversation("a", (user("1"), user("2")), 1)
    asked: dict[str, list[list[int]]] = {"capture": [], "evaluation": []}

    def generate(prompts: list[list[int]]) -> list[Generation]:
        asked["capture"] += prompts
        return [Generation(answer_ids, finished=ends == [2], looped=False) for _ in prompts]

    def answer(prompts: list[list[int]]) -> list[Reply]:
        asked["evaluation"] += prompts
        return [Reply(answer_ids) for _ in prompts]

    answer_conversations([conversation], ChatRenderer(tokenizer, {}), tokenizer, generate, max_tokens=500)
    ask_all([conversation], tokenizer, EvaluateConfig(), answer, END_IDS)
    assert len(asked["capture"]) == 2
    assert asked["evaluation"] == asked["capture"]


def test_an_empty_answer_is_history_too(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation("a", (user("1"), user("2")), 1)
    turns = ask_all([conversation], tokenizer, EvaluateConfig(), lambda prompts: [Reply([])], END_IDS)
    assert str(tokenizer.decode(turns[1].prompt_ids)).count("<|im_start|>assistant\n<|im_end|>") == 1


def test_a_conversation_that_no_longer_fits_ends_and_is_counted(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    conversations = [Conversation("a", (user("hi"), user("what? " * 30)), 7), Conversation("b", (user("hi"),), 8)]
    config = EvaluateConfig(prompts=PromptsConfig(path="p.jsonl", max_tokens=60))
    with caplog.at_level(logging.WARNING):
        turns = ask_all(conversations, tokenizer, config, lambda prompts: [Reply([5, 2]) for _ in prompts], END_IDS)
    assert [turn.sample_id for turn in turns] == ["a", "b"]
    assert "1 conversation ended early; the first at line 7:" in caplog.text
    assert "more than prompts.max_tokens" in caplog.text
    with pytest.raises(UserError, match=r"at least one prompt must be askable, got none of 1 \(p.jsonl\); .*line 7"):
        ask_all(
            [Conversation("a", (user("what? " * 60),), 7)], tokenizer, config, lambda prompts: [Reply([5])], END_IDS
        )


def test_held_out_prompts_are_those_of_training(tmp_path: Path) -> None:
    rows = [{"id": f"row {i}", "messages": [user("hi")]} for i in range(40)]
    config = write_prompts(tmp_path / "p.jsonl", rows)
    assert len(select_conversations(config)) == 40
    held_out = EvaluateConfig(prompts=config.prompts, held_out_share=0.3)
    ids = [conversation.id for conversation in select_conversations(held_out)]
    assert ids == [row["id"] for row in rows if is_held_out(str(row["id"]), 0.3)]
    first = EvaluateConfig(prompts=config.prompts, held_out_share=0.3, max_prompts=2)
    assert [conversation.id for conversation in select_conversations(first)] == ids[:2]
    with pytest.raises(
        UserError, match=r"at least one conversation, got none of 40 rows \(0 bad, held_out_share 1e-09"
    ):
        select_conversations(EvaluateConfig(prompts=config.prompts, held_out_share=1e-9))


def test_bad_rows_are_counted_or_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = write_prompts(tmp_path / "p.jsonl", [{"messages": [user("hi")]}, "{broken", {"messages": []}])
    with caplog.at_level(logging.WARNING):
        assert len(select_conversations(config)) == 1
    assert "2 of 3 rows cannot be used; the first is line 2: row must be JSON" in caplog.text
    strict = EvaluateConfig(prompts=PromptsConfig(path=config.prompts.path, fail_on_bad_row=True))
    with pytest.raises(UserError, match=r"row must be JSON .*p.jsonl, line 2\)"):
        select_conversations(strict)


def test_copies_and_measured_questions_are_left_out_as_in_extraction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": i, "messages": [user(text)]} for i, text in enumerate(("One?", "one", "Two?", "Three?"))]
    path = write_prompts(tmp_path / "p.jsonl", rows).prompts.path
    write_prompts(tmp_path / "bench.jsonl", [{"messages": [user("Three?")]}])
    prompts = PromptsConfig(
        path=path, near_duplicates="drop", exclude=[str(tmp_path / "bench.jsonl")], fail_on_bad_row=True
    )
    with caplog.at_level(logging.WARNING):
        kept = select_conversations(EvaluateConfig(prompts=prompts))
    assert [row.line for row in kept] == [1, 3]
    assert "2 of 4 rows cannot be used; the first is line 2: row must be unlike the ones before it" in caplog.text


def test_what_else_a_folder_has_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_prompts(tmp_path / "p.jsonl", [{"messages": [user("hi")]}])
    (tmp_path / "notes.txt").write_text("x")
    with caplog.at_level(logging.INFO):
        assert len(select_conversations(EvaluateConfig(prompts=PromptsConfig(path=str(tmp_path))))) == 1
    assert f"prompts: {tmp_path}/notes.txt is in no form that is read, and left out" in caplog.text


def test_prompts_must_be_named() -> None:
    with pytest.raises(UserError, match=r"prompts.path must name a file, got null"):
        select_conversations(EvaluateConfig())
