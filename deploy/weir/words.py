"""Numbers, sizes and times in sentences."""


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one: `512 B`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """A length of time, rounded to one unit: `40 s`, `4 min`, `3 h`, `2 days`."""
    for unit_s, name, until in ((1, "s", 100), (60, "min", 100), (3600, "h", 48)):
        if seconds < unit_s * until:
            return f"{max(0.0, seconds) / unit_s:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 session`, `12 sessions`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
