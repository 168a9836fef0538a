"""A set of 64-bit hashes with the line of each, in 21 to 43 bytes an entry."""

from array import array


class SeenHashes:
    """An open hash table; doubles when it is three quarters full."""

    def __init__(self) -> None:
        self._hashes = array("Q", bytes(8 * 1024))  # 0: free
        self._lines = array("Q", bytes(8 * 1024))
        self._num_entries = 0

    def first_line(self, hashed: int, line: int) -> int | None:
        """Returns the line that brought this hash before; None if there is none, and keeps it."""
        hashed = hashed or 1
        slot = self._slot(hashed)
        if self._hashes[slot]:
            return self._lines[slot]
        self._hashes[slot], self._lines[slot] = hashed, line
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
        entries = zip(self._hashes, self._lines, strict=True)
        size = 2 * len(self._hashes)
        self._hashes, self._lines = array("Q", bytes(8 * size)), array("Q", bytes(8 * size))
        for hashed, line in entries:
            if hashed:
                slot = self._slot(hashed)
                self._hashes[slot], self._lines[slot] = hashed, line
