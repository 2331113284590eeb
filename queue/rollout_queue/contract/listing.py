"""Types for the list of all sessions, oldest first: a position in the list, and the session at a position."""

from collections.abc import Callable
from typing import NamedTuple

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.tombstone import Tombstone


class ListPosition(NamedTuple):
    """The position of one session, by creation time and then by id. It stays valid without the session."""

    created_at: float
    session_id: str


LIST_START = ListPosition(float("-inf"), "")
"""The position before every session."""


class ListedSession(NamedTuple):
    """A position with its session or tombstone. `found` is None if the session was removed meanwhile."""

    position: ListPosition
    found: SessionHead | Tombstone | None


def position_of(session: SessionHead | Tombstone) -> ListPosition:
    known = session if isinstance(session, Tombstone) else session.spec
    return ListPosition(known.created_at, known.session_id)


def without_unwanted(listed: ListedSession, wanted: Callable[[SessionSpec], bool]) -> ListedSession:
    """The same position, without its session if `wanted` refuses the session's spec."""
    found = listed.found
    return (
        listed._replace(found=None) if isinstance(found, SessionHead) and not wanted(found.spec) else listed
    )
