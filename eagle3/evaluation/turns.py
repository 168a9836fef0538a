"""Conversations asked turn by turn, each answer becoming the history of the next.

Recorded answers are never shown to the target: a drafter serves the target's own words.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from eagle3.config import EvaluateConfig, UserError
from eagle3.draft.acceptance import AnswerRounds
from eagle3.draft.questions import Question, prompt_digest
from eagle3.features.record import is_held_out
from eagle3.prompts.answers import RenderingError
from eagle3.prompts.conversations import BadRow, Conversation
from eagle3.prompts.loops import is_looping
from eagle3.prompts.rendering import make_renderer
from eagle3.prompts.sources import unread_files
from eagle3.prompts.tokenizers import answer_text
from eagle3.prompts.workers import examine_rows
from eagle3.words import counted

logger = logging.getLogger(__name__)


class HasTokenIds(Protocol):
    """An answer, whoever gave it."""

    @property
    def token_ids(self) -> list[int]:
        """What was emitted."""
        ...


AnswerType = TypeVar("AnswerType", bound=HasTokenIds)


@dataclass(frozen=True)
class AnsweredTurn(Generic[AnswerType]):
    """A user turn, as the target read it, and what came back."""

    sample_id: str  # the conversation's
    prompt_ids: list[int]  # up to and including the prompt for the answer
    answer: AnswerType


def select_conversations(config: EvaluateConfig) -> list[Conversation]:
    """Reads the prompts and keeps those that the config asks for; rows that cannot be used are counted in the log.

    Copies and measured questions are left out as in extraction, so that the same settings hold out the same rows.

    Raises:
        UserError: no file is named, nothing is left, or a row is bad and prompts.fail_on_bad_row is set.
    """
    if config.prompts.path is None:
        raise UserError("prompts.path must name a file, got null; set it in the config or as prompts.path=FILE")
    kept: list[Conversation] = []
    bad_rows: list[BadRow] = []
    num_read = 0
    for read in (examined.row for examined in examine_rows(config.prompts, _render_nothing, keep_rows=True)):
        num_read += 1
        problem = None if isinstance(read, BadRow) else read.why_not_answerable()
        row = read if problem is None else BadRow(read.line, problem, read.file)
        if isinstance(row, BadRow):
            bad_rows.append(row)
            if config.prompts.fail_on_bad_row and not row.is_left_out_on_purpose:
                raise UserError(f"{row.reason} ({config.prompts.path}, line {row.line})")
        elif config.held_out_share is None or is_held_out(row.id, config.held_out_share):
            kept.append(row)
    for name in unread_files(config.prompts.path):
        logger.info("prompts: %s is in no form that is read, and left out", name)
    if bad_rows:
        logger.warning(
            "%d of %s cannot be used; the first is line %d: %s",
            len(bad_rows), counted(num_read, "row"), bad_rows[0].line, bad_rows[0].reason,
        )  # fmt: skip
    if not kept:
        raise UserError(
            f"prompts must leave at least one conversation, got none of {counted(num_read, 'row')} ({len(bad_rows)} "
            f"bad, held_out_share {config.held_out_share}; {config.prompts.path}); change the file or the share"
        )
    return kept[: config.max_prompts]


def _render_nothing() -> Callable[[Conversation], None]:
    """Turns are rendered one by one, each when the answers before it are known."""
    return _no_facts


def _no_facts(row: Conversation) -> None:
    return None


@dataclass
class _Dialogue:
    """A conversation in progress."""

    conversation: Conversation
    history: list[dict[str, Any]] = field(default_factory=list)
    num_read: int = 0  # messages of the conversation that are behind us

    def advance_to_next_question(self) -> bool:
        """Takes over the messages up to the next user turn; False when there is none."""
        for message in self.conversation.messages[self.num_read :]:
            self.num_read += 1
            if message["role"] != "assistant":
                self.history.append(message)
            if message["role"] == "user":
                return True
        return False


def ask_all(
    conversations: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    config: EvaluateConfig,
    answer: Callable[[list[list[int]]], list[AnswerType]],
    end_ids: frozenset[int],
) -> list[AnsweredTurn[AnswerType]]:
    """Asks the first turns of all conversations, then the second ones, and so on.

    `answer` maps prompts to answers, which end with one of `end_ids` or at a token limit. A conversation ends
    early where it no longer fits prompts.max_tokens or the template; both are counted in the log.

    Raises:
        UserError: no turn could be asked.
    """
    renderer = make_renderer(tokenizer, config.prompts)
    dialogues = [_Dialogue(conversation) for conversation in conversations]
    answered: list[AnsweredTurn[AnswerType]] = []
    dropped: list[str] = []
    while dialogues := [dialogue for dialogue in dialogues if dialogue.advance_to_next_question()]:
        asked: list[tuple[_Dialogue, list[int]]] = []
        for dialogue in dialogues:
            where = f"line {dialogue.conversation.line}"
            try:
                prompt_ids = renderer.prompt_ids(dialogue.history, dialogue.conversation.options)
            except RenderingError as error:
                dropped.append(f"{where}: {error}")
                continue
            if len(prompt_ids) > config.prompts.max_tokens:
                dropped.append(f"{where}: {len(prompt_ids)} tokens, more than prompts.max_tokens")
                continue
            asked.append((dialogue, prompt_ids))
        answers = answer([prompt_ids for _, prompt_ids in asked]) if asked else []
        for (dialogue, prompt_ids), given in zip(asked, answers, strict=True):
            answered.append(AnsweredTurn(dialogue.conversation.id, prompt_ids, given))
            finished = not end_ids.isdisjoint(given.token_ids[-1:])
            text = answer_text(tokenizer, given.token_ids, finished=finished)
            dialogue.history.append({"role": "assistant", "content": text})
        dialogues = [dialogue for dialogue, _ in asked]
    if dropped:
        logger.warning("%s ended early; the first at %s", counted(len(dropped), "conversation"), dropped[0])
    if not answered:
        raise UserError(
            f"at least one prompt must be askable, got none of {len(conversations)} ({config.prompts.path}); "
            f"the first: {dropped[0]}"
        )
    return answered


def asked(
    turns: Sequence[AnsweredTurn[AnswerType]], answers: Sequence[list[int]], rounds: Sequence[AnswerRounds]
) -> list[Question]:
    """Joins turns with the token ids of their answers, which may be another drafter's, and what those counted."""
    first_prompts: dict[str, list[int]] = {}
    for turn in turns:
        first_prompts.setdefault(turn.sample_id, turn.prompt_ids)
    return [
        Question(prompt_digest(first_prompts[turn.sample_id]), is_looping(token_ids), counted)
        for turn, token_ids, counted in zip(turns, answers, rounds, strict=True)
    ]
