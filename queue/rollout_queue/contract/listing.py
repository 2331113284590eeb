"""The list of all sessions, oldest first: positions in it, and the sessions there."""

from typing import NamedTuple

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.tombstone import Tombstone


class ListPosition(NamedTuple):
    """The position of one session, by creation time and then by id. It outlives the session."""

    created_at: float
    session_id: str


LIST_START = ListPosition(float("-inf"), "")
"""The position before every session."""


class ListedSession(NamedTuple):
    """A position, and the session or the tombstone there; None where it was removed during the listing."""

    position: ListPosition
    found: SessionHead | Tombstone | None
