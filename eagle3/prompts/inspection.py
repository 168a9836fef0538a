"""What a prompts file holds, and what of it is dropped and why."""

import json
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from eagle3.config import PromptsConfig
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.lengths import first_prompt_ids, fit, last_prompt_ids, render_row, why_prompt_too_long
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.workers import Examined

EXAMPLES = 3  # of rows dropped for one kind of reason


@dataclass(frozen=True)
class RowFacts:
    """One row, counted: with the answers that it has, and as a question that the target answers anew."""

    num_tokens: int = 0  # of the whole row, however long; of prompts alone, up to where the last answer begins
    num_supervised: int = 0
    num_lost: int = 0  # supervised tokens that are in none of the samples of a row that is cut
    num_samples: int = 0  # that it gives: 0 if it is too long
    num_context: int = 0  # answers that stand there as later turns see them
    num_thoughts_dropped: int = 0
    has_calls: bool = False
    supervised: bytes = b""  # ids of the supervised tokens, int32
    run_lengths: tuple[int, ...] = ()  # of the answers among them
    why_not_rendered: str | None = None  # with its answers
    why_not_asked: str | None = None


@dataclass
class Findings:
    """All rows, counted; filled in as they come."""

    num_rows: int = 0
    num_accepted: int = 0
    num_samples: int = 0
    num_prompts_only: int = 0
    num_shortened: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_lost: int = 0
    num_context: int = 0
    num_thoughts_dropped: int = 0
    num_with_calls: int = 0
    num_asked: int = 0  # rows that the target can answer anew
    not_asked: list[BadRow] = field(default_factory=list)  # the first of the others
    num_not_asked: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)  # rows of each of several
    domains: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # by the power of two at or above
    dropped: Counter[str] = field(default_factory=Counter)  # by kind
    examples: dict[str, list[BadRow]] = field(default_factory=dict)  # the first of each kind

    def add(self, examined: Examined[RowFacts], max_tokens: int) -> BadRow | None:
        """Counts one row, and returns why it is dropped, if it is."""
        self.num_rows += 1
        row, facts = examined.row, examined.result
        if row.file is not None:
            self.files[row.file] += 1
        if isinstance(row, Conversation):
            assert facts is not None, row
            self.formats[row.format] += 1
            self._add_asked(row, facts)
            row = self._dropped(row, facts, max_tokens) or row
        if isinstance(row, BadRow):
            self.dropped[row.kind] += 1
            examples = self.examples.setdefault(row.kind, [])
            if len(examples) < EXAMPLES:
                examples.append(row)
            return row
        assert facts is not None, row
        self.num_accepted += 1
        self.num_samples += facts.num_samples
        self.num_prompts_only += facts.num_supervised == 0
        self.num_shortened += facts.num_supervised > 0 and facts.num_tokens > max_tokens
        self.num_tokens += facts.num_tokens
        self.num_supervised += facts.num_supervised
        self.num_lost += facts.num_lost
        self.num_context += facts.num_context
        self.num_thoughts_dropped += facts.num_thoughts_dropped
        self.num_with_calls += facts.has_calls
        self.domains[row.domain or "-"] += 1
        return None

    def _add_asked(self, row: Conversation, facts: RowFacts) -> None:
        self.num_asked += facts.why_not_asked is None
        self.num_not_asked += facts.why_not_asked is not None
        if facts.why_not_asked is not None and not self.not_asked:
            self.not_asked.append(BadRow(row.line, facts.why_not_asked, row.file))

    def _dropped(self, row: Conversation, facts: RowFacts, max_tokens: int) -> BadRow | None:
        if facts.why_not_rendered is not None:
            return BadRow(row.line, facts.why_not_rendered, row.file, "not rendered")
        self.lengths[_power_of_two(facts.num_tokens)] += 1
        if facts.num_samples == 0:
            reason = facts.why_not_asked if facts.num_supervised == 0 else None
            reason = reason or f"row must have at most {max_tokens} tokens, got {facts.num_tokens}"
            return BadRow(row.line, reason, row.file, "too long")
        return None


