"""Stores responses, for `GET /v1/responses/{id}`, `previous_response_id` and references to their items.

A turn's record has tokens; this store has the messages, until `ttl_s` after the last response. A response
that continues others does not repeat what they store. It leaves out their messages, even if the client sends
all messages again, and the instructions and tools if they are the same.

response ──▶ {messages of its call, items of its answer, other fields, ids of earlier responses} ──▶ Redis

The record of one response in Redis.

Stores a response while its answer is made in the background, so that any gateway can show or cancel it.

begin ──▶ in_progress ──end──▶ completed       cancel ──▶ cancelled: the gateway that makes the answer notices
                      ──fail──▶ failed         no sign of life of that gateway for LEASE_S ──▶ told as failed
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1, sha256
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from gateway.callers.identity import Caller, names
from gateway.dialects.base import RecordedAnswer
from gateway.dialects.responses_input import items_of, messages_of
from gateway.dialects.responses_wire import PREFIX, Item, ResponseState
from gateway.dialects.wire import JsonObject, encode
from gateway.errors import InvalidRequest, ObjectNotFound, invalid
from gateway.generations.digests import chain
from gateway.generations.generation import Generation
from gateway.language.chat_messages import Message
from rollout_queue.contract.errors import SessionDeleted
from rollout_queue.http.errors import ApiError
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Script

IN_PROGRESS = "in_progress"
"""The status of a response whose answer is being made in the background."""
SHARED = ("instructions", "tools", "text", "tool_choice", "reasoning", "metadata")
"""Fields that most responses of a conversation repeat."""


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one response in Redis."""

    owner: str
    session_id: str
    messages: list[Message]
    """The messages that its call added, without `instructions`, which apply to one call only."""
    output: list[Item]
    length: int
    """The number of messages of the whole conversation, with the answer."""
    instructed: bool = False
    before: list[str] = []
    """Ids of the responses that it continues, oldest first."""
    told: JsonObject = {}
    """The response's other fields, as the client got them; without token ids, which the turn's record has."""
    shared_digest: bytes = b""
    """The `digest_of` the response."""
    shared_from: str = ""
    """The id of the earlier response that stores these fields; empty if `told` has them."""

    @property
    def status(self) -> str:
        return str(self.told.get("status", "completed"))

    @property
    def fingerprint(self) -> str:
        """Identifies the record: Redis replaces it only if it is still the same."""
        return sha1(packed(self), usedforsecurity=False).hexdigest()


def packed(record: StoredResponse) -> bytes:
    """As msgpack; as JSON where a client gave a number of more than 64 bits, which msgpack does not have."""
    try:
        return msgspec.msgpack.encode(record)
    except OverflowError:
        return encode(record)


def unpacked(stored: bytes) -> StoredResponse:
    """The record of which `packed` made these bytes. Raises msgspec.MsgspecError."""
    if stored.startswith(b"{"):  # no map of msgpack begins with this byte
        return msgspec.json.decode(stored, type=StoredResponse)
    return msgspec.msgpack.decode(stored, type=StoredResponse)


def digest_of(told: JsonObject) -> bytes:
    """Identifies the values of the fields in `SHARED`."""
    return sha256(encode([told[name] for name in SHARED])).digest()[:16]


RESPONSE_ID = re.compile(PREFIX + "[0-9a-f]{32}")
ITEM_ID = re.compile(r"(?:rs|msg|fc|fco)_([0-9a-f]{32})(?:_(?:in)?[0-9]+)?")
"""The id of an item contains that of its response."""
MAX_PREVIOUS = 64
"""A call reads at most this many earlier responses. After them, a response stores its whole conversation."""
ENDED = ("completed", "incomplete")
MAX_TTL_S = 30 * 86400.0
"""Limit on a key's time to live: Redis' 64-bit number of milliseconds would overflow."""

