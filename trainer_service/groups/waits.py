"""Describes what sessions wait for, and how long incomplete groups have waited and still wait."""

from collections.abc import Sequence
from typing import NamedTuple


class SessionCounts(NamedTuple):
    """How many of the sessions in the assembler have not ended, wait for a reward, or have ended."""

    unfinished: int
    unrewarded: int
    """The agent has finished them, and no reward has come."""
    ended: int
    """They have ended. Their group is not complete, or waits for its step."""


class GroupWait(NamedTuple):
    """A group of which some members have ended and others have not. Times are in seconds since 1970."""

    missing: int
    """How many members have not ended. Members of which no record was read count too."""
    since: float
    """When its first rewarded member ended. If no rewarded member has ended, the time of its last record."""
    goes_at: float | None
    """When the group is trained without the missing members; None if it has no deadline."""
    lacks: int
    """How many more rewarded members it needs before the deadline applies."""


def describe_sessions(counts: SessionCounts) -> str | None:
    """How many of the sessions that were read wait for what; None if there are none."""
    one = (
        (counts.unfinished, "is unfinished", "are unfinished"),
        (counts.unrewarded, "waits for a reward", "wait for a reward"),
        (counts.ended, "has ended", "have ended"),
    )
    said = [f"{number} {single if number == 1 else several}" for number, single, several in one if number]
    return f"of the sessions read, {', '.join(said)}" if said else None


def describe_waits(waits: Sequence[GroupWait], now_s: float) -> str | None:
    """How many groups wait, for how many members, and how much longer; None when no group waits."""
    if not waits:
        return None
    oldest = min(waits, key=lambda wait: wait.since)
    groups, members = len(waits), sum(wait.missing for wait in waits)
    waiting = f"{groups} group waits" if groups == 1 else f"{groups} groups wait"
    missing = "1 unfinished member" if members == 1 else f"{members} unfinished members"
    sentence = f"{waiting} for {missing}; the oldest has waited {max(0.0, now_s - oldest.since):.0f} s"
    if oldest.goes_at is None:
        return sentence
    if oldest.lacks:
        return f"{sentence}, and is trained without them when {oldest.lacks} more have a reward"
    return f"{sentence}, and is trained without them in {max(0.0, oldest.goes_at - now_s):.0f} s"
