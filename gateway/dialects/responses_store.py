"""Stores responses for `previous_response_id` and for references to their items.

A turn's record has tokens; this store has the messages, until `ttl_s` after the last response. A response is
stored without the messages of the responses that it continues, even if the client sends all messages again.

response ──▶ {messages of its call, items of its answer, ids of the responses before it} ──▶ Redis
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from gateway.conversations.digests import chain
from gateway.dialects.base import RecordedAnswer
from gateway.dialects.responses_input import messages_of
from gateway.dialects.responses_wire import PREFIX, Item
from gateway.errors import ObjectNotFound
from gateway.generations.generation import Generation
from gateway.language.chat_messages import Message
from gateway.sessions.identity import Caller
from rollout_queue.contract.errors import SessionDeleted
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

RESPONSE_ID = re.compile(PREFIX + "[0-9a-f]{32}")
ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_[0-9]+)?")
"""The id of an item contains that of its response."""
MAX_PREVIOUS = 64
"""A call reads at most this many earlier responses. After them, a response stores its whole conversation."""
MAX_TTL_S = 30 * 86400.0
"""Limit on a key's time to live: Redis' 64-bit number of milliseconds would overflow."""

KEEP = """
-- KEYS: session, response, earlier responses…   ARGV: record, time to live in ms
-- Deleting a session deletes its responses, so a response of a deleted session is not stored.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
for before = 3, #KEYS do redis.call('PEXPIRE', KEYS[before], ARGV[2]) end
return 1
"""


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


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation up to a stored response."""

    responses: Sequence[str] = ()
    """Ids, oldest first."""
    length: int = 0
    """Number of its messages."""
    messages: Sequence[Message] = ()
    session_id: str | None = None


class ResponseStore:
    """The stored responses that one caller may read."""

    def __init__(self, redis: Redis, caller: Caller) -> None:
        self._redis = redis
        self._caller = caller

    async def conversation(self, response_id: str) -> StoredConversation:
        """The conversation that ends with this response.

        Raises ObjectNotFound when it is not stored, or belongs to another caller.
        """
        last = (await self._load([response_id])).get(response_id)
        earlier = {} if last is None else await self._load(last.before)
        if last is None or len(earlier) < len(last.before):
            raise ObjectNotFound(
                f"no response {response_id!r} is stored",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages: list[Message] = []
        for each in [*(earlier[name] for name in last.before), last]:
            messages += [*each.messages, *messages_of(each.output)]
        return StoredConversation([*last.before, response_id], len(messages), messages, last.session_id)

    async def items(self, item_ids: Iterable[str]) -> dict[str, Item]:
        """The stored items among `item_ids`, by id."""
        responses = {PREFIX + found[1] for name in item_ids if (found := ITEM_ID.fullmatch(name))}
        loaded = await self._load(sorted(responses))
        return {item["id"]: item for each in loaded.values() for item in each.output}

    async def keep(
        self, past: StoredConversation, instructed: bool, recorded: RecordedAnswer, output: list[Item]
    ) -> None:
        """Store one response; `instructed` says whether its call begins with `instructions`.

        Raises StorageUnavailable; SessionDeleted when the session was deleted after its answer was recorded.
        """
        generation = recorded.generation
        spec = generation.head.spec
        messages = generation.call.messages[1:] if instructed else generation.call.messages
        if not past.responses:
            past = await self._repeated(generation, instructed)
        if len(past.responses) >= MAX_PREVIOUS:
            past = StoredConversation()
        response = StoredResponse(
            owner=spec.owner,
            session_id=spec.session_id,
            messages=list(messages[past.length :]),
            output=output,
            length=len(messages) + 1,
            instructed=instructed,
            before=list(past.responses),
        )
        ttl_ms = int(min(spec.ttl_s, MAX_TTL_S) * 1000) or 1
        names = [keys.session(spec.session_id), keys.response(generation.completion_id)]
        names += map(keys.response, past.responses)
        script = self._redis.register_script(KEEP)
        if not await stored(script(names, [msgspec.msgpack.encode(response), ttl_ms])):
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
        return StoredConversation([*response.before, name], response.length)

    async def _load(self, response_ids: Sequence[str]) -> Mapping[str, StoredResponse]:
        """The stored responses among `response_ids` that the caller may read, by id."""
        names = [name for name in response_ids if RESPONSE_ID.fullmatch(name)]
        if not names:
            return {}
        found: list[bytes | None] = await stored(self._redis.mget([keys.response(name) for name in names]))
        loaded = {
            name: msgspec.msgpack.decode(raw, type=StoredResponse)
            for name, raw in zip(names, found, strict=True)
            if raw is not None
        }
        return {name: each for name, each in loaded.items() if self._may_read(each)}

    def _may_read(self, response: StoredResponse) -> bool:
        if self._caller.session_id is not None:
            return response.session_id == self._caller.session_id
        return self._caller.role == "admin" or response.owner == self._caller.owner
