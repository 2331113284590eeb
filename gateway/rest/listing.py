"""`GET /sessions`: a page of the caller's sessions; a deleted session has its id, times and verdict.

filter ──group, user, trained version: an index──▶ positions ──spec──▶ summaries without turns
summaries ──reward, verdict, …──▶ rows

No request looks at more than `MOST_LOOKED_AT` sessions: it then returns those it found, and a cursor.
"""

import base64
import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import FiniteFloat

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest
from gateway.parts import GatewayParts
from gateway.rest.access import client_of
from gateway.rest.shapes import DeletedSessionRow, SessionPage, SessionRow
from gateway.rest.views import deleted_row, session_row
from rollout_queue.contract.head import (
    ListedSession,
    ListPosition,
    ListScope,
    SessionHead,
    SessionState,
    Tombstone,
)
from rollout_queue.contract.records import SessionSpec, Verdict, VerdictCode
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

router = APIRouter(tags=["sessions"])

MOST_LOOKED_AT = 5000
"""How many sessions of all owners one request reads at most."""
LOOKED_AT_ONCE = 500
"""Between two pages of at most so many sessions, other calls have their turn."""
MOST_ID = 200


class SessionFilter(NamedTuple):
    """The sessions to list; a field that is None matches every session."""

    state: SessionState | None = None
    group_id: str | None = None
    user: str | None = None
    verdict: VerdictCode | None = None
    task_id: str | None = None
    id_part: str | None = None
    """A part of the session's id."""
    min_reward: float | None = None
    max_reward: float | None = None
    version: int | None = None
    trained_version: int | None = None

    def may_match(self, spec: SessionSpec, caller: Caller) -> bool:
        """Whether the session may be in the list; only such sessions are read."""
        group = caller.shown_group(spec)
        named = ((self.group_id, group), (self.user, spec.user), (self.task_id, spec.task_id))
        return (
            caller.owns(spec)
            and all(asked is None or asked == has for asked, has in named)
            and (self.id_part is None or self.id_part in caller.shown_id(spec))
        )

    def matches(self, head: SessionHead) -> bool:
        """Whether a session that may match does so, but for a verdict that is not stored yet."""
        return (
            self.state in (None, head.state)
            and (head.verdict is None or self.matches_verdict(head.verdict))
            and self._rewarded(head.reward)
            and self._sampled(head.sums.first_version, head.sums.last_version)
        )

    def matches_verdict(self, verdict: Verdict) -> bool:
        return self.verdict in (None, verdict.code) and self.trained_version in (None, verdict.version)

    def matches_deleted(self, tombstone: Tombstone, caller: Caller) -> bool:
        """A deleted session has no state, group or user any more."""
        others = self._replace(verdict=None, id_part=None)
        named = self.id_part is None or self.id_part in caller.shown_id(tombstone)
        return caller.owns(tombstone) and others == NO_FILTER and named and self.verdict in (None, "deleted")

    def _rewarded(self, reward: float | None) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        least = -math.inf if self.min_reward is None else self.min_reward
        most = math.inf if self.max_reward is None else self.max_reward
        most = math.inf if self.max_reward is None else self.max_reward
        return reward is not None and least <= reward <= most

    def _sampled(self, first: int | None, last: int | None) -> bool:
        if self.version is None:
            return True
        return first is not None and last is not None and first <= self.version <= last


NO_FILTER = SessionFilter()


