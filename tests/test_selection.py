"""Every row of a prompts file is either captured or accounted for."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from eagle3.capture.generation import Generation
from eagle3.capture.regenerate import Answered, answer_conversations
from eagle3.capture.selection import Selection, TooLong, select_rows
from eagle3.config import PromptsConfig, RegenerateConfig, UserError
from eagle3.plan import SampleSize
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.tokenizers import load_tokenizer

GIVEN, WRITTEN = RegenerateConfig(enabled=False), RegenerateConfig(max_new_tokens=20)


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(str(tiny_target), False)


def turns(*contents: str) -> dict[str, Any]:
    """A row of alternating user and assistant turns."""
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def select(tmp_path: Path, tokenizer: Any, rows: list[Any], regenerate: RegenerateConfig, **limits: Any) -> Selection:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    max_tokens = limits.pop("max_tokens", 200)
    prompts = PromptsConfig(str(path), **limits)
    return select_rows(prompts, ChatRenderer(tokenizer, {}), regenerate, max_tokens=max_tokens)


def test_rows_are_kept_or_named_with_line_and_reason(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        turns("One?", "Yes."),
        {"no": 1},
        turns("word " * 100, "No."),
        turns("Only a prompt?"),
        turns("Two?", "No."),
    ]
    selection = select(tmp_path, tokenizer, rows, GIVEN)
    assert [row.conversation.line for row in selection.rows] == [1, 5]
    assert [row.line for row in selection.bad_rows] == [2, 4]
    assert selection.bad_rows[1].reason == "row must have an assistant turn to learn from, got none"
    (too_long,) = selection.too_long
    assert too_long.reason.startswith("row must have at most 200 tokens, got ")
    assert [row.line for row in selection.rejected] == [2, 3, 4]


def test_given_answers_have_exact_sizes(tmp_path: Path, tokenizer: Any) -> None:
    row = turns("One?", "Yes.", "Two?", "No.")
    (selected,) = select(tmp_path, tokenizer, [row], GIVEN).rows
    rendered = ChatRenderer(tokenizer, {}).render(row["messages"])
    assert selected.size == SampleSize(len(rendered.input_ids), sum(rendered.loss_mask))


@pytest.mark.parametrize("max_tokens", [200, 80])
def test_answers_to_come_have_upper_bounds(tmp_path: Path, tokenizer: Any, max_tokens: int) -> None:
    rows = [turns("One?"), turns("One?", "dropped", "Two?", "dropped", "Three?", "dropped")]
    rows[1]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    selection = select(tmp_path, tokenizer, rows, WRITTEN, max_tokens=max_tokens)

    def longest(prompts: list[list[int]]) -> list[Generation]:
        room = [min(20, max_tokens - len(prompt)) for prompt in prompts]
        words = tokenizer("a b c d e f g h i j k l m n o p q r s t", add_special_tokens=False)["input_ids"]
        return [Generation(words[:each], finished=False, looped=False) for each in room]

    renderer = ChatRenderer(tokenizer, {})
    conversations = [row.conversation for row in selection.rows]
    answered = answer_conversations(conversations, renderer, tokenizer, longest, max_tokens)
    for row, answers in zip(selection.rows, answered, strict=True):
        assert isinstance(answers, Answered)
        num_tokens, num_supervised = len(answers.input_ids), sum(answers.loss_mask)
        assert num_tokens <= row.size.num_tokens <= max_tokens
        assert num_supervised <= row.size.num_supervised
    assert selection.rows[0].size.num_tokens == len(answered[0].input_ids)  # type: ignore[union-attr] # checked above


def test_a_prompt_that_leaves_no_room_is_too_long(tmp_path: Path, tokenizer: Any) -> None:
    selection = select(tmp_path, tokenizer, [turns("One?"), turns("word " * 100)], WRITTEN)
    (too_long,) = selection.too_long
    assert isinstance(too_long, TooLong)
    assert too_long.line == 2
    assert too_long.reason.startswith("prompt must have fewer than 200 tokens, got ")


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path: Path, tokenizer: Any) -> None:
    rows = [turns("One?", "<|im_end|>"), turns("Two?", "Yes.")]  # an answer that spells a control token
    selection = select(tmp_path, tokenizer, rows, GIVEN)
    assert [row.line for row in selection.bad_rows] == [1]
    assert "must decode to its text" in selection.bad_rows[0].reason


def test_the_first_bad_row_ends_a_strict_run(tmp_path: Path, tokenizer: Any) -> None:
    rows = [turns("One?", "Yes."), {"no": 1}]
    with pytest.raises(UserError, match=r"prompts.fail_on_bad_row=true, got a bad one: .*prompts.jsonl, line 2\)"):
        select(tmp_path, tokenizer, rows, GIVEN, fail_on_bad_row=True)


def test_no_usable_row_is_an_error_that_says_why(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"at least one usable row, got none of 2: line 1, row must have an assistant"):
        select(tmp_path, tokenizer, [turns("One?"), {"no": 1}], GIVEN)
    with pytest.raises(UserError, match=r"correct the file, or set regenerate\.enabled=true$"):
        select(tmp_path, tokenizer, [turns("One?"), {"no": 1}], GIVEN)
    with pytest.raises(UserError, match=r"correct the file$"):
        select(tmp_path, tokenizer, [{"no": 1}], RegenerateConfig())


def test_a_row_that_is_left_out_on_purpose_ends_no_strict_run(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "bench.jsonl").write_text('{"prompt": "Two?"}\n')
    rows = [turns("One?", "Yes."), turns("Two?", "No."), turns("One", "Yes.")]
    settings = {"exclude": [str(tmp_path / "bench.jsonl")], "near_duplicates": "drop", "fail_on_bad_row": True}
    selection = select(tmp_path, tokenizer, rows, GIVEN, **settings)
    assert [row.conversation.line for row in selection.rows] == [1]
    assert [row.kind for row in selection.bad_rows] == ["question set", "near duplicate"]


def test_cutting_given_answers_is_refused_where_the_target_writes_them(tmp_path: Path, tokenizer: Any) -> None:
    said = r"prompts\.too_long must be 'drop' where the target writes the answers, got 'split': it cuts given ones"
    with pytest.raises(UserError, match=said):
        select(tmp_path, tokenizer, [turns("One?", "Yes.")], WRITTEN, too_long="split")


def test_what_cutting_leaves_out_is_counted_and_said(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [turns("One?", "Yes.", "word " * 60, "No.", "Three?", "Yes."), turns("Two?", "No.")]
    with caplog.at_level(logging.INFO):
        selection = select(tmp_path, tokenizer, rows, GIVEN, max_tokens=100, too_long="split")
    lost = len(tokenizer("No.<|im_end|>", add_special_tokens=False)["input_ids"])
    assert (selection.num_shortened, selection.num_lost) == (1, lost)
    assert [row.conversation.id.partition("#")[2] for row in selection.rows] == ["piece-1", "piece-2", ""]
    assert f"1 row cut (prompts.too_long=split), which leaves out {lost} supervised tokens" in caplog.text
    whole = select(tmp_path, tokenizer, rows[1:], GIVEN, max_tokens=100, too_long="split")
    assert (whole.num_shortened, whole.num_lost) == (0, 0)
