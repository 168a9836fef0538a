"""A server that renders otherwise is told, row by row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template_text
from json_servers import Reply, json_server

from eagle3.config import UserError
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.server_rendering import compare_with_server
from eagle3.prompts.templates import TemplateOptions

TOKENIZER = family_tokenizer("qwen", template_text("qwen3"))
RENDERER = ChatRenderer(TOKENIZER, {"enable_thinking": False})
TOOLS = ({"type": "function", "function": {"name": "add"}},)
ROWS = [
    Conversation(
        id=str(line),
        messages=({"role": "user", "content": f"Question {line}?"}, {"role": "assistant", "content": "So."}),
        line=line,
        options=TemplateOptions(TOOLS if line == 2 else (), {"enable_thinking": True} if line == 3 else {}),
    )
    for line in (1, 2, 3)
]


@contextmanager
def tokenizing_server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[str]:
    def post(path: str, body: dict[str, Any]) -> Reply:
        assert path == "/tokenize"
        return answer(body)

    with json_server(post) as url:
        yield f"{url}/"


def rendered(request: dict[str, Any]) -> list[int]:
    """What transformers makes of a request, as SGLang calls it."""
    encoded: Any = TOKENIZER.apply_chat_template(
        request["messages"],
        tools=request.get("tools"),
        add_generation_prompt=request["add_generation_prompt"],
        **request["chat_template_kwargs"],
    )
    return list(encoded["input_ids"])


def test_a_server_that_renders_the_same_agrees() -> None:
    with tokenizing_server(lambda request: (200, {"tokens": rendered(request)})) as url:
        seen = compare_with_server(url, ROWS, RENDERER)
    assert (seen.num_compared, seen.refused, seen.differences) == (3, [], [])
    assert str(seen) == "the server renders 3 of 3 prompts as here"


def test_rows_that_a_server_renders_otherwise_name_the_token() -> None:
    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        if "tools" in request:
            return 400, {"message": "no tools here"}
        tokens = rendered(request)
        return 200, {"tokens": [*tokens[:4], 9, *tokens[5:]] if "1" in request["messages"][0]["content"] else tokens}

    with tokenizing_server(answer) as url:
        seen = compare_with_server(url, [*ROWS, Conversation(id="t", messages=(), line=9, text="raw")], RENDERER)
    assert (seen.num_compared, len(seen.refused), len(seen.differences)) == (3, 1, 1)
    assert seen.differences[0].startswith("line 1: token 4 of ")
    assert "must be as the server has it, [9, " in seen.differences[0]
    assert seen.refused == ['line 2: {"message": "no tools here"}']
    assert str(seen).startswith("the server renders 1 of 3 prompts as here, 1 otherwise (the first is ")
    assert str(seen).endswith('no tools here"}); SGLang takes messages at /tokenize since 0.5.23')


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"server must answer, got .* \(http://127\.0\.0\.1:9\); check the address"):
        compare_with_server("http://127.0.0.1:9", ROWS, RENDERER)


@pytest.mark.parametrize("body", [[], {"count": 3}, "hello"])
def test_a_server_that_answers_otherwise_is_named(body: Any) -> None:
    with (
        tokenizing_server(lambda request: (200, body)) as url,
        pytest.raises(UserError, match=r"server must answer /tokenize with tokens, got .* \(http.*\); is it SGLang\?"),
    ):
        compare_with_server(url, ROWS, RENDERER)


def test_a_weight_is_not_sent() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        asked.extend(request["messages"])
        return 200, {"tokens": rendered(request)}

    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}) * 2
    with tokenizing_server(answer) as url:
        seen = compare_with_server(url, [Conversation(id="a", messages=messages, line=1)], RENDERER)
    assert (seen.num_compared, seen.refused, seen.differences) == (1, [], [])
    assert [set(message) for message in asked] == [{"role", "content"}] * 3
