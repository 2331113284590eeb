"""Sessions and groups: the episodes that calls belong to, over REST.

POST /sessions, /groups ──▶ base_url + api_key for an OpenAI client
GET  /sessions/{id}     ──▶ the whole episode: every turn, its tokens on request, its verdict
DELETE …                ──▶ nothing of it is left, but that it was there
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from gateway.admission.admission import Admission
from gateway.collaborators import Collaborators, collaborators
from gateway.errors import InvalidRequest, ObjectNotFound, StateConflict
from gateway.rest.shapes import DeletedSession, GroupTicket, SessionShape, Ticket
from gateway.rest.views import session_view
from gateway.sessions.identity import Caller, Identities
from gateway.sessions.verdicts import session_verdict
from gateway.settings import GatewaySettings
from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.errors import (
    Conflict,
    InvalidRecord,
    SessionDeleted,
    SessionForgotten,
    SessionUnknown,
    UnknownSchema,
)
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.records import (
    SamplingMode,
    SamplingPolicy,
    SessionSpec,
    Verdict,
)
from rollout_queue.contract.stream import StreamWriter
from rollout_queue.protocol.ids import ID, Id


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError) as error:  # 2**64, half a surrogate pair, an abyss
        raise ValueError("it holds what cannot be stored") from error
    return value


class Body(BaseModel):
    """A request body: no unknown field, no guessed type."""

    # With any bound, pydantic looks into strings and refuses half a surrogate pair, which nothing can store.
    model_config = ConfigDict(extra="forbid", strict=True, str_min_length=0)


class SamplingBody(Body):
    mode: SamplingMode | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)


class SessionBody(Body):
    session_id: Id | None = None
    task_id: Id | None = None
    group_id: Id | None = None
    group_size: int | None = Field(None, ge=1, le=1024)
    policy: str | None = None
    user: Id | None = None
    train: bool = True
    ttl_s: FiniteFloat | None = Field(None, gt=0)
    metadata: Annotated[dict[str, Any], AfterValidator(_storable)] = {}
    lineage: str | None = None
    sampling: SamplingBody = SamplingBody()


class GroupBody(SessionBody):
    size: int = Field(ge=1, le=1024)


def unknown(session_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"no session {session_id!r}")


@contextmanager
def known(session_id: str) -> Iterator[None]:
    """Raises ObjectNotFound where the session goes in the moment in which something is added to it."""
    try:
        yield
    except SessionUnknown as error:
        raise unknown(session_id) from error


class Sessions:
    """What the routes and the calls share: opening, finding and guarding sessions."""

    def __init__(
        self,
        settings: GatewaySettings,
        writer: StreamWriter,
        identities: Identities,
        admission: Admission,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._identities = identities
        self._admission = admission
        defaults = settings.sampling
        self._sampling = SamplingPolicy(
            mode=defaults.mode, temperature=defaults.temperature, top_p=defaults.top_p
        )

    async def open(self, spec: SessionSpec, caller: Caller) -> tuple[SessionSpec, bool]:
        """Store a new session, or find the one of the same id and body.

        Raises StateConflict for the same id with another body and for a group that does not fit,
        LimitReached, Deleted.
        """
        await self._admission.check_session([spec])
        try:
            stored, created = await self._writer.open_session(spec)
        except SessionForgotten as forgotten:
            said = str(forgotten)
            raise StateConflict(said, param="session_id", code="session_finished") from forgotten
        except Conflict as conflict:
            raise StateConflict(str(conflict), param="group_id") from conflict
        if not created and not (caller.owns(stored) and stored.terms() == spec.terms()):
            raise StateConflict(f"session {spec.session_id} exists with another body", param="session_id")
        return stored, created

    async def head(self, session_id: str, caller: Caller) -> SessionHead:
        """Raises ObjectNotFound for a session that is not there, or that is not the caller's; Deleted."""
        head = await self._writer.load(session_id) if ID.fullmatch(session_id) else None
        if head is None:
            raise await self.missing(session_id, caller)
        if not caller.owns(head.spec):
            raise unknown(session_id)
        return head

    async def check_owned(self, session_id: str, caller: Caller) -> None:
        """As `head`, and also of a session that this build cannot read. Whose it is may be in what cannot be
        read: then it is an operator's."""
        raw = await self._writer.spec_of(session_id) if ID.fullmatch(session_id) else None
        if raw is None:
            raise await self.missing(session_id, caller)
        with suppress(InvalidRecord, UnknownSchema):
            if caller.owns(decode_spec(raw)):
                return
        if caller.role != "admin":
            raise unknown(session_id)

    async def missing(self, session_id: str, caller: Caller) -> ObjectNotFound | SessionDeleted:
        """What to say of a session that is not there: it never was, or the caller's was deleted."""
        left = await self._writer.tombstone(session_id) if ID.fullmatch(session_id) else None
        if left is not None and caller.owns(left):
            return SessionDeleted(session_id)
        return unknown(session_id)

    def unnamed(self, caller: Caller) -> SessionSpec:
        """The session of a call that names none."""
        return SessionSpec(
            session_id=f"s-{new_id()}",
            owner=caller.owner,
            ttl_s=self._settings.session_ttl_s,
            sampling=self._sampling,
            created_at=time.time(),
            inferred=True,
        )

    def spec_of(self, body: SessionBody, caller: Caller) -> SessionSpec:
        """The session that a body asks for, with this deployment's defaults."""
        if body.group_size is not None and body.group_id is None:
            raise InvalidRequest("group_size needs a group_id", param="group_size")
        defaults, asked = self._sampling, body.sampling
        return SessionSpec(
            **body.model_dump(exclude={"session_id", "train", "ttl_s", "sampling"}),
            train=body.train and "@" not in (body.policy or ""),  # a pinned session evaluates that version
            session_id=body.session_id or f"s-{new_id()}",
            owner=caller.owner,
            ttl_s=self._settings.session_ttl_s if body.ttl_s is None else body.ttl_s,
            sampling=SamplingPolicy(
                mode=asked.mode or defaults.mode,
                temperature=defaults.temperature if asked.temperature is None else asked.temperature,
                top_p=defaults.top_p if asked.top_p is None else asked.top_p,
                max_tokens=asked.max_tokens,
            ),
            created_at=time.time(),
        )

    def ticket(self, spec: SessionSpec, request: Request) -> dict[str, Any]:
        """What an agent needs to begin: it goes straight into an OpenAI client."""
        base = self._settings.public_url or str(request.base_url).rstrip("/")
        return {
            "session_id": spec.session_id,
            "api_key": self._identities.session_key(spec.session_id),
            "base_url": f"{base}/sessions/{spec.session_id}/v1",
            "group_id": spec.group_id,
            "task_id": spec.task_id,
            "policy": spec.policy or self._settings.model_name,
            "state": "open",
            "created_at": spec.created_at,
            "expires_at": spec.created_at + spec.ttl_s,
        }

    async def verdict(self, head: SessionHead) -> Verdict:
        """What is to be said of a session right now."""
        (said,) = await self.verdicts([head])
        return said

    async def verdicts(self, heads: Sequence[SessionHead]) -> list[Verdict]:
        """The same of several, with one look at each of their groups."""
        waiting = {head.spec.group_id for head in heads if head.verdict is None and head.spec.group_id}
        groups = {group_id: await self._writer.group_standing(group_id) for group_id in sorted(waiting)}
        return [session_verdict(head, groups.get(head.spec.group_id or "")) for head in heads]


