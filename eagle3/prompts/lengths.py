"""A row -> samples that fit: too long ones are dropped, cut at a turn, or split.

A cut never stands within an answer: a chain that ends there would learn to stop.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import Conversation, GivenTokens
from eagle3.prompts.rendering import ChatRenderer, Rendered

# Between a row's id and the number of a piece of it; whoever splits samples by their id looks at what is before it.
PIECE = "#piece-"


@dataclass(frozen=True)
class Sample:
    """What becomes of a row, or of a part of it."""

    conversation: Conversation
    rendered: Rendered


def render_row(renderer: ChatRenderer, row: Conversation) -> Rendered:
    """Returns the ids and the mask of a row, whatever its format.

    Raises:
        RenderingError: the template refuses its messages, no exact mask is to be had, or it comes with ids that the
            tokenizer does not have.
    """
    if row.tokens is not None:
        strangest = max(row.tokens.input_ids)
        if strangest >= renderer.num_token_ids:
            raise RenderingError(
                f"input_ids must be the tokenizer's, from 0 to {renderer.num_token_ids - 1}, got {strangest}"
            )
        return Rendered(list(row.tokens.input_ids), list(row.tokens.loss_mask))
    if row.text is not None:
        return renderer.render_text(row.text)
    return renderer.render(row.messages, row.options)


def first_prompt_ids(renderer: ChatRenderer, row: Conversation) -> list[int]:
    """Returns the prompt for a row's first answer, where the target writes the answers.

    Raises:
        RenderingError: the template refuses it.
    """
    first = next(i for i, message in enumerate(row.messages) if message["role"] == "user")
    before = [message for message in row.messages[: first + 1] if message["role"] != "assistant"]
    return renderer.prompt_ids(before, row.options)


def last_prompt_ids(renderer: ChatRenderer, row: Conversation) -> list[int]:
    """Returns the prompt for a row's last answer, every answer before it one character long.

    Raises:
        RenderingError: the template refuses it.
    """
    placed: list[dict[str, Any]] = []
    for message in row.messages:
        if message["role"] == "assistant":
            continue
        if message["role"] == "user" and any(each["role"] == "user" for each in placed):
            placed.append({"role": "assistant", "content": "."})
        placed.append(message)
    while placed[-1]["role"] != "user":
        placed.pop()
    return renderer.prompt_ids(placed, row.options)


def why_prompt_too_long(num_tokens: int, max_tokens: int) -> str | None:
    """Says that a first prompt leaves no room for an answer; None if it does."""
    if num_tokens < max_tokens:
        return None
    return f"prompt must have fewer than {max_tokens} tokens, got {num_tokens}"


def fit(
    renderer: ChatRenderer,
    row: Conversation,
    rendered: Rendered,
    *,
    max_tokens: int,
    too_long: Literal["drop", "truncate", "split"],
) -> list[Sample]:
    """Returns the samples of at most `max_tokens` tokens that a row gives; none if it must be dropped.

    Raises:
        RenderingError: a part of the row cannot be rendered.
    """
    if len(rendered.input_ids) <= max_tokens:
        return [Sample(row, rendered)]
    if too_long == "drop":
        return []
    if not row.messages:
        pieces = _token_pieces(rendered, max_tokens)
        samples = [Sample(replace(row, text=None, tokens=_given(each)), each) for each in pieces]
    elif too_long == "truncate":
        samples = _truncated(renderer, row, max_tokens)
    else:
        samples = _split(renderer, row, max_tokens)
    if too_long == "truncate":
        return samples[:1]
    return [
        replace(sample, conversation=replace(sample.conversation, id=f"{row.id}{PIECE}{number}"))
        for number, sample in enumerate(samples, start=1)
    ]


def _truncated(renderer: ChatRenderer, row: Conversation, max_tokens: int) -> list[Sample]:
    """Keeps the beginning, up to the last answer that fits."""
    ends = [i + 1 for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    for end in reversed(ends):
        shorter = replace(row, messages=row.messages[:end])
        rendered = renderer.render(shorter.messages, shorter.options)
        if len(rendered.input_ids) <= max_tokens:
            return [Sample(shorter, rendered)]
    return []


def _split(renderer: ChatRenderer, row: Conversation, max_tokens: int) -> list[Sample]:
    """Makes conversations of as many whole exchanges as fit; each begins with the system prompt."""
    system = tuple(message for message in row.messages if message["role"] in ("system", "developer"))
    samples: list[Sample] = []
    exchanges: tuple[dict[str, Any], ...] = ()
    for exchange in _exchanges(row):
        longer = _piece(renderer, row, system + exchanges + exchange, max_tokens) if exchanges else None
        if longer is not None:
            samples[-1], exchanges = longer, exchanges + exchange
            continue
        alone = _piece(renderer, row, system + exchange, max_tokens)
        exchanges = exchange if alone is not None else ()
        if alone is not None:
            samples.append(alone)
    return samples


def _piece(
    renderer: ChatRenderer, row: Conversation, messages: tuple[dict[str, Any], ...], max_tokens: int
) -> Sample | None:
    piece = replace(row, messages=messages)
    rendered = renderer.render(messages, row.options)
    is_usable = len(rendered.input_ids) <= max_tokens and any(rendered.loss_mask)
    return Sample(piece, rendered) if is_usable else None


def _exchanges(row: Conversation) -> Iterator[tuple[dict[str, Any], ...]]:
    """Yields each user turn with what follows it up to the next one."""
    exchange: tuple[dict[str, Any], ...] = ()
    for message in row.messages:
        if message["role"] in ("system", "developer"):
            continue
        if message["role"] == "user" and any(each["role"] == "assistant" for each in exchange):
            yield exchange
            exchange = ()
        exchange = (*exchange, message)
    if any(each["role"] == "assistant" for each in exchange):
        yield exchange


def _token_pieces(rendered: Rendered, max_tokens: int) -> list[Rendered]:
    """Cuts ids where no answer is cut in two, unless all of them are one, as raw text is."""
    ids, mask = rendered.input_ids, rendered.loss_mask
    pieces, start = [], 0
    while start < len(ids):
        end = min(start + max_tokens, len(ids))
        if not all(mask):
            while start < end < len(ids) and mask[end - 1] and mask[end]:
                end -= 1
        if end == start:  # an answer that does not fit: nothing of it is kept
            end = next((t for t in range(start, len(ids)) if not mask[t]), len(ids))
        elif any(mask[start:end]):
            pieces.append(Rendered(ids[start:end], mask[start:end]))
        start = end
    return pieces


def _given(rendered: Rendered) -> GivenTokens:
    return GivenTokens(tuple(rendered.input_ids), tuple(rendered.loss_mask))
