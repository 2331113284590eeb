"""Groups in which some members have ended and others have not: what they wait for, in words."""

from collections.abc import Sequence
from typing import NamedTuple


class GroupWait(NamedTuple):
    """A group of which some members have ended and others have not. Times are in seconds since 1970."""

    missing: int
    """Members that have not ended, including those of which nothing was read."""
    since: float
    """When its first rewarded member ended; where there is none, the time of its last record."""
    goes_at: float | None
    """When the group is trained without the missing members; None where it has no deadline."""
    lacks: int
    """How many more rewarded members it needs before the deadline applies."""


def describe_waits(waits: Sequence[GroupWait], now_s: float) -> str | None:
    """How many groups wait, for how many members, and how much longer; None when no group waits."""
    if not waits:
        return None
    oldest = min(waits, key=lambda wait: wait.since)
    groups, members = len(waits), sum(wait.missing for wait in waits)
    waiting = f"{groups} group waits" if groups == 1 else f"{groups} groups wait"
    missing = f"{members} member that goes on" if members == 1 else f"{members} members that go on"
    sentence = f"{waiting} for {missing}; the oldest since {max(0.0, now_s - oldest.since):.0f} s"
    if oldest.goes_at is None:
        return sentence
    if oldest.lacks:
        return f"{sentence}, it goes without them once {oldest.lacks} more have a reward"
    return f"{sentence}, it goes without them in {max(0.0, oldest.goes_at - now_s):.0f} s"
