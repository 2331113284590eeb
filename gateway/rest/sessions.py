"""Sessions and groups over REST.

POST /sessions, /groups ──▶ base_url and api_key of each new session, for an OpenAI client
GET  /sessions/{id}     ──▶ the whole session: every turn, its tokens on request, its verdict
DELETE …                ──▶ every copy is removed; a tombstone (id, times, counts) stays

`POST /sessions/{id}/heartbeat`: an agent postpones its session's expiry while it runs a long tool.
"""

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, FiniteFloat

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest, StateConflict
from gateway.generations.generation import policy_name
from gateway.language.thinking import effort_of
from gateway.parts import GatewayParts, parts_of
from gateway.rest.access import caller_in, client_of
from gateway.rest.bodies import RestBody, StoredMetadata
from gateway.rest.shapes import DeletedSession, HeartbeatReply, NewGroup, NewSession, SessionShape
from gateway.rest.views import MOST_TEXT, Shown, TokenWindow, session_view
from gateway.sessions.resolution import refusal_of
from rollout_queue import clock
from rollout_queue.contract.errors import SessionClosed
from rollout_queue.contract.ids import new_id
from rollout_queue.contract.records import (
    PastThoughts,
    ReasoningEffort,
    SamplingMode,
    SamplingPolicy,
    SessionSpec,
)
from rollout_queue.http.json_routes import JsonRoute
from rollout_queue.protocol.message import Id

router = APIRouter(tags=["sessions"], route_class=JsonRoute)

LONGEST_S = 30 * 86400.0
"""The longest `ttl_s` of a session."""
ALONE = (
    "a group of one session is compared with no other, so by default no step trains it: open the attempts at "
    "one task as one group"
)


class SamplingBody(RestBody):
    mode: SamplingMode | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, le=2**31)


class SessionBody(RestBody):
    session_id: Id | None = None
    task_id: Id | None = None
    group_id: Id | None = None
    group_size: int | None = Field(None, ge=1, le=1024)
    policy: str | None = Field(None, max_length=200)
    user: Id | None = None
    train: bool = True
    train_side_calls: bool | None = None
    ttl_s: FiniteFloat | None = Field(None, gt=0, le=LONGEST_S)
    metadata: StoredMetadata = {}
    lineage: str | None = Field(None, max_length=200)
    sampling: SamplingBody = SamplingBody()
    reasoning_effort: ReasoningEffort | None = None
    thinking: PastThoughts | None = None


class GroupBody(SessionBody):
    size: int = Field(ge=1, le=1024)


@router.post("/sessions", status_code=201, responses={200: {"model": NewSession}, 201: {"model": NewSession}})
async def create_session(body: SessionBody, request: Request) -> Response:
    """Open a session, or describe one that a call has opened (200).

    A repeated request with the same id and body gets the same session and key.
    """
    gateway, caller = client_of(request)
    if body.group_size is not None and body.group_id is None:
        raise InvalidRequest("group_size needs a group_id", param="group_size")
    spec, created = await gateway.sessions.open(_spec_of(body, gateway, caller), caller)
    known = None if created else await gateway.writer.load_for_call(spec.session_id)
    ticket = _new_session(gateway, spec, request)
    if known is not None:
        ticket["expires_at"] = known.expires_at
    return JSONResponse(ticket, 201 if created else 200)


@router.post("/groups", status_code=201, responses={200: {"model": NewGroup}, 201: {"model": NewGroup}})
async def create_group(body: GroupBody, request: Request) -> Response:
    """Open a group: one task, sampled `size` times.

    A repeated request with the same group id and body gets the same sessions and keys (200).
    """
    gateway, caller = client_of(request)
    if body.session_id is not None:
        raise InvalidRequest("the gateway chooses the ids of a group's sessions", param="session_id")
    if body.group_size not in (None, body.size):
        raise InvalidRequest("group_size and size differ", param="group_size")
    group_id = body.group_id or f"g-{new_id()}"
    named = body.model_copy(update={"group_id": group_id, "group_size": body.size})
    asked = [_spec_of(named, gateway, caller) for _ in range(body.size)]
    members, created = await gateway.sessions.open_group(asked, repeated=body.group_id is not None)
    tickets = [_new_session(gateway, head.spec, request) for head in members]
    for ticket, head in zip(tickets, members, strict=True):
        ticket["expires_at"] = head.expires_at
    notice = ALONE if body.size == 1 else None
    group = {"group_id": group_id, "sessions": tickets, "notice": notice}
    return JSONResponse(group, 201 if created else 200)


