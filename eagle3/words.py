"""Numbers, sizes, times and errors as people read them."""


def counted(number: int, noun: str) -> str:
    """Returns a number with what it counts: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def readable_bytes(num_bytes: int) -> str:
    """Returns a size as people read it: `12.3 GiB`."""
    size, unit = float(num_bytes), 0
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and unit < len(units) - 1:
        size, unit = size / 1024, unit + 1
    return counted(num_bytes, "byte") if unit == 0 else f"{size:.1f} {units[unit]}"


def duration(seconds: float) -> str:
    """Returns hours, minutes and seconds as people read them: `12:04:59`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def one_line(error: Exception) -> str:
    """Returns an error of others as one line; its kind alone where it says nothing."""
    return " ".join(str(error).split())[:400] or type(error).__name__
