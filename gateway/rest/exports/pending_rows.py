"""A row that is built when it is written, and the facts about its session that each row repeats."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from gateway.rest.exports.selection import TrainedSession
from rollout_queue.contract.records import Status, VerdictCode


class PendingRow(NamedTuple):
    """One line of JSON. It is built late: tokens that several rows share are in each of them."""

    cursor: str
    created_at: float
    """When the session was opened, seconds since the epoch."""
    pieces: Callable[[], Iterable[bytes]]
    """The line, with its newline."""


class RowOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The session of a row, and what became of it."""

    cursor: str
    created_at: float
    session_id: str
    group_id: str
    group_size: int | None
    task_id: str | None
    status: Status
    verdict: VerdictCode
    reward: float


def origin_of(session: TrainedSession, turn_id: str) -> RowOrigin:
    """`turn_id` makes the cursor unique among the rows of the session."""
    spec = session.head.spec
    return RowOrigin(
        cursor=f"{spec.session_id}/{turn_id}",
        created_at=spec.created_at,
        session_id=spec.session_id,
        group_id=session.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        status=session.outcome.status,
        verdict=session.verdict.code,
        reward=session.reward,
    )
