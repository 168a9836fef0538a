"""Rows that say what another row or a question set says, found by the runs of words that they share."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from eagle3.config import UserError
from eagle3.prompts.conversations import MAX_ROW_BYTES, BadRow, Conversation, parse_row
from eagle3.prompts.hashes import Places, SeenHashes
from eagle3.prompts.sources import find_sources, read_rows

# Scripts without spaces count by characters.
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
QUESTION_WORDS = 10  # in a row: shorter runs are shared by unrelated texts
SHINGLE_WORDS = 5
# Of two texts that share the share s of their shingles, 1 - (1 - s ** 12) ** 8 are found: 0.2 % at 0.5, 43 % at 0.8,
# 93 % at 0.9, all but 0.2 % at 0.95.
NUM_BANDS, BAND_ROWS = 8, 12


def words_of(text: str) -> list[str]:
    """Returns the words of a text, without case and punctuation."""
    return _WORD.findall(text.casefold())


class QuestionSets:
    """The questions that a drafter is measured on, by their runs of ten words; shorter ones as a whole."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Reads question sets in any format of prompts.

        Raises:
            UserError: one cannot be read, has a row that cannot, or has no question.
        """
        self._runs: dict[int, str] = {}  # hash of a run -> the set that has it
        self._whole: dict[int, str] = {}
        for path in paths:
            before = len(self._runs) + len(self._whole)
            try:
                sources = find_sources(path)
            except UserError as error:
                raise UserError(f"prompts.exclude must name question sets that can be read: {error}") from None
            for row in map(parse_row, read_rows(sources, MAX_ROW_BYTES)):
                if isinstance(row, BadRow):
                    raise UserError(
                        f"every row of a question set must be readable, got one that is not: {row.reason} "
                        f"({row.file or path}, line {row.line}); correct it, or take the set out of prompts.exclude"
                    )
                for words in map(words_of, _asked(row)):
                    if len(words) < QUESTION_WORDS:
                        self._whole[_hashed(words)] = Path(path).name
                    for run in _runs(words, QUESTION_WORDS):
                        self._runs[run] = Path(path).name
            if len(self._runs) + len(self._whole) == before:
                raise UserError(f"a question set must have questions, got none ({path!r}); check prompts.exclude")

    def why_excluded(self, row: Conversation) -> str | None:
        """Says which question set a row has a question of, or that it cannot be told; None if it has none."""
        if row.tokens is not None and (self._runs or self._whole):
            return "row must have text to be compared with the questions that are measured, got token ids"
        for text in _asked(row) if self._runs or self._whole else ():
            words = words_of(text)
            if len(words) < QUESTION_WORDS:
                found = self._whole.get(_hashed(words))
            else:
                found = next((self._runs[run] for run in _runs(words, QUESTION_WORDS) if run in self._runs), None)
            if found is not None:
                return f"row must be none of the questions that are measured, got one of {found}"
        return None


class NearDuplicates:
    """Finds rows whose questions are almost those of an earlier row; 170 to 340 bytes of each row stay in memory."""

    def __init__(self) -> None:
        self._seen = SeenHashes()
        self._places = Places()

    def why_duplicate(self, bands: bytes, row: Conversation) -> str | None:
        """Says which line a row repeats, by its `signature`; None if none."""
        place = self._places.number(row.line, row.file)
        places = [self._seen.first_place(int(band), place) for band in np.frombuffer(bands, dtype=np.uint64)]
        found = [each for each in places if each is not None and each != place]
        return f"row must be unlike the ones before it, got almost {self._places.shown(min(found))}" if found else None


def signature(row: Conversation) -> bytes:
    """Returns NUM_BANDS hashes of 64 bits; rows whose questions share most of their words share one of them.

    Of a row that comes tokenised, the ids are the words.
    """
    words = words_of("\n".join(_asked(row))) if row.tokens is None else [str(token) for token in row.tokens.input_ids]
    shingles = np.fromiter(_runs(words, SHINGLE_WORDS) if len(words) >= SHINGLE_WORDS else [_hashed(words)], np.uint64)
    factors, offsets = _mixers()
    with np.errstate(over="ignore"):
        mixed = shingles[:, None] * (2 * factors + 1) + offsets  # (shingles, bands * rows), modulo 2**64
    smallest = (mixed ^ (mixed >> np.uint64(32))).min(axis=0).reshape(NUM_BANDS, BAND_ROWS)
    bands = [xxhash.xxh3_64_intdigest(band.tobytes(), seed=i) for i, band in enumerate(smallest)]
    return np.array(bands, dtype=np.uint64).tobytes()


@cache
def _mixers() -> np.ndarray:
    """Returns the factors and offsets of the hash functions, always the same."""
    return np.random.default_rng(0).integers(1, 2**63, (2, NUM_BANDS * BAND_ROWS), dtype=np.uint64)


def _asked(row: Conversation) -> list[str]:
    if row.text is not None:
        return [row.text]
    return [message["content"] for message in row.messages if message["role"] == "user"]


def _runs(words: list[str], length: int) -> Iterator[int]:
    for start in range(len(words) - length + 1):
        yield _hashed(words[start : start + length])


def _hashed(words: list[str]) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(words).encode())
