"""Where an answer begins to repeat itself.

A small model that has fallen into a loop stays in it; its repetitions are trivial to draft and inflate every
acceptance length.
"""

from collections.abc import Sequence

# A block of up to SHORT_PERIOD tokens loops when it came three times in a row and fills LOOP_TOKENS (so that the
# zeros of a million or the rules of a table do not); a longer one, such as a paragraph, when it came twice.
SHORT_PERIOD = 32
LONG_PERIOD = 256
LOOP_TOKENS = 24


def is_looping(ids: Sequence[int]) -> bool:
    """Tells whether an answer ends in a loop."""
    return first_occurrence_end(ids) is not None


def first_occurrence_end(ids: Sequence[int]) -> int | None:
    """Returns how many tokens stand before the repetitions at the end of `ids`, None if it does not end in a loop."""
    for period in range(1, min(LONG_PERIOD, len(ids) // 2) + 1):
        if ids[-1] != ids[-1 - period]:
            continue
        repeats = max(3, -(-LOOP_TOKENS // period)) if period <= SHORT_PERIOD else 2
        tail = period * (repeats - 1)  # tokens that must equal the one a period before
        if tail + period > len(ids) or ids[-tail:] != ids[-tail - period : -period]:
            continue
        start = len(ids) - tail - period
        while start > 0 and ids[start - 1] == ids[start - 1 + period]:
            start -= 1
        return start + period
    return None
