"""What a response leaves behind for `previous_response_id` and for references to its items.

Our record keeps tokens; this keeps words, for as long as the session lives: of each response only what it
adds to the one before it. A conversation that its client sends anew each time is kept once all the same.

response ──▶ {what its call said, what it answered, the responses before it} ──▶ Redis
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from gateway.conversations.conversation import chain
from gateway.dialects.base import Answered
from gateway.dialects.responses_input import Item, messages_of
from gateway.dialects.responses_wire import PREFIX
from gateway.generations.generation import Generation
from gateway.language.render import Message
from gateway.sessions.identity import Caller
from rollout_queue.contract.errors import SessionDeleted, StorageUnavailable
from rollout_queue.http.errors import ApiError, gone, storage_unavailable
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

RESPONSE_ID = re.compile(PREFIX + "[0-9a-f]{32}")
ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_[0-9]+)?")
"""Items carry the name of their response."""
MOST_BEFORE = 64
"""A response after that many keeps its whole conversation anew, so that no call reads more than that."""
MAX_TTL_S = 30 * 86400.0
"""Redis counts a key's life in milliseconds and overflows."""

KEEP = """
-- KEYS: session, response, response before…   ARGV: kept, life in ms
-- A deletion took the words that were there; none may come after it.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
for before = 3, #KEYS do redis.call('PEXPIRE', KEYS[before], ARGV[2]) end
return 1
"""


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response, as it is kept."""

    owner: str
    session_id: str
    messages: list[Message]
    """What its call added; instructions hold for one call alone, and are not among them."""
    output: list[Item]
    length: int
    """The messages of the whole conversation, the answer included."""
    instructed: bool = False
    before: list[str] = []
    """The responses that it continues, oldest first."""


@dataclass(frozen=True, slots=True)
class Past:
    """A conversation so far."""

    responses: Sequence[str] = ()
    length: int = 0
    messages: Sequence[Message] = ()
    session_id: str | None = None


class ResponseStore:
    """The kept responses that one caller may read."""

    def __init__(self, redis: Redis, caller: Caller) -> None:
        self._redis = redis
        self._caller = caller

    async def past(self, response_id: str) -> Past:
        """The conversation that ends with this response.

        Raises ApiError 404 when it is not there any more, or is not the caller's.
        """
        last = (await self._load([response_id])).get(response_id)
        kept = {} if last is None else await self._load(last.before)
        if last is None or len(kept) < len(last.before):
            raise ApiError(
                404,
                f"no response {response_id!r} is stored",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages: list[Message] = []
        for each in [*(kept[name] for name in last.before), last]:
            messages += [*each.messages, *messages_of(each.output)]
        return Past([*last.before, response_id], len(messages), messages, last.session_id)

    async def items(self, item_ids: Iterable[str]) -> dict[str, Item]:
        """Those of the items that are there."""
        responses = {PREFIX + found[1] for name in item_ids if (found := ITEM_ID.fullmatch(name))}
        kept = await self._load(sorted(responses))
        return {item["id"]: item for each in kept.values() for item in each.output}

    async def keep(self, past: Past, instructed: bool, answered: Answered, output: list[Item]) -> None:
        """Raises ApiError 503, 410 for a session that was deleted since the answer was recorded."""
        generation = answered.generation
        spec = generation.head.spec
        said = generation.call.messages[1:] if instructed else generation.call.messages
        try:
            if not past.responses:
                past = await self._past_of(generation, instructed)
            if len(past.responses) >= MOST_BEFORE:
                past = Past()
            kept = Kept(
                owner=spec.owner,
                session_id=spec.session_id,
                messages=list(said[past.length :]),
                output=output,
                length=len(said) + 1,
                instructed=instructed,
                before=list(past.responses),
            )
            lives_ms = int(min(spec.ttl_s, MAX_TTL_S) * 1000) or 1
            named = [keys.session(spec.session_id), keys.response(generation.completion_id)]
            named += map(keys.response, past.responses)
            keep = self._redis.register_script(KEEP)
            if not await stored(keep(named, [msgspec.msgpack.encode(kept), lives_ms])):
                raise gone(SessionDeleted(spec.session_id))
        except StorageUnavailable as error:
            raise storage_unavailable(error) from error

    async def _past_of(self, generation: Generation, instructed: bool) -> Past:
        """The kept conversation that the call repeats: which responses, and how many messages."""
        parent, call = generation.prompt.parent, generation.call
        name = parent.completion_id if parent is not None else ""
        kept = (await self._load([name])).get(name)
        if parent is None or kept is None or kept.instructed != instructed:
            return Past()
        repeated = chain(call.tools, call.messages[: kept.length + instructed])[-1]
        if repeated.hex() != parent.reply_digest:
            return Past()
        return Past([*kept.before, name], kept.length)

    async def _load(self, response_ids: Sequence[str]) -> Mapping[str, Kept]:
        """Those that are there, and the caller's."""
        names = [name for name in response_ids if RESPONSE_ID.fullmatch(name)]
        if not names:
            return {}
        found: list[bytes | None] = await stored(self._redis.mget([keys.response(name) for name in names]))
        kept = {
            name: msgspec.msgpack.decode(raw, type=Kept)
            for name, raw in zip(names, found, strict=True)
            if raw is not None
        }
        return {name: each for name, each in kept.items() if self._may_read(each)}

    def _may_read(self, kept: Kept) -> bool:
        if self._caller.session_id is not None:
            return kept.session_id == self._caller.session_id
        return self._caller.role == "admin" or kept.owner == self._caller.owner
