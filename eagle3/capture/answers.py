"""Answers that the target has written, kept beside the store until their features are in it.

Features reach the disk a shard at a time, answers a chunk at a time: a kill costs no answer twice, and a chunk is
answered again with the same batch mates or not at all, so that a resumed run has the same ids.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eagle3.capture.regenerate import Answered
from eagle3.config import UserError
from eagle3.prompts.conversations import BadRow, Conversation

ANSWERS_NAME = "answers.jsonl"


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
