"""A set of 64-bit hashes with the place of each, in 21 to 43 bytes an entry."""

from array import array

MAX_LINES = 2**44  # of one file, so that the lines of a million files have numbers of 64 bits


class SeenHashes:
    """An open hash table; doubles when it is three quarters full."""

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 * 1024))  # 0: free
        self._places = array("Q", bytes(8 * 1024))
        self._num_entries = 0

    def first_place(self, hashed: int, place: int) -> int | None:
        """Returns the place that brought this hash before; None if there is none, and keeps it."""
        hashed = hashed or 1
        slot = self._slot(hashed)
        if self._hashes[slot]:
            return self._places[slot]
        self._hashes[slot], self._places[slot] = hashed, place
        self._num_entries += 1
        if 4 * self._num_entries > 3 * len(self._hashes):
            self._grow()
        return None

    def _slot(self, hashed: int) -> int:
        hashes = self._hashes
        slot = hashed % len(hashes)
        while hashes[slot] and hashes[slot] != hashed:
            slot = (slot + 1) % len(hashes)
        return slot

    def _grow(self) -> None:
        entries = zip(self._hashes, self._places, strict=True)
        size = 2 * len(self._hashes)
        self._hashes, self._places = array("Q", bytes(8 * size)), array("Q", bytes(8 * size))
        for hashed, place in entries:
            if hashed:
                slot = self._slot(hashed)
                self._hashes[slot], self._places[slot] = hashed, place


class Places:
    """Numbers for lines of several files, in the order in which they are read."""

    def __init__(self) -> None:
        self._files: list[str | None] = []

    def number(self, line: int, file: str | None) -> int:
        """Returns the number of a line; files come one after the other."""
        if not self._files or self._files[-1] != file:
            self._files.append(file)
        return (len(self._files) - 1) * MAX_LINES + line

    def shown(self, place: int) -> str:
        """Says which line of which file a number stands for."""
        file_number, line = divmod(place, MAX_LINES)
        file = self._files[file_number]
        return f"line {line}" if file is None else f"line {line} of {file}"
