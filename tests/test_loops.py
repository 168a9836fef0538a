"""An answer that repeats itself is found, and what only looks like it is not."""

import pytest

from eagle3.prompts.loops import first_occurrence_end, is_looping

TEXT = list(range(100, 160))


def brute_force(ids: list[int]) -> int | None:
    """The definition, slowly: the shortest period whose repetitions end the answer, back to where they begin."""
    for period in range(1, 257):
        repeats = max(3, -(-24 // period)) if period <= 32 else 2
        block = ids[-period:]
        if len(ids) < period * repeats or ids[-period * repeats :] != block * repeats:
            continue
        start = next(s for s in range(len(ids)) if all(ids[j] == ids[j + period] for j in range(s, len(ids) - period)))
        return start + period
    return None


@pytest.mark.parametrize("period", [1, 2, 7, 8, 31, 32, 33, 60])
def test_a_loop_is_kept_up_to_its_first_repetition(period: int) -> None:
    block = list(range(period))
    repeats = max(3, -(-24 // period)) if period <= 32 else 2
    # The last repetition may be under way.
    for extra in (0, period // 2):
        ids = TEXT + block * repeats + block[:extra]
        assert first_occurrence_end(ids) == brute_force(ids) == len(TEXT) + period
    assert first_occurrence_end(TEXT + block * (repeats - 1)) is None


def test_a_loop_that_goes_on_is_cut_at_the_same_place() -> None:
    ids = TEXT + [1, 2, 3, 4, 5, 6, 7, 8, 9] * 10
    ends = {first_occurrence_end(ids[:length]) for length in range(len(TEXT) + 27, len(ids))}
    assert ends == {len(TEXT) + 9}


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [5],
        TEXT,
        [*TEXT, 0, 0, 0, 0, 0, 0],  # the zeros of a million, one token each
        [*TEXT, *[1, 2] * 6],  # a table's rule
        [*TEXT, *[1, 2, 3, 4, 5, 6, 7, 8] * 3, 9],  # it found its way out
    ],
)
def test_no_loop_is_seen_where_there_is_none(ids: list[int]) -> None:
    assert first_occurrence_end(ids) is None
    assert not ids or brute_force(ids) is None


def test_an_answer_loops_where_there_is_something_to_cut() -> None:
    phrase = [4, 5, 6, 7, 8, 9, 10, 11]
    assert is_looping([*TEXT, *phrase * 5, 4, 5, 6])  # cut by the limit inside a repetition
    assert not is_looping([*phrase * 5, 2])  # it found its way out and ended
    paragraph = list(range(200))
    assert is_looping([*TEXT, *paragraph * 2])
    assert not is_looping([*TEXT, *paragraph])
