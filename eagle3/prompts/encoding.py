"""Text -> ids in one pass, with the token that begins at a character.

Tokenizers cut text at their added tokens before anything else, so the pieces between are encoded one by one, and those
that every row has (`assistant\\n`, a default system prompt) only once. A tokenizer that does otherwise, or that is not
a fast one, encodes the whole text as one piece.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

CACHED_CHARS = 2000  # longer pieces are some row's own
# Added tokens between these show whether a tokenizer cuts there: spaces and line ends are what others attach.
PROBES = ("a", " a", "a ", "\n\na", "a\n", "  ", "1 2", "\u4f60\u597d")


class _Piece(NamedTuple):  # ten of a row: a frozen dataclass takes three times as long to make
    start: int  # its first character in the text
    text: str
    ids: Sequence[int]
    first_token: int  # its place among all ids


class Encoded:
    """A text with its ids."""

    def __init__(self, encoder: "Encoder", pieces: list[_Piece]) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self.ids = [token for piece in pieces for token in piece.ids]

    def token_at(self, position: int) -> int | None:
        """Returns how many ids stand for the characters before `position`; None if a token stands across it.

        Those ids are also what the characters before it encode to by themselves: a server that is prompted with
        them sends the same ones.
        """
        for piece in self._pieces:
            if position <= piece.start + len(piece.text):
                if position == piece.start + len(piece.text):
                    return piece.first_token + len(piece.ids)
                ids = self._encoder.piece_ids(piece.text[: position - piece.start])
                is_beginning = list(piece.ids[: len(ids)]) == list(ids)
                return piece.first_token + len(ids) if is_beginning else None
        return None


class Encoder:
    """Encodes text that writes its special tokens itself, as a rendered template does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        added = {
            token.content: i
            for i, token in tokenizer.added_tokens_decoder.items()
            if not (token.lstrip or token.rstrip or token.single_word or token.normalized) and token.content
        }
        # Leftmost, then longest, as the tokenizers library matches them.
        pattern = "|".join(re.escape(text) for text in sorted(added, key=lambda text: (-len(text), text)))
        self._added_ids = added
        self._added_pattern = re.compile(pattern) if added else None
        # Slow tokenizers of others take no such argument, or fall back to code that splits otherwise (Kimi's).
        self._adds_nothing = not tokenizer.is_fast and list(tokenizer.encode("a")) == list(
            tokenizer.encode("a", add_special_tokens=False)
        )
        self._cached_ids = lru_cache(maxsize=4096)(self._fresh_ids)
        if self._added_pattern is not None and not self._cuts_at_added_tokens():
            self._added_pattern = None

    def encode(self, text: str) -> Encoded:
        """Encodes a text as the tokenizer encodes it, without tokens around it."""
        pieces: list[_Piece] = []
        position = num_ids = 0
        for match in self._added_pattern.finditer(text) if self._added_pattern else ():
            if match.start() > position:
                piece_text = text[position : match.start()]
                pieces.append(_Piece(position, piece_text, self.piece_ids(piece_text), num_ids))
                num_ids += len(pieces[-1].ids)
            pieces.append(_Piece(match.start(), match[0], (self._added_ids[match[0]],), num_ids))
            num_ids += 1
            position = match.end()
        if position < len(text):
            pieces.append(_Piece(position, text[position:], self.piece_ids(text[position:]), num_ids))
        return Encoded(self, pieces)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids with its control tokens, and without the clean-up that is for display."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def piece_ids(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text by itself."""
        return self._cached_ids(text) if len(text) <= CACHED_CHARS else self._fresh_ids(text)

    def _fresh_ids(self, text: str) -> tuple[int, ...]:
        if self._backend is not None:
            # transformers leaves there what its last call asked for; its own call per text costs as much as the text.
            if self._backend.truncation is not None:
                self._backend.no_truncation()
            if self._backend.padding is not None:
                self._backend.no_padding()
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return tuple(encoding.ids)
        if self._adds_nothing:
            return tuple(self._tokenizer.encode(text))
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _cuts_at_added_tokens(self) -> bool:
        """Tells whether pieces encoded apart are the whole, by trying it."""
        tokens = sorted(self._added_ids)[:4]
        texts = [
            first + token + second + token + token + first for token in tokens for first in PROBES for second in PROBES
        ]
        return self._tokenizer.is_fast and all(
            self.encode(text).ids == self._tokenizer.encode(text, add_special_tokens=False) for text in texts
        )
