"""Numbers and times in sentences for operators."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 session`, `12 sessions`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A length of time, rounded to one unit: `40 s`, `4 min`, `3 h`, `2 days`."""
    seconds = max(0.0, seconds)
    for unit_s, name, until in ((1, "s", 100), (60, "min", 100), (3600, "h", 48)):
        if seconds < unit_s * until:
            return f"{seconds / unit_s:.0f} {name}"
    return counted(round(seconds / 86400), "day")
