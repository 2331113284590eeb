"""Which session a call belongs to; first match wins.

path ▸ session key ▸ header ▸ body metadata ▸ what the harness stamps on its calls by itself
     ▸ the open session whose turn it continues ▸ a new one
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from gateway.admission.admission import Admission
from gateway.conversations.conversation import chain, continuation_digests
from gateway.dialects.base import Ask
from gateway.edge.request import Arrival
from gateway.errors import InvalidRequest, NotPermitted, ObjectNotFound, StateConflict
from gateway.generations.generation import Call
from gateway.language.render import Message
from gateway.sessions.identity import Caller
from gateway.sessions.sessions import SessionBody, Sessions
from gateway.sessions.user_names import CLAUDE_CODE
from rollout_queue.contract.errors import UserDeleted
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.stream import StreamWriter
from rollout_queue.protocol.ids import ID

NAMES = (
    "x-session-id",
    "x-weir-session-id",
    "x-litellm-session-id",
    "session-id",
    "session_id",
)
STAMPS = ("x-claude-code-session-id", "x-opencode-session", "x-litellm-trace-id")
"""Harnesses say by these which of their own conversations a call is of, whatever session they are given."""
HEADERS = (*NAMES, *STAMPS)
CALLED = re.compile(r"call_([0-9a-f]{32})_\d+")
"""The id of a tool call that a turn made: it names the turn."""


class ClaudeCodeUser(msgspec.Struct, frozen=True):
    """What newer versions write into `metadata.user_id`."""

    session_id: str | None = None


class Belonging:
    """Finds, or opens, the session of a call."""

    def __init__(self, sessions: Sessions, writer: StreamWriter, admission: Admission) -> None:
        self._sessions = sessions
        self._writer = writer
        self._admission = admission

    async def session_of(
        self,
        arrival: Arrival,
        caller: Caller,
        ask: Ask,
        repeats: str | None = None,
    ) -> SessionHead:
        """`repeats` is the digest of the request, where the call is marked as a retry.

        Raises NotPermitted for a session key that names another session, StateConflict for a session that
        ended, Deleted for one that was deleted and for a user whose data was.
        """
        names = _names(arrival, ask)
        if caller.session_id is not None and any(name != caller.session_id for name in names):
            raise NotPermitted("the session key opens another session than the one named")
        if caller.session_id is None:  # before a session is opened for a call that is refused
            self._admission.check_call(caller.owner)
        user = ask.calls[0].user
        if user is not None and await self._writer.user_deleted(user):
            raise UserDeleted
        session_id = names[0] if names else caller.session_id or _stamp(arrival, ask)
        if session_id is None:
            head = await self._continued(caller, ask.calls[0], repeats)
            return head or await self._begun(caller)
        head = await self._writer.load_for_call(session_id) or await self._opened(session_id, caller)
        if not caller.owns(head.spec):
            raise ObjectNotFound(f"no session {session_id!r}")
        if refusal := await self._refused(head):
            raise refusal
        if caller.session_id is not None:  # a session key counts for the client key that made the session
            self._admission.check_call(head.spec.owner)
        return head

    async def _refused(self, head: SessionHead) -> StateConflict | None:
        """Why a session takes no call. What is known from memory may be older than its last heartbeat."""
        refusal = refusal_of(head)
        if refusal is not None and head.state == "open":
            return refusal_of(await self._writer.load(head.spec.session_id) or head)
        return refusal

    async def _continued(self, caller: Caller, call: Call, repeats: str | None) -> SessionHead | None:
        """The open session of this key whose turn the call continues, or asks for again."""
        digests: list[str] = []
        if any(message["role"] == "assistant" for message in call.messages):
            digests = continuation_digests(call.messages, chain(call.tools, call.messages))
        if repeats is not None:
            digests.append(repeats)
        if not digests:
            return None
        head = await self._answered(caller.owner, digests, _called(call.messages))
        return head if head is not None and await self._refused(head) is None else None

    async def _answered(self, owner: str, digests: list[str], called: list[str]) -> SessionHead | None:
        """The session of the first digest that is known. Of several that were answered the same, the one
        that made the tool calls which the client names; else the newest."""
        found = await self._writer.find_continuations(owner, digests + called)
        known = ((digest, name) for digest, name in zip(digests, found, strict=False) if name is not None)
        digest, newest = next(known, (None, None))
        if newest is None:
            return None
        for meant in found[len(digests) :]:
            head = await self._writer.load_for_call(meant) if meant not in (None, newest) else None
            if head is not None and any(turn.reply_digest == digest for turn in head.turns):
                return head
        return await self._writer.load_for_call(newest)

    async def open(self, head: SessionHead, caller: Caller) -> None:
        """Open the session of a call that was understood: who streams hears its id before the first turn."""
        await self._sessions.open(head.spec, caller)

    async def _begun(self, caller: Caller) -> SessionHead:
        """A new session that nobody named; where sessions are counted, it takes its place at once. Elsewhere
        it is opened by a call that is not refused: `open` does, or the first turn.
        """
        spec = self._sessions.unnamed(caller)
        if self._admission.counts_sessions:
            await self._sessions.open(spec, caller)
            return SessionHead(spec=spec)
        await self._admission.check_session([spec])
        return SessionHead(spec=spec, stored=False)

    async def _opened(self, session_id: str, caller: Caller) -> SessionHead:
        """A new session, by the name that the call gave it."""
        if caller.session_id is not None:
            raise await self._sessions.missing(session_id, caller)
        body = SessionBody(session_id=session_id)
        spec, _ = await self._sessions.open(self._sessions.spec_of(body, caller), caller)
        return SessionHead(spec=spec)


def _names(arrival: Arrival, ask: Ask) -> list[str]:
    """Every session that the call names, the one that counts first. Raises InvalidRequest for a bad id."""
    metadata = ask.metadata or {}
    given = [arrival.session_id, *map(arrival.headers.get, NAMES)]
    given += [metadata.get("session_id"), ask.session_id]
    names = [name for name in given if name not in (None, "")]
    for name in names:
        if not (isinstance(name, str) and ID.fullmatch(name)):
            raise InvalidRequest(f"not a session id: {name!r}", param="session_id")
    return names


def _stamp(arrival: Arrival, ask: Ask) -> str | None:
    """The harness's own conversation. It says nothing where somebody has named a session."""
    given = [_claude_code_session(ask.metadata or {}), *map(arrival.headers.get, STAMPS)]
    return next((stamp for stamp in given if stamp and ID.fullmatch(stamp)), None)


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


def _called(messages: Sequence[Message]) -> list[str]:
    """The turn whose tool calls come last in the history, by their ids; at most one."""
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if message["role"] == "assistant" and (made := CALLED.fullmatch(str(call.get("id")))):
                return [made[1]]
    return []


def refusal_of(head: SessionHead) -> StateConflict | None:
    """Why a session takes no call; None when it does."""
    session_id, verdict = head.spec.session_id, head.verdict
    overdue = head.state == "open" and head.expires_at < time.time()
    if overdue or (verdict is not None and verdict.code == "expired"):
        return StateConflict(f"session {session_id} has expired", code="session_expired")
    if head.state != "open":
        return StateConflict(f"session {session_id} is finished", code="session_finished")
    return None
