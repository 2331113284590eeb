"""Types for the list of all sessions by age: a position in the list, and the session at a position."""

from collections.abc import Callable, Iterable
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
LIST_END = ListPosition(float("inf"), "")
"""The position after every session, where a list begins that has the newest first."""


class ListScope(NamedTuple):
    """Which sessions a list looks at, and in which order. A group, a user or a version spares it looking at
    others."""

    newest_first: bool = False
    group_id: str | None = None
    user: str | None = None
    trained_version: int | None = None
    """The version that the step which trained the sessions has made."""
    turns: bool = True
    """Whether the sessions are read with their turns."""

    @property
    def start(self) -> ListPosition:
        return LIST_END if self.newest_first else LIST_START


ALL_SESSIONS = ListScope()


def after_position(
    positions: Iterable[ListPosition], position: ListPosition, *, newest_first: bool
) -> list[ListPosition]:
    """Those of the positions that come after one position, in the order of the list."""
    if newest_first:
        return sorted((each for each in positions if each < position), reverse=True)
    return sorted(each for each in positions if each > position)


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
