"""What a prompts file holds, and what of it is dropped and why."""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from eagle3.config import PromptsConfig
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.lengths import fit, render_row
from eagle3.prompts.rendering import ChatRenderer
from eagle3.prompts.workers import Examined

EXAMPLES = 3  # of rows dropped for one kind of reason


@dataclass(frozen=True)
class RowFacts:
    """One row, counted."""

    num_tokens: int  # of the whole row, however long
    num_supervised: int
    num_samples: int  # that it gives: 0 if it is too long
    num_context: int  # answers that stand there as later turns see them
    num_thoughts_dropped: int
    has_calls: bool
    supervised: bytes  # ids of the supervised tokens, int32


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
    num_context: int = 0
    num_thoughts_dropped: int = 0
    num_with_calls: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # by the power of two at or above
    dropped: Counter[str] = field(default_factory=Counter)  # by kind
    examples: dict[str, list[BadRow]] = field(default_factory=dict)  # the first of each kind

    def add(self, examined: Examined[RowFacts], max_tokens: int) -> BadRow | None:
        """Counts one row, and returns why it is dropped, if it is."""
        self.num_rows += 1
        row, facts = examined.row, examined.result
        if isinstance(row, Conversation):
            self.formats[row.format] += 1
            assert facts is not None, row
            self.lengths[_power_of_two(facts.num_tokens)] += 1
            if facts.num_samples == 0:
                reason = f"row must have at most {max_tokens} tokens, got {facts.num_tokens}"
                row = BadRow(row.line, reason, row.file, "too long")
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
        self.num_shortened += facts.num_tokens > max_tokens
        self.num_tokens += facts.num_tokens
        self.num_supervised += facts.num_supervised
        self.num_context += facts.num_context
        self.num_thoughts_dropped += facts.num_thoughts_dropped
        self.num_with_calls += facts.has_calls
        self.domains[row.domain or "-"] += 1
        return None


def make_examine(renderer: ChatRenderer, config: PromptsConfig) -> Callable[[Conversation], RowFacts]:
    """Returns the function that renders and counts a row; for `examine_rows`."""
    return partial(_examine, renderer, config)


def examine_characters() -> Callable[[Conversation], RowFacts]:
    """Returns the function that counts a row's characters, where there is no tokenizer."""
    return _count_characters


def _count_characters(row: Conversation) -> RowFacts:
    contents = [(message["role"] == "assistant", len(message["content"])) for message in row.messages]
    if row.text is not None:
        contents.append((True, len(row.text)))
    return RowFacts(
        num_tokens=sum(size for _, size in contents),
        num_supervised=sum(size for is_answer, size in contents if is_answer),
        num_samples=1,
        num_context=0,
        num_thoughts_dropped=0,
        has_calls=any("tool_calls" in message for message in row.messages),
        supervised=b"",
    )


def _examine(renderer: ChatRenderer, config: PromptsConfig, row: Conversation) -> RowFacts:
    rendered = render_row(renderer, row)
    samples = fit(renderer, row, rendered, max_tokens=config.max_tokens, too_long=config.too_long)
    supervised = array("i")
    for sample in samples:
        supervised.extend(compress(sample.rendered.input_ids, sample.rendered.loss_mask))
    return RowFacts(
        num_tokens=len(rendered.input_ids),
        num_supervised=len(supervised) if samples else sum(rendered.loss_mask),
        num_samples=len(samples),
        num_context=rendered.num_context,
        num_thoughts_dropped=rendered.num_thoughts_dropped,
        has_calls=any("tool_calls" in message for message in row.messages),
        supervised=supervised.tobytes(),
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