@router.get("/sessions", responses={200: {"model": SessionPage}})
async def list_sessions(
    request: Request,
    state: SessionState | None = None,
    group_id: str | None = None,
    verdict: VerdictCode | None = None,
    user: str | None = None,
    task_id: str | None = None,
    id_part: Annotated[str | None, Query(alias="id", max_length=MOST_ID)] = None,
    min_reward: FiniteFloat | None = None,
    max_reward: FiniteFloat | None = None,
    version: int | None = None,
    trained_version: int | None = None,
    order: Literal["oldest", "newest"] = "oldest",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str | None = None,
) -> Response:
    """A page of the caller's sessions. `version` finds sessions of which the oldest token was not sampled
    after this version, and the newest one not before it; `trained_version` those that a step trained which
    made this version. A page may be empty and have a cursor: then the next one looks further."""
    gateway, caller = client_of(request)
    named = (state, group_id, user, verdict, task_id, id_part)
    wanted = SessionFilter(*named, min_reward, max_reward, version, trained_version)
    stored_group = await _stored_group(gateway, caller, group_id)
    scope = ListScope(order == "newest", stored_group, user, trained_version, turns=False)
    search = _Search(gateway, caller, wanted, limit)
    position, done, count = _position(cursor, scope), False, min(limit, LOOKED_AT_ONCE)
    while not (done or search.full):
        count = min(count, MOST_LOOKED_AT - search.looked_at)
        page = await gateway.writer.sessions(position, count, search.may_match, scope)
        position, done = await search.look_at(page, position), not page
        count = min(2 * count, LOOKED_AT_ONCE)  # few sessions match
    return JSONResponse(
        {
            "data": search.rows,
            "next_cursor": None if done else _cursor(position),
            "looked_at": search.looked_at,
            "looked_until": position.created_at if math.isfinite(position.created_at) else None,
        }
    )


async def _stored_group(gateway: GatewayParts, caller: Caller, group_id: str | None) -> str | None:
    """The stored id of the group that the caller knows by this one."""
    if group_id is None or not caller.owner:
        return group_id
    scoped = gateway.identities.scoped(group_id, caller.owner)
    return scoped if await stored(gateway.redis.exists(key_names.group(scoped))) else group_id


class _Search:
    """What one request has found so far."""

    def __init__(self, gateway: GatewayParts, caller: Caller, wanted: SessionFilter, limit: int) -> None:
        self._gateway, self._caller, self._wanted, self._limit = gateway, caller, wanted, limit
        self.rows: list[SessionRow | DeletedSessionRow] = []
        self.looked_at = 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= self._limit or self.looked_at >= MOST_LOOKED_AT

    def may_match(self, spec: SessionSpec) -> bool:
        return self._wanted.may_match(spec, self._caller)

    async def look_at(self, page: Sequence[ListedSession], before: ListPosition) -> ListPosition:
        """Add the rows of the page, up to the limit. Returns the position of the last session looked at."""
        heads = [each.found for each in page if isinstance(each.found, SessionHead)]
        heads = [head for head in heads if self._wanted.matches(head)]
        verdicts = dict(zip(map(id, heads), await self._gateway.sessions.verdicts(heads), strict=True))
        position = before
        for position, found in page:  # noqa: B007 - the next page begins after the last position
            self.looked_at += 1
            if isinstance(found, SessionHead):
                self._add(found, verdicts.get(id(found)))
            elif found is not None and self._wanted.matches_deleted(found, self._caller):
                self.rows.append(deleted_row(found, self._caller))
            if len(self.rows) == self._limit:
                break
        return position

    def _add(self, head: SessionHead, verdict: Verdict | None) -> None:
        if verdict is not None and self._wanted.matches_verdict(verdict):
            self.rows.append(session_row(head, self._caller, verdict, self._gateway.settings.model_name))


def _cursor(position: ListPosition) -> str:
    """A position in the list, as text that needs no escaping in a URL."""
    text = f"{position.created_at!r}/{position.session_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _position(cursor: str | None, scope: ListScope) -> ListPosition:
    """The position that a cursor encodes. Raises InvalidRequest for a malformed cursor."""
    if cursor in (None, "0"):
        return scope.start
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        created_at, slash, session_id = text.partition("/")
        position = ListPosition(float(created_at), session_id)
    except ValueError:  # not base64, not UTF-8, or no number
        slash, position = "", scope.start
    if not (slash and math.isfinite(position.created_at)):
        raise InvalidRequest(f"{cursor[:300]!r} is not a cursor of this list", param="cursor")
    return position