KEEP = Script[int]("""
-- KEYS: session, response, earlier responses…   ARGV: record, time to live in ms, SHA-1 of the former record
-- Deleting a session deletes its responses, so a response of a deleted session is not stored.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
-- A response that was cancelled or deleted while its answer was made stays so.
if ARGV[3] ~= '' and redis.sha1hex(redis.call('GET', KEYS[2]) or '') ~= ARGV[3] then return 2 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
for before = 3, #KEYS do redis.call('PEXPIRE', KEYS[before], ARGV[2]) end -- bounded: MAX_PREVIOUS
return 1
""")


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation up to a stored response."""

    responses: Sequence[str] = ()
    """Ids, oldest first."""
    length: int = 0
    """Number of its messages."""
    messages: Sequence[Message] = ()
    session_id: str | None = None
    last: StoredResponse | None = None


class ResponseStore:
    """The stored responses that one caller may read."""

    def __init__(self, redis: Redis, caller: Caller) -> None:
        self._redis = redis
        self._caller = caller

    async def conversation(self, response_id: str) -> StoredConversation:
        """The conversation that ends with this response.

        Raises ObjectNotFound when it is not stored, or belongs to another caller.
        """
        missing = ObjectNotFound(
            f"no response {response_id!r} is stored",
            param="previous_response_id",
            code="previous_response_not_found",
        )
        last = (await self._load([response_id])).get(response_id)
        if last is None:
            raise missing
        if last.status not in ENDED:
            raise invalid(
                "previous_response_id", f"the response is {last.status}", code="response_not_complete"
            )
        messages: list[Message] = []
        for each in [*await self._earlier(last, missing), last]:
            messages += [*each.messages, *messages_of(each.output)]
        responses = [*last.before, response_id]
        return StoredConversation(responses, len(messages), messages, last.session_id, last)

    async def find(self, response_id: str, session_id: str | None) -> StoredResponse:
        """The stored response, of this session if one is given. Raises ObjectNotFound."""
        found = (await self._load([response_id])).get(response_id)
        named = session_id is None or (found is not None and names(session_id, found.session_id))
        if found is None or not found.told or not named:
            raise not_found(response_id)
        return found

    async def body(self, found: StoredResponse) -> JsonObject:
        """The response as the client got it. Raises ObjectNotFound if one that it continues was deleted."""
        told = dict(found.told)
        if found.shared_from:
            shared = (await self._load([found.shared_from])).get(found.shared_from)
            if shared is None:
                raise not_found(found.shared_from)
            told |= {name: shared.told[name] for name in SHARED}
        return {**told, "output": found.output}

    async def input_items(self, response_id: str, found: StoredResponse) -> list[Item]:
        """All items before the answer, those of earlier responses included, oldest first.

        Raises ObjectNotFound if one of these was deleted.
        """
        earlier = await self._earlier(found, not_found(response_id))
        items: list[Item] = []
        for name, each in zip(found.before, earlier, strict=True):
            items += [*_input_of(name, each), *each.output]
        return [*items, *_input_of(response_id, found)]

    async def delete(self, response_id: str) -> None:
        """Delete a stored response. The record of its turn stays."""
        await stored(self._redis.delete(key_names.response(response_id)))

    async def items(self, item_ids: Iterable[str]) -> dict[str, Item]:
        """The stored items among `item_ids`, by id."""
        responses = {PREFIX + found[1] for name in item_ids if (found := ITEM_ID.fullmatch(name))}
        loaded = await self._load(sorted(responses))
        return {
            item["id"]: item
            for name, each in loaded.items()
            for item in [*_input_of(name, each), *each.output]
        }

    async def keep(
        self,
        past: StoredConversation,
        instructed: bool,
        generation: Generation,
        output: list[Item],
        told: JsonObject,
        replacing: StoredResponse | None = None,
    ) -> None:
        """Store one response; `instructed` says whether its call begins with `instructions`, `told` has the
        fields of the response beside its output. With `replacing`, store it only in place of that record.

        Raises StorageUnavailable; SessionDeleted when the session was deleted after its answer was recorded.
        """
        spec = generation.head.spec
        messages = generation.call.messages[1:] if instructed else generation.call.messages
        if not past.responses:
            past = await self._repeated(generation, instructed)
        if len(past.responses) >= MAX_PREVIOUS:
            past = StoredConversation()
        shared_from, digest = "", digest_of(told)
        if past.last is not None and past.last.shared_digest == digest:
            shared_from = past.last.shared_from or past.responses[-1]
        dropped = ("output", *SHARED) if shared_from else ("output",)
        response = StoredResponse(
            owner=spec.owner,
            session_id=spec.session_id,
            messages=list(messages[past.length :]),
            output=output,
            length=len(messages) + 1,
            instructed=instructed,
            before=list(past.responses),
            told={name: value for name, value in told.items() if name not in dropped},
            shared_digest=digest,
            shared_from=shared_from,
        )
        ttl_ms = int(min(spec.ttl_s, MAX_TTL_S) * 1000) or 1
        names = [key_names.session(spec.session_id), key_names.response(generation.completion_id)]
        names += map(key_names.response, past.responses)
        former = "" if replacing is None else replacing.fingerprint
        if not await KEEP.run(self._redis, names, [packed(response), ttl_ms, former]):
            raise SessionDeleted(spec.session_id)

    async def _repeated(self, generation: Generation, instructed: bool) -> StoredConversation:
        """The stored conversation with which the call's messages begin: its response ids and its length."""
        parent, call = generation.prompt.parent, generation.call
        name = parent.completion_id if parent is not None else ""
        response = (await self._load([name])).get(name)
        if parent is None or response is None or response.instructed != instructed:
            return StoredConversation()
        repeated = chain(call.tools, call.messages[: response.length + instructed])[-1]
        if repeated.hex() != parent.reply_digest:
            return StoredConversation()
        return StoredConversation([*response.before, name], response.length, last=response)

    async def _earlier(self, last: StoredResponse, missing: ObjectNotFound) -> list[StoredResponse]:
        """The responses that this one continues, oldest first. Raises `missing` if not all are stored."""
        earlier = await self._load(last.before)
        if len(earlier) < len(last.before):
            raise missing
        return [earlier[name] for name in last.before]

    async def _load(self, response_ids: Sequence[str]) -> Mapping[str, StoredResponse]:
        """The stored responses among `response_ids` that the caller may read, by id."""
        names = [name for name in response_ids if RESPONSE_ID.fullmatch(name)]
        if not names:
            return {}
        where = [key_names.response(name) for name in names]
        found: list[bytes | None] = await stored(self._redis.mget(where))  # bounded: MAX_PREVIOUS
        loaded = {name: unpacked(raw) for name, raw in zip(names, found, strict=True) if raw is not None}
        return {name: each for name, each in loaded.items() if self._caller.owns(each)}