def make_examine(renderer: ChatRenderer, config: PromptsConfig) -> Callable[[Conversation], RowFacts]:
    """Returns the function that renders and counts a row; for `examine_rows`."""
    return partial(_examine, renderer, config)


def examine_characters() -> Callable[[Conversation], RowFacts]:
    """Returns the function that counts a row's characters, where there is no tokenizer; of given ids, the ids."""
    return _count_characters


def calls_of(message: dict[str, object]) -> str:
    """Returns the calls of a message as JSON; nothing where there are none."""
    calls = message.get("tool_calls")
    return json.dumps(calls, ensure_ascii=False) if calls else ""


def _count_characters(row: Conversation) -> RowFacts:
    parts = [
        (message["role"] == "assistant", message.get("reasoning_content", "") + message["content"] + calls_of(message))
        for message in row.messages
    ]
    sizes = [(is_answer, len(text)) for is_answer, text in parts]
    if row.text is not None:
        sizes.append((True, len(row.text)))
    if row.tokens is not None:
        sizes += [(counts, 1) for counts in row.tokens.loss_mask]
    return RowFacts(
        num_tokens=sum(size for _, size in sizes),
        num_supervised=sum(size for is_answer, size in sizes if is_answer),
        num_samples=1,
        has_calls=any("tool_calls" in message for message in row.messages),
        why_not_asked=row.why_not_answerable(),
    )


def _examine(renderer: ChatRenderer, config: PromptsConfig, row: Conversation) -> RowFacts:
    if row.messages and not any(message["role"] == "assistant" for message in row.messages):
        return _examine_prompts(renderer, config, row)
    try:
        rendered = render_row(renderer, row)
        samples = fit(renderer, row, rendered, max_tokens=config.max_tokens, too_long=config.too_long)
    except RenderingError as error:
        return RowFacts(why_not_rendered=str(error), why_not_asked=_why_not_asked(renderer, config, row))
    supervised, run_lengths = array("i"), list[int]()
    for sample in samples:
        pairs = zip(sample.rendered.input_ids, sample.rendered.loss_mask, strict=True)
        for counts, run in groupby(pairs, key=lambda pair: pair[1]):
            if counts:
                ids = [token for token, _ in run]
                supervised.extend(ids)
                run_lengths.append(len(ids))
    is_whole = len(rendered.input_ids) <= config.max_tokens
    num_in_row = sum(rendered.loss_mask)
    return RowFacts(
        num_tokens=len(rendered.input_ids),
        num_supervised=len(supervised) if samples else num_in_row,
        num_lost=max(0, num_in_row - len(supervised)),
        num_samples=len(samples),
        num_context=rendered.num_context,
        num_thoughts_dropped=rendered.num_thoughts_dropped,
        has_calls=any("tool_calls" in message for message in row.messages),
        supervised=supervised.tobytes(),
        run_lengths=tuple(run_lengths),
        # A row that fits with its answers fits without them, and its prompts have been rendered.
        why_not_asked=row.why_not_answerable() if is_whole else _why_not_asked(renderer, config, row),
    )


def _examine_prompts(renderer: ChatRenderer, config: PromptsConfig, row: Conversation) -> RowFacts:
    why_not_asked = row.why_not_answerable()
    try:
        num_first = len(first_prompt_ids(renderer, row))
        num_tokens = len(last_prompt_ids(renderer, row))
    except RenderingError as error:
        return RowFacts(why_not_rendered=str(error), why_not_asked=why_not_asked or str(error))
    why_not_asked = why_not_asked or why_prompt_too_long(num_first, config.max_tokens)
    return RowFacts(num_tokens=num_tokens, num_samples=int(why_not_asked is None), why_not_asked=why_not_asked)


def _why_not_asked(renderer: ChatRenderer, config: PromptsConfig, row: Conversation) -> str | None:
    """Says why the target cannot answer a row anew; None if it can."""
    problem = row.why_not_answerable()
    if problem is not None:
        return problem
    try:
        return why_prompt_too_long(len(first_prompt_ids(renderer, row)), config.max_tokens)
    except RenderingError as error:
        return str(error)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
