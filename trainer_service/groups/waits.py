"""What the groups wait for that have members who ended and members who did not, in words."""

from collections.abc import Sequence
from typing import NamedTuple


class Wait(NamedTuple):
    """A group that has begun to end."""

    missing: int
    """Members that have not ended, heard of or not."""
    since: float
    """When its first rewarded member ended, or when it was last heard of where none has."""
    goes_at: float | None
    """When it goes on without them; None where nothing but silence makes it."""
    lacks: int
    """Rewarded members that have to come before it may."""


def sentence(waits: Sequence[Wait], now_s: float) -> str | None:
    """Who waits for how many, and for how long still; None when no group waits."""
    if not waits:
        return None
    oldest = min(waits, key=lambda wait: wait.since)
    groups, members = len(waits), sum(wait.missing for wait in waits)
    waiting = f"{groups} group waits" if groups == 1 else f"{groups} groups wait"
    missing = f"{members} member that goes on" if members == 1 else f"{members} members that go on"
    said = f"{waiting} for {missing}; the oldest since {max(0.0, now_s - oldest.since):.0f} s"
    if oldest.goes_at is None:
        return said
    if oldest.lacks:
        return f"{said}, it goes without them once {oldest.lacks} more have a reward"
    return f"{said}, it goes without them in {max(0.0, oldest.goes_at - now_s):.0f} s"
