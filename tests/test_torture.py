"""Every row of the torture file comes out as its line in torture_expected.jsonl says.

What is expected of a row: the text of each supervised run, end token included, or a pattern of the reason for which it
is refused; `template` where it is not Qwen 2.5's.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template_text
from test_templates import runs_of

from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import BadRow, Conversation, read_conversations
from eagle3.prompts.lengths import render_row
from eagle3.prompts.rendering import ChatRenderer

HERE = Path(__file__).resolve().parent
EXPECTED: list[dict[str, Any]] = [
    json.loads(line) for line in (HERE / "torture_expected.jsonl").read_text().splitlines()
]
FAMILIES = {"qwen2.5": "qwen", "qwen3": "qwen", "deepseek-r1": "deepseek", "gemma3": "gemma"}


@pytest.fixture(scope="module")
def rows() -> list[Conversation | BadRow]:
    return list(read_conversations(HERE / "torture.jsonl", max_row_bytes=16384))


def test_every_line_has_an_outcome(rows: list[Conversation | BadRow]) -> None:
    assert len(rows) == len(EXPECTED) >= 60
    assert [row.line for row in rows] == [each["line"] for each in EXPECTED]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: expected["about"])
def test_row(rows: list[Conversation | BadRow], expected: dict[str, Any]) -> None:
    row = rows[expected["line"] - 1]
    template = expected.get("template", "qwen2.5")
    if "reason" in expected and expected.get("stage") != "render":
        assert isinstance(row, BadRow), row
        assert re.search(expected["reason"], row.reason), row.reason
        return
    assert isinstance(row, Conversation), row
    tokenizer = family_tokenizer(FAMILIES[template], template_text(template))
    renderer = ChatRenderer(tokenizer, {})
    if "reason" in expected:
        with pytest.raises(RenderingError, match=expected["reason"]):
            render_row(renderer, row)
        return
    rendered = render_row(renderer, row)
    runs = [rendered.input_ids[start:end] for start, end in runs_of(rendered)]
    if "supervised_ids" in expected:
        assert runs == expected["supervised_ids"]
    else:
        texts = [str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in runs]
        assert texts == expected["supervised"]
    assert rendered.num_context == expected.get("num_context", 0)
    for name in ("format", "domain"):
        if name in expected:
            assert getattr(row, name) == expected[name]
