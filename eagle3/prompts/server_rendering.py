"""Prompts as a running server renders them, compared with ours token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import requests

from eagle3.config import UserError
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import Conversation
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.templates import as_requested
from eagle3.words import counted

TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class ServerRendering:
    """What a sample of rows showed."""

    num_compared: int
    refused: list[str]  # one sentence for each row that the server does not render
    differences: list[str]  # and for each that it renders otherwise

    def __str__(self) -> str:
        num_same = self.num_compared - len(self.refused) - len(self.differences)
        told = f"the server renders {num_same} of {counted(self.num_compared, 'prompt')} as here"
        if self.differences:
            told += f", {len(self.differences)} otherwise (the first is {self.differences[0]})"
        if self.refused:
            told += f", and refuses {len(self.refused)} (the first is {self.refused[0]}); SGLang takes messages at "
            told += "/tokenize since 0.5.23"
        return told


def compare_with_server(url: str, rows: Iterable[Conversation], renderer: ChatRenderer) -> ServerRendering:
    """Asks a server to tokenize each row's prompt for its last answer, and compares the ids.

    The request is the one that a client sends for an answer; rows without messages, and those that we cannot render
    either, are passed over.

    Raises:
        UserError: the server does not answer, or not as SGLang does.
    """
    refused: list[str] = []
    differences: list[str] = []
    num_compared = 0
    for row in rows:
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        messages = list(row.messages[: answers[-1]] if answers else row.messages)
        try:
            ours = renderer.prompt_ids(messages, row.options) if messages else []
        except RenderingError:
            continue
        if not messages:
            continue
        kwargs = {**renderer.chat_template_kwargs, **row.options.kwargs}
        request = {"messages": as_requested(messages), "chat_template_kwargs": kwargs, "add_generation_prompt": True}
        response = _tokenize(url, request | ({"tools": list(row.options.tools)} if row.options.tools else {}))
        num_compared += 1
        if response.status_code != 200:
            refused.append(f"line {row.line}: {' '.join(response.text.split())[:200]}")
            continue
        theirs = _tokens_of(response, url)
        if theirs != ours:
            at = next((j for j, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), None)
            at = min(len(theirs), len(ours)) if at is None else at
            differences.append(
                f"line {row.line}: token {at} of {len(theirs)} must be as the server has it, {theirs[at : at + 5]}, "
                f"got {ours[at : at + 5]}"
            )
    return ServerRendering(num_compared, refused, differences)


def _tokens_of(response: requests.Response, url: str) -> list[int]:
    try:
        tokens = response.json()["tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"server must answer /tokenize with tokens, got {response.text[:60]!r} ({url}); is it SGLang?"
        ) from error
    assert isinstance(tokens, list), tokens
    return tokens


def _tokenize(url: str, request: dict[str, object]) -> requests.Response:
    try:
        return requests.post(f"{url.rstrip('/')}/tokenize", json=request, timeout=TIMEOUT_SECONDS)
    except requests.RequestException as error:
        raise UserError(f"server must answer, got {type(error).__name__} ({url}); check the address") from error
