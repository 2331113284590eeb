"""Finds the session that a call belongs to, by the first of these clues that the call gives.

path ▸ header ▸ body metadata ▸ stored response that the call continues ▸ session key
     ▸ id that the agent's harness adds to its calls ▸ open session whose turn the call continues

If it gives none, a new session is opened.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain as joined
from typing import Any

import msgspec

from gateway.callers.admission import Admission
from gateway.callers.identity import CLAUDE_CODE, Caller
from gateway.callers.identity import names as is_named
from gateway.errors import InvalidRequest, NotPermitted, StateConflict
from gateway.generations.digests import chain, continuation_digests
from gateway.generations.generation import Call
from gateway.language.chat_messages import Message
from gateway.sessions.session_service import SessionService
from rollout_queue import clock
from rollout_queue.contract.errors import UserDeleted
from rollout_queue.contract.head import SessionHead
from rollout_queue.protocol.message import ID
from rollout_queue.redis.stream_writer import StreamWriter

NAME_HEADERS = (
    "x-session-id",
    "x-weir-session-id",
    "x-litellm-session-id",
    "session-id",
    "session_id",
)
HARNESS_HEADERS = ("x-claude-code-session-id", "x-opencode-session", "x-litellm-trace-id")
"""Agents' harnesses send the id of their own conversation in these, even when a session was given to them."""
OF_HARNESSES = {"originator": ("session-id", "session_id"), "x-session-affinity": ("x-session-id",)}
"""Only Codex and opencode send the header that is the key. The value: the headers in which that harness sends
the id of its own conversation."""
HEADERS = (*NAME_HEADERS, *HARNESS_HEADERS, *OF_HARNESSES)
TOOL_CALL_ID = re.compile(r"call_([0-9a-f]{32})_\d+")
"""The id of a tool call contains the id of the turn that made it."""


class SessionClues(msgspec.Struct, frozen=True):
    """What a request says about the session that it belongs to."""

    call: Call
    """The request's first call: its messages may continue a turn."""
    headers: Mapping[str, str]
    """By name, in lower case."""
    path_id: str | None = None
    """The session in the request's path."""
    metadata: Mapping[str, Any] | None = None
    """The client's `metadata`."""
    previous_id: str | None = None
    """The session of the stored response that the request continues."""
    repeated_digest: str | None = None
    """The digest of the request if it is marked as a retry, else None."""


class ClaudeCodeUser(msgspec.Struct, frozen=True):
    """The JSON text that newer versions of Claude Code send as `metadata.user_id`."""

    session_id: str | None = None


class SessionResolver:
    """Finds the session of a call, or opens a new one."""

    def __init__(self, sessions: SessionService, writer: StreamWriter, admission: Admission) -> None:
        self._sessions = sessions
        self._writer = writer
        self._admission = admission

    async def check(self, clues: SessionClues, caller: Caller) -> None:
        """Count the call, and raise what `resolve` would, before the call's images are read.

        No session is opened. `resolve` then takes the call as `counted`.
        """
        session_id = _session_id(clues, caller)
        await self._admit(clues, caller)
        if session_id is None:
            return
        head = await self._sessions.find(session_id, caller, self._writer.load_for_call)
        if head is not None:
            await self._check_head(head, caller, counted=False)
        elif caller.session_id is not None:
            raise await self._sessions.missing(session_id, caller)

    async def resolve(self, clues: SessionClues, caller: Caller, counted: bool = False) -> SessionHead:
        """The session that takes the call. `counted`: `check` has counted it.

        Raises InvalidRequest for a malformed id, NotPermitted for a session key with the id of another
        session, ObjectNotFound for a session of another owner, StateConflict for a session that ended,
        Deleted for a deleted session and for a user whose data was deleted, UnknownCaller for the key of a
        session whose client key was revoked, and LimitReached.
        """
        session_id = _session_id(clues, caller)
        if not counted:
            await self._admit(clues, caller)
        if session_id is None:
            head = await self._continued(caller, clues)
            return head or await self._new(caller)
        found = await self._sessions.find(session_id, caller, self._writer.load_for_call)
        head = found or await self._open_named(session_id, caller)
        await self._check_head(head, caller, counted)
        return head

    async def _admit(self, clues: SessionClues, caller: Caller) -> None:
        """Count a call of a client key. Raises LimitReached, and UserDeleted."""
        if caller.session_id is None:  # checked first, so that a refused call opens no session
            self._admission.check_call(caller.owner)
        user = clues.call.user
        if user is not None and await self._writer.user_deleted(user):
            raise UserDeleted

    async def _check_head(self, head: SessionHead, caller: Caller, counted: bool) -> None:
        """Raise if the session takes no call, and count a call of a session key."""
        self._sessions.check_usable(head, caller)
        if refusal := await self._refusal(head):
            raise refusal
        if caller.session_id is not None and not counted:  # counts for the client key that opened the session
            self._admission.check_call(head.spec.owner)

    async def _refusal(self, head: SessionHead) -> StateConflict | None:
        """As `refusal_of`; a session that seems expired is read again, because a cached head may lack a
        recent heartbeat."""
        refusal = refusal_of(head)
        if refusal is not None and head.state == "open":
            return refusal_of(await self._writer.load(head.spec.session_id) or head)
        return refusal

    async def _continued(self, caller: Caller, clues: SessionClues) -> SessionHead | None:
        """The open session of this key that has a turn which the call continues or repeats, if any."""
        call, digests = clues.call, list[str]()
        if any(message["role"] == "assistant" for message in call.messages):
            digests = continuation_digests(call.messages, chain(call.tools, call.messages))
        if clues.repeated_digest is not None:
            digests.append(clues.repeated_digest)
        if not digests:
            return None
        head = await self._by_digest(caller.owner, digests, _calling_turn(call.messages))
        return head if head is not None and await self._refusal(head) is None else None

    async def _by_digest(self, owner: str, digests: list[str], turn_ids: list[str]) -> SessionHead | None:
        """The session of the first digest that is known, if any.

        If several sessions have that digest, this is the one with a turn of `turn_ids`, else the newest.
        """
        found = await self._writer.find_continuations(owner, digests + turn_ids)
        known = ((digest, name) for digest, name in zip(digests, found, strict=False) if name is not None)
        digest, newest = next(known, (None, None))
        if newest is None:
            return None
        for session_id in found[len(digests) :]:
            head = await self._writer.load_for_call(session_id) if session_id not in (None, newest) else None
            if head is not None and any(turn.reply_digest == digest for turn in head.turns):
                return head
        return await self._writer.load_for_call(newest)

    async def _new(self, caller: Caller) -> SessionHead:
        """A new session for a call that names none.

        If open sessions are limited, it is stored at once. Otherwise `Exchange` or its first turn stores it,
        so that a refused call leaves no session behind.
        """
        spec = self._sessions.new_spec(caller, inferred=True, implicit=True)
        if self._admission.counts_sessions:
            await self._sessions.open(spec, caller)
            return SessionHead(spec=spec)
        await self._admission.check_session([spec])
        return SessionHead(spec=spec, stored=False)

    async def _open_named(self, session_id: str, caller: Caller) -> SessionHead:
        """Open a session under the id that the call names. A session key cannot open one."""
        if caller.session_id is not None:
            raise await self._sessions.missing(session_id, caller)
        asked = self._sessions.new_spec(caller, session_id, implicit=True)
        spec, created = await self._sessions.open(asked, caller)
        if created:
            return SessionHead(spec=spec)
        # Another call or client has just opened it.
        return await self._writer.load_for_call(spec.session_id) or SessionHead(spec=spec)