def _input_of(response_id: str, response: StoredResponse) -> list[Item]:
    return items_of(response.messages, response_id.removeprefix(PREFIX))


def not_found(response_id: str) -> ObjectNotFound:
    """The error for a response that is not stored, or that the caller may not read."""
    return ObjectNotFound(f"no response {response_id[:80]!r} is stored", code="response_not_found")


UNFINISHED_TTL_S = 3600
"""How long a response without an answer is kept. No turn names it, so it may outlive its session."""
LEASE_S = 30
"""A gateway that has not renewed the record of its unfinished response for this long counts as stopped."""
STOPPED = "the gateway that made the answer has stopped"
WITHOUT_CONTENT: JsonObject = {
    "instructions": None,
    "metadata": None,
    "reasoning": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
}
"""The fields of a response without an answer that replace the contents of its request."""

BEGIN = Script[int]("""
-- KEYS: session, response   ARGV: record, time to live in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
""")
RENEW = Script[int]("""
-- KEYS: session, response   ARGV: SHA-1 of the record, time to live in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.sha1hex(redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
""")
REPLACE = Script[int]("""
-- KEYS: response   ARGV: SHA-1 of the record to replace, record, time to live in ms
if redis.sha1hex(redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
""")
TTL_MS = UNFINISHED_TTL_S * 1000

Keep = Callable[[RecordedAnswer, StoredResponse], Awaitable[None]]
"""Stores the complete response in place of a record."""


class BackgroundResponse:
    """One response that is made in the background."""

    def __init__(self, redis: Redis, head: Callable[[Generation], JsonObject], keep: Keep) -> None:
        self._redis = redis
        self._head = head
        self._keep = keep
        self._name = ""
        self._record: StoredResponse

    async def begin(self, generation: Generation) -> bytes:
        """Store the response as in progress. Returns the body of the reply. Raises StorageUnavailable."""
        spec = generation.head.spec
        state = msgspec.to_builtins(ResponseState(status=IN_PROGRESS))
        told: JsonObject = {**self._head(generation), **state}
        del told["output"]
        self._name = key_names.response(generation.completion_id)
        self._record = StoredResponse(
            spec.owner,
            spec.session_id,
            messages=[],
            output=[],
            length=0,
            told=told,
        )
        names = [key_names.session(spec.session_id), self._name]
        if not await BEGIN.run(self._redis, names, [packed(self._record), TTL_MS]):
            raise SessionDeleted(spec.session_id)
        return encode({**self._record.told, "output": []})

    async def renew(self) -> bool:
        """Returns False if it was cancelled, or was deleted, maybe with its session."""
        names = [key_names.session(self._record.session_id), self._name]
        return bool(await RENEW.run(self._redis, names, [self._record.fingerprint, TTL_MS]))

    async def end(self, recorded: RecordedAnswer) -> None:
        """Store the complete response, unless it was cancelled or deleted."""
        await self._keep(recorded, self._record)

    async def fail(self, error: ApiError) -> None:
        """Store that the answer failed, unless it was cancelled or deleted."""
        await replace(self._redis, self._name, self._record, "failed", error.message)


async def replace(
    redis: Redis, name: str, record: StoredResponse, status: str, message: str | None = None
) -> bool:
    """Store a response without an answer in place of `record`. Returns False if `record` is gone."""
    ended = msgspec.structs.replace(record, told=_told(record, status, message))
    return bool(await REPLACE.run(redis, [name], [record.fingerprint, packed(ended), TTL_MS]))


async def cancel(redis: Redis, response_id: str, found: StoredResponse) -> bool:
    """Cancel a response in the background. Returns False if it has ended.

    Raises InvalidRequest if the client waits for the response. Such a client closes the connection instead.
    """
    if not found.told.get("background"):
        message = "only a response that was created with background: true can be cancelled"
        raise InvalidRequest(message, param="response_id")
    return found.status == IN_PROGRESS and await replace(
        redis, key_names.response(response_id), found, "cancelled"
    )


async def as_of_now(redis: Redis, response_id: str, found: StoredResponse) -> StoredResponse:
    """The record; a failed one if the gateway that made its answer has stopped."""
    if found.status != IN_PROGRESS:
        return found
    left_ms = await stored(cast(Awaitable[Any], redis.pttl(key_names.response(response_id))))
    if left_ms >= TTL_MS - LEASE_S * 1000:
        return found
    return msgspec.structs.replace(found, told=_told(found, "failed", STOPPED))


def _told(record: StoredResponse, status: str, message: str | None) -> JsonObject:
    error = None if message is None else {"code": "server_error", "message": message}
    return {**record.told, **WITHOUT_CONTENT, "status": status, "error": error}
