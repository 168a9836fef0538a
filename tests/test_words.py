"""What people read."""

import pytest

from eagle3.words import counted, duration, one_line, readable_bytes


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1200, "1,200 rows")])
def test_what_is_counted_is_named_in_its_number(number: int, said: str) -> None:
    assert counted(number, "row") == said


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1024, "1.0 KiB"), (991_900_000_000, "923.8 GiB"), (2**50, "1024.0 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert readable_bytes(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (43_499, "12:04:59")])
def test_times_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_error_is_one_line_and_never_nothing() -> None:
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(ValueError()) == "ValueError"
