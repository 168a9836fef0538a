"""Answers that the target has written, kept beside the store until their features are in it.

Features reach the disk a shard at a time, answers a chunk at a time: a kill costs no answer twice, and a chunk is
answered again with the same batch mates or not at all, so that a resumed run has the same ids.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eagle3.capture.engine import Engine, SetAside
from eagle3.capture.generation import Generation
from eagle3.capture.interrupts import Interrupts
from eagle3.capture.progress import ExtractionReport, LiveProgress
from eagle3.capture.regenerate import Answered, answer_conversations
from eagle3.capture.target import Target
from eagle3.config import RegenerateConfig, UserError
from eagle3.features.manifest import ANSWERS_NAME
from eagle3.prompts.conversations import BadRow, Conversation

CHUNK_BATCHES = 4  # of answers, between two writes of the log: a kill loses at most these


class AnswerLog:
    """One line per answered conversation; owns the file."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Opens the log of a store's directory; a line that a kill cut short goes, or is passed over with `read_only`.

        Raises:
            UserError: another line is damaged.
        """
        self._path = path / ANSWERS_NAME
        flags = os.O_RDONLY if read_only else os.O_CREAT | os.O_RDWR
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "rb" if read_only else "r+b")
        self._offsets: dict[str, int] = {}  # of the lines: token ids of a long run do not stay in memory
        offset = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                if not read_only:
                    self._file.truncate(offset)
                break
            try:
                self._offsets[json.loads(line)["sample_id"]] = offset
            except (ValueError, TypeError, KeyError) as error:
                raise self._damaged(offset, error) from error
            offset += len(line)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._offsets

    def read(self, conversation: Conversation) -> Answered | BadRow:
        """Returns what a logged conversation was answered with, or why it was not."""
        self._file.seek(self._offsets[conversation.id])
        values = json.loads(self._file.readline())
        if "reason" in values:
            return BadRow(conversation.line, values["reason"])
        try:
            return Answered(**{**values, "spans": [tuple(span) for span in values["spans"]]})
        except (TypeError, KeyError) as error:
            raise self._damaged(self._offsets[conversation.id], error) from error

    def append(self, conversations: Sequence[Conversation], results: Sequence[Answered | BadRow]) -> None:
        """Adds a chunk, down to the disk."""
        offset = self._file.seek(0, os.SEEK_END)
        for conversation, result in zip(conversations, results, strict=True):
            values = asdict(result) if isinstance(result, Answered) else {"reason": result.reason}
            line = json.dumps({"sample_id": conversation.id, **values}).encode() + b"\n"
            self._file.write(line)
            self._offsets[conversation.id] = offset
            offset += len(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _damaged(self, offset: int, error: Exception) -> UserError:
        return UserError(
            f"every line of {ANSWERS_NAME} must be an answer as it was written, got {error!r} at byte {offset} "
            f"({self._path}); restore it from a copy, or delete it: what is not stored yet is answered again"
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Answerer:
    """Has the target answer conversations chunk after chunk, logs each chunk, and counts what comes of it."""

    def __init__(
        self,
        settings: RegenerateConfig,
        engine: Engine,
        target: Target,
        log: AnswerLog,
        *,
        report: ExtractionReport,
        progress: LiveProgress,
        interrupts: Interrupts,
        max_tokens: int,
    ) -> None:
        """Prompt and answers together have at most `max_tokens`."""
        self._settings = settings
        self._engine = engine
        self._target = target
        self._log = log
        self._report = report
        self._progress = progress
        self._interrupts = interrupts
        self._max_tokens = max_tokens
        # Chunks are those of the file, whatever is done already: an answer keeps its batch mates, and with them its
        # rounding, when a run is resumed.
        self.chunk_size = CHUNK_BATCHES * engine.num_answers_together(settings)

    def answers(self, chunk: Sequence[Conversation]) -> list[Answered | BadRow]:
        """Returns the answers of a chunk, which are asked for unless all are logged."""
        target, report = self._target, self._report
        if not all(conversation.id in self._log for conversation in chunk):
            answered = answer_conversations(chunk, target.renderer, target.tokenizer, self._generate, self._max_tokens)
            with self._interrupts.held():
                self._log.append(chunk, answered)
        results = [self._log.read(conversation) for conversation in chunk]
        for result in results:
            if isinstance(result, BadRow):
                report.num_bad_rows += 1
            else:
                report.num_unfinished += result.num_unfinished
                report.num_looped += result.num_looped
                report.num_reencoded += result.num_reencoded
                report.num_turns_dropped += result.num_turns_dropped
        return results

    def _generate(self, prompts: list[list[int]]) -> Sequence[Generation | SetAside]:
        def count(num_tokens: int) -> None:
            self._report.num_generated += num_tokens
            self._report.generation_seconds = before + time.monotonic() - started
            self._progress.show()

        before, started = self._report.generation_seconds, time.monotonic()
        return self._engine.generate(prompts, self._settings, max_tokens=self._max_tokens, on_tokens=count)
