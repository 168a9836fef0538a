"""Rows that are too long are dropped, cut at a turn or split, and no cut stands within an answer."""

from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template_text
from test_templates import runs_of

from eagle3.features.record import is_held_out
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import Conversation, GivenTokens
from eagle3.prompts.lengths import PIECE, Sample, fit, render_row
from eagle3.prompts.rendering import ChatRenderer

RENDERER = ChatRenderer(family_tokenizer("qwen", template_text("qwen2.5")), {})
TOKENIZER = family_tokenizer("qwen", None)


def conversation(num_turns: int, **more: Any) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return Conversation(id="row", messages=tuple(messages), line=1, **more)


def fitted(row: Conversation, max_tokens: int, too_long: Any) -> list[Sample]:
    return fit(RENDERER, row, render_row(RENDERER, row), max_tokens=max_tokens, too_long=too_long)


def length_of(num_turns: int) -> int:
    return len(render_row(RENDERER, conversation(num_turns)).input_ids)


def supervised(sample: Sample) -> list[str]:
    ids = sample.rendered.input_ids
    return [str(TOKENIZER.decode(ids[start:end])) for start, end in runs_of(sample.rendered)]


@pytest.mark.parametrize("too_long", ["drop", "truncate", "split"])
def test_a_row_that_fits_stays_as_it_is(too_long: str) -> None:
    row = conversation(3)
    (sample,) = fitted(row, length_of(3), too_long)
    assert sample.conversation is row


def test_too_long_rows_are_dropped_by_default() -> None:
    assert fitted(conversation(3), length_of(3) - 1, "drop") == []


def test_truncation_keeps_the_turns_that_fit() -> None:
    (sample,) = fitted(conversation(4), length_of(2) + 5, "truncate")
    assert supervised(sample) == ["answer 0<|im_end|>", "answer 1<|im_end|>"]
    assert sample.conversation.id == "row"
    assert len(sample.rendered.input_ids) == length_of(2)
    # What is kept renders to the same ids again.
    assert render_row(RENDERER, sample.conversation) == sample.rendered
    assert fitted(conversation(4), length_of(1) - 1, "truncate") == []


def test_splitting_loses_no_answer_and_repeats_the_system_prompt() -> None:
    samples = fitted(conversation(5), length_of(2) + 5, "split")
    assert [supervised(sample) for sample in samples] == [
        ["answer 0<|im_end|>", "answer 1<|im_end|>"],
        ["answer 2<|im_end|>", "answer 3<|im_end|>"],
        ["answer 4<|im_end|>"],
    ]
    assert [sample.conversation.id for sample in samples] == [f"row{PIECE}{n}" for n in (1, 2, 3)]
    assert {sample.conversation.messages[0]["role"] for sample in samples} == {"system"}
    assert all(len(sample.rendered.input_ids) <= length_of(2) + 5 for sample in samples)


def test_an_exchange_that_does_not_fit_by_itself_is_left_out() -> None:
    row = conversation(3)
    messages = list(row.messages)
    messages[3] = {"role": "user", "content": "x" * 500}
    samples = fitted(Conversation(id="row", messages=tuple(messages), line=1), length_of(1) + 5, "split")
    assert [supervised(sample) for sample in samples] == [["answer 0<|im_end|>"], ["answer 2<|im_end|>"]]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_pieces_of_a_row_are_held_out_together(share: float) -> None:
    for row in range(50):
        assert len({is_held_out(f"{row}{end}", share) for end in ("", f"{PIECE}1", f"{PIECE}2")}) == 1


def test_raw_text_is_cut_anywhere_and_given_tokens_between_answers() -> None:
    text = Conversation(id="row", messages=(), line=1, text="abcdefghij")
    pieces = [sample.rendered.input_ids for sample in fitted(text, 4, "split")]
    assert [len(ids) for ids in pieces] == [4, 4, 2]
    assert [token for ids in pieces for token in ids] == TOKENIZER("abcdefghij")["input_ids"]
    assert [len(sample.rendered.input_ids) for sample in fitted(text, 4, "truncate")] == [4]
    mask = (False, True, True, False, True, True, True, False)
    tokens = Conversation(id="row", messages=(), line=1, tokens=GivenTokens(tuple(range(8)), mask))
    cut = fitted(tokens, 5, "split")
    assert [sample.rendered.input_ids for sample in cut] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [sample.conversation.tokens for sample in cut] == [
        GivenTokens((0, 1, 2, 3), mask[:4]), GivenTokens((4, 5, 6, 7), mask[4:])
    ]  # fmt: skip
    # Three supervised tokens in a row do not fit two.
    assert [sample.rendered.input_ids for sample in fitted(tokens, 2, "split")] == [[1, 2]]


def test_ids_that_the_tokenizer_does_not_have_are_refused() -> None:
    limit = max(TOKENIZER.get_vocab().values()) + 1
    for ids in ((0, limit - 1), (0, limit)):
        row = Conversation(id="row", messages=(), line=1, tokens=GivenTokens(ids, (False, True)))
        if max(ids) < limit:
            assert render_row(RENDERER, row).input_ids == list(ids)
            continue
        with pytest.raises(RenderingError, match=rf"must be the tokenizer's, from 0 to {limit - 1}, got {limit}"):
            render_row(RENDERER, row)
