"""Stores a response while its answer is made in the background, so that any gateway can show or cancel it.

begin ──▶ in_progress ──end──▶ completed       cancel ──▶ cancelled: the gateway that makes the answer notices
                      ──fail──▶ failed         no sign of life of that gateway for LEASE_S ──▶ told as failed
"""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from gateway.dialects.base import RecordedAnswer
from gateway.dialects.responses.stored.record import IN_PROGRESS, StoredResponse, packed
from gateway.dialects.responses.wire import ResponseState
from gateway.dialects.wire import JsonObject, encode
from gateway.errors import InvalidRequest
from gateway.generations.generation import Generation
from rollout_queue.contract.errors import SessionDeleted
from rollout_queue.http.errors import ApiError
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

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

BEGIN = """
-- KEYS: session, response   ARGV: record, time to live in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 1
"""
RENEW = """
-- KEYS: session, response   ARGV: SHA-1 of the record, time to live in ms
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.sha1hex(redis.call('GET', KEYS[2]) or '') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
REPLACE = """
-- KEYS: response   ARGV: SHA-1 of the record to replace, record, time to live in ms
if redis.sha1hex(redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
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
        self._name = keys.response(generation.completion_id)
        self._record = StoredResponse(
            spec.owner,
            spec.session_id,
            messages=[],
            output=[],
            length=0,
            told=told,
        )
        script = self._redis.register_script(BEGIN)
        names = [keys.session(spec.session_id), self._name]
        if not await stored(script(names, [packed(self._record), TTL_MS])):
            raise SessionDeleted(spec.session_id)
        return encode({**self._record.told, "output": []})

    async def renew(self) -> bool:
        """Say that the answer is still being made. Returns False if it was cancelled, or was deleted, maybe
        with its session."""
        script = self._redis.register_script(RENEW)
        names = [keys.session(self._record.session_id), self._name]
        return bool(await stored(script(names, [self._record.fingerprint, TTL_MS])))

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
    script = redis.register_script(REPLACE)
    arguments: list[str | bytes | int] = [record.fingerprint, packed(ended), TTL_MS]
    return bool(await stored(script([name], arguments)))


async def cancel(redis: Redis, response_id: str, found: StoredResponse) -> bool:
    """Cancel a response in the background. Returns False if it has ended.

    Raises InvalidRequest if the client waits for the response. Such a client closes the connection instead.
    """
    if not found.told.get("background"):
        message = "only a response that was created with background: true can be cancelled"
        raise InvalidRequest(message, param="response_id")
    return found.status == IN_PROGRESS and await replace(
        redis, keys.response(response_id), found, "cancelled"
    )


async def as_of_now(redis: Redis, response_id: str, found: StoredResponse) -> StoredResponse:
    """The record; a failed one if the gateway that made its answer has stopped."""
    if found.status != IN_PROGRESS:
        return found
    left_ms = await stored(cast(Awaitable[Any], redis.pttl(keys.response(response_id))))
    if left_ms >= TTL_MS - LEASE_S * 1000:
        return found
    return msgspec.structs.replace(found, told=_told(found, "failed", STOPPED))


def _told(record: StoredResponse, status: str, message: str | None) -> JsonObject:
    error = None if message is None else {"code": "server_error", "message": message}
    return {**record.told, **WITHOUT_CONTENT, "status": status, "error": error}