@router.get("/sessions/{session_id}", responses={200: {"model": SessionShape}})
async def read_session(
    session_id: str,
    request: Request,
    tokens: bool = False,
    text: bool = False,
    token_texts: bool = False,
    turn_id: Annotated[list[str], Query()] = [],  # noqa: B006 - FastAPI copies it
    token_start: Annotated[int, Query(ge=0)] = 0,
    token_end: Annotated[int | None, Query(ge=0)] = None,
    messages: bool = False,
    ends: bool = False,
    text_limit: Annotated[int, Query(ge=1, le=MOST_TEXT)] = MOST_TEXT,
) -> Response:
    """The session with its turns; `tokens=true` adds ids, logprobs and what was trained, `text=true` their
    text, `token_texts=true` the text of each token, and `messages=true` the messages that the turn adds, each
    text with at most `text_limit` characters. `turn_id` chooses turns, `ends=true` the first and the last;
    `token_start` and `token_end` a part of the tokens of one turn."""
    gateway, caller = client_of(request)
    window = TokenWindow(token_start, token_end)
    shown = Shown(tokens, text, token_texts, turn_id, window, messages, ends, text_limit)
    shown.check()
    head = await gateway.sessions.head(session_id, caller)
    verdict = await gateway.sessions.verdict(head)
    rewards = await gateway.sessions.group_rewards(head, verdict)
    facts = (head, caller, verdict, gateway.settings.model_name, gateway.renderer)
    if not (token_texts or messages):
        return JSONResponse(session_view(*facts, shown, rewards))
    # Decoding tokens one by one and reading messages take long, and other calls go on meanwhile.
    return JSONResponse(await asyncio.to_thread(session_view, *facts, shown, rewards))


@router.delete("/sessions/{session_id}", responses={200: {"model": DeletedSession}})
async def delete_session(session_id: str, request: Request) -> Response:
    """Remove every copy of the session. Its id cannot be used again."""
    gateway, caller = client_of(request)
    tombstone = await gateway.deleter.delete_session(await gateway.sessions.stored_id(session_id, caller))
    if tombstone is None:  # another request has just deleted it
        raise await gateway.sessions.missing(session_id, caller)
    deleted = {"turns": tombstone.turns, "rewards": tombstone.rewards}
    return JSONResponse({"session_id": session_id, "deleted": deleted})


def _spec_of(body: SessionBody, gateway: GatewayParts, caller: Caller) -> SessionSpec:
    """The session that a body asks for; the settings give the values that it leaves out."""
    gateway.renderer.thinking(effort_of(body.reasoning_effort, "reasoning_effort"), "reasoning_effort")
    named = None if body.policy is None else policy_name(body.policy, "policy")
    spec = gateway.sessions.new_spec(caller, body.session_id)
    return msgspec.structs.replace(
        spec,
        task_id=body.task_id,
        group_id=body.group_id,
        group_size=body.group_size,
        policy=body.policy,
        user=body.user,
        # A version is named for evaluation, and an adapter is not what the trainer trains.
        train=body.train and (named is None or (named.version is None and named.adapter is None)),
        train_side_calls=spec.train_side_calls if body.train_side_calls is None else body.train_side_calls,
        ttl_s=spec.ttl_s if body.ttl_s is None else body.ttl_s,
        metadata=body.metadata,
        lineage=body.lineage,
        sampling=_sampling_of(body.sampling, spec.sampling),
        reasoning_effort=body.reasoning_effort or spec.reasoning_effort,
        thinking=body.thinking,
    )


def _sampling_of(body: SamplingBody, defaults: SamplingPolicy) -> SamplingPolicy:
    return SamplingPolicy.of(
        body.mode or defaults.named_mode,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        max_tokens=body.max_tokens,
    )


def _new_session(gateway: GatewayParts, spec: SessionSpec, request: Request) -> NewSession:
    """The reply for a new session: its address and key for an OpenAI client, and its facts."""
    base_url = gateway.settings.public_url or str(request.base_url).rstrip("/")
    return {
        "session_id": spec.shown_id,
        "api_key": gateway.identities.session_key(spec.session_id, spec.owner),
        "base_url": f"{base_url}/sessions/{spec.shown_id}/v1",
        "group_id": spec.shown_group,
        "task_id": spec.task_id,
        "policy": spec.policy or gateway.settings.model_name,
        "state": "open",
        "created_at": spec.created_at,
        "expires_at": spec.created_at + spec.ttl_s,
    }


@router.post("/sessions/{session_id}/heartbeat", responses={200: {"model": HeartbeatReply}})
async def extend_session(session_id: str, request: Request) -> Response:
    """Let the session expire `ttl_s` from now. Its session key suffices; 409 once the session has ended."""
    gateway = parts_of(request)
    caller = caller_in(request.scope)
    head = await gateway.sessions.head(session_id, caller)
    if refusal := refusal_of(head):
        raise refusal
    gateway.admission.check_call(head.spec.owner)
    try:
        expires_at = await gateway.writer.heartbeat(head.spec.session_id, clock.now())
    except SessionClosed as error:  # it ended since it was read
        raise StateConflict(str(error), code="session_finished") from error
    return JSONResponse({"session_id": session_id, "expires_at": max(expires_at, head.expires_at)})
