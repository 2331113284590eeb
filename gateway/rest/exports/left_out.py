"""Names each session and turn that other trainers do not get, with the reason."""

from collections.abc import Iterator

import msgspec

from gateway.operators.archive import ArchivedSession
from gateway.rest.exports.pending_rows import PendingRow
from gateway.rest.exports.selection import selected
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.rows import row_to_json
from rollout_queue.contract.verdicts import DELETED, exclusion

NOTHING_SAMPLED = Verdict(code="not_for_training", detail="no token was sampled")


class LeftOutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session that trainers do not get (`turn_id` is null), or an untrained turn of one that they get."""

    cursor: str
    created_at: float
    session_id: str
    turn_id: str | None
    verdict: Verdict


def left_out_rows(
    found: ArchivedSession, verdict: Verdict | None, partial_groups: bool
) -> Iterator[PendingRow]:
    """The parts of this session that trainers do not get. `verdict` is None for a deleted session."""
    if found.tombstone is not None:
        yield _row(found.session_id, found.tombstone.created_at, None, DELETED)
    if found.head is None or verdict is None:
        return
    at = found.head.spec.created_at
    session = selected(found.head, verdict, partial_groups)
    if isinstance(session, Verdict):
        yield _row(found.session_id, at, None, session)
        return
    for turn in found.head.turns:
        if turn.turn_id not in session.trained:
            yield _row(found.session_id, at, turn.turn_id, _why_untrained(found.head, turn))


def _why_untrained(head: SessionHead, turn: Turn) -> Verdict:
    return exclusion(turn, head.orphans) or NOTHING_SAMPLED


def _row(session_id: str, created_at: float, turn_id: str | None, verdict: Verdict) -> PendingRow:
    cursor = f"{session_id}/{turn_id or ''}"
    row = LeftOutRow(
        cursor=cursor, created_at=created_at, session_id=session_id, turn_id=turn_id, verdict=verdict
    )
    return PendingRow(cursor, created_at, lambda: (row_to_json(row), b"\n"))