router = APIRouter(tags=["sessions"])


def client_of(request: Request) -> tuple[Collaborators, Caller]:
    """The collaborators, and who asks; session keys stay outside of these routes."""
    gateway = collaborators(request)
    return gateway, gateway.identities.client(request)


@router.post("/sessions", status_code=201, responses={200: {"model": Ticket}, 201: {"model": Ticket}})
async def create_session(body: SessionBody, request: Request) -> Response:
    """Open a session. The same id with the same body again gives the same session and key."""
    gateway, caller = client_of(request)
    spec, created = await gateway.sessions.open(gateway.sessions.spec_of(body, caller), caller)
    return JSONResponse(gateway.sessions.ticket(spec, request), 201 if created else 200)


@router.post("/groups", status_code=201, responses={201: {"model": GroupTicket}})
async def create_group(body: GroupBody, request: Request) -> Response:
    """Open a group: one task, sampled `size` times."""
    gateway, caller = client_of(request)
    if body.session_id is not None:
        raise InvalidRequest("a group's sessions are named by the gateway", param="session_id")
    if body.group_size not in (None, body.size):
        raise InvalidRequest("group_size and size differ", param="group_size")
    group_id = body.group_id or f"g-{new_id()}"
    fields = body.model_dump(exclude={"size", "session_id", "group_id", "group_size"})
    members = [
        gateway.sessions.spec_of(SessionBody(**fields, group_id=group_id, group_size=body.size), caller)
        for _ in range(body.size)
    ]
    await gateway.admission.check_session(members)
    try:
        await gateway.writer.open_group(members)
    except Conflict as conflict:
        raise StateConflict(str(conflict), param="group_id") from conflict
    tickets = [gateway.sessions.ticket(spec, request) for spec in members]
    return JSONResponse({"group_id": group_id, "sessions": tickets}, 201)


@router.get("/sessions/{session_id}", responses={200: {"model": SessionShape}})
async def read_session(
    session_id: str, request: Request, tokens: bool = False, text: bool = False
) -> Response:
    """The session with its turns; `tokens=true` adds ids and logprobs, `text=true` what they say."""
    gateway, caller = client_of(request)
    head = await gateway.sessions.head(session_id, caller)
    verdict = await gateway.sessions.verdict(head)
    model_name = gateway.settings.model_name
    return JSONResponse(session_view(head, verdict, model_name, gateway.renderer, tokens, text))


@router.delete("/sessions/{session_id}", responses={200: {"model": DeletedSession}})
async def delete_session(session_id: str, request: Request) -> Response:
    """Remove every copy of the session. Its id is never given again."""
    gateway, caller = client_of(request)
    await gateway.sessions.check_owned(session_id, caller)
    tombstone = await gateway.deleter.delete_session(session_id)
    if tombstone is None:  # somebody else has just done it
        raise await gateway.sessions.missing(session_id, caller)
    deleted = {"turns": tombstone.turns, "rewards": tombstone.rewards}
    return JSONResponse({"session_id": session_id, "deleted": deleted})