def _session_id(clues: SessionClues, caller: Caller) -> str | None:
    """The session that the request names, or whose key it has; None if neither. Raises InvalidRequest and
    NotPermitted as `resolve` does."""
    names = _names(clues)
    if caller.session_id is not None and not all(is_named(name, caller.session_id) for name in names):
        raise NotPermitted("the session key opens another session than the one named")
    return names[0] if names else caller.session_id or _harness_id(clues)


def _names(clues: SessionClues) -> list[str]:
    """Every session that the request names, by precedence. Raises InvalidRequest for a malformed id."""
    metadata = clues.metadata or {}
    of_harness = _harness_headers(clues)
    headers = [name for name in NAME_HEADERS if name not in of_harness]
    given = [clues.path_id, *map(clues.headers.get, headers)]
    given += [metadata.get("session_id"), clues.previous_id]
    names = [name for name in given if name not in (None, "")]
    for name in names:
        if not (isinstance(name, str) and ID.fullmatch(name)):
            raise InvalidRequest(f"not a session id: {name!r}", param="session_id")
    return names


def _harness_id(clues: SessionClues) -> str | None:
    """The id of the harness's own conversation, if any. It counts only if the request names no session."""
    given = [_claude_code_session(clues.metadata or {}), *map(clues.headers.get, _harness_headers(clues))]
    return next((each for each in given if each and ID.fullmatch(each)), None)


def _harness_headers(clues: SessionClues) -> list[str]:
    sent = [names for mark, names in OF_HARNESSES.items() if mark in clues.headers]
    return [*HARNESS_HEADERS, *joined.from_iterable(sent)]


def _claude_code_session(metadata: Mapping[str, Any]) -> str | None:
    """The session in Claude Code's `metadata.user_id`: `user_…_session_{uuid}`, or an object as JSON text."""
    user_id = metadata.get("user_id")
    if not isinstance(user_id, str):
        return None
    if named := CLAUDE_CODE.fullmatch(user_id):
        return named[1]
    with suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return msgspec.json.decode(user_id, type=ClaudeCodeUser).session_id
    return None


def _calling_turn(messages: Sequence[Message]) -> list[str]:
    """The id of the turn that made the last tool calls in the messages; empty if they have no turn's id."""
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if message["role"] == "assistant" and (made := TOOL_CALL_ID.fullmatch(str(call.get("id")))):
                return [made[1]]
    return []


def refusal_of(head: SessionHead) -> StateConflict | None:
    """Why a session takes no call; None if it takes calls."""
    state, verdict = head.state, head.verdict
    overdue = state == "open" and head.expires_at < clock.now()
    if overdue or (verdict is not None and verdict.code == "expired"):
        return StateConflict(f"session {head.spec.shown_id} has expired", code="session_expired")
    if state != "open":
        return StateConflict(f"session {head.spec.shown_id} is finished", code="session_finished")
    return None
