"""How a Lua script is declared and run, and the Lua functions that several scripts share.

    HOLD = Script[int](text) ──▶ await HOLD.run(redis, keys, arguments); run_now for a blocking client

The type is what Redis answers. `PipelinedConnection.run` is for calls of agents, `FencedScript` for scripts
of the trainer's end.

A full Redis refuses the first write of a script and no later one, so no script is left half done.
"""

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from typing import Any, Generic, TypeVar

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError, RedisError

from rollout_queue.redis.availability import available, unavailable
from rollout_queue.redis.settings import NO_REPLICAS, Replication

Argument = str | bytes | float
T = TypeVar("T")


class Script(Generic[T]):
    """A script whose answer is a T. Its text says over the code what KEYS and ARGV are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, redis: AsyncRedis, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> T:
        """What the script answers. If Redis does not know the script, its text is sent. Raises
        StorageUnavailable."""
        given: Any = (len(keys), *keys, *arguments)
        try:
            try:
                answer: T = await redis.evalsha(self.sha, *given)  # bounded: by the script
            except NoScriptError:
                answer = await redis.eval(self.text, *given)  # bounded: so, too
        except (RedisError, OSError) as error:
            raise unavailable(error) from error
        return answer

    def run_now(
        self,
        redis: Redis,
        keys: Sequence[str],
        arguments: Sequence[Argument] = (),
        replication: Replication = NO_REPLICAS,
    ) -> T:
        """The same for a blocking client. Returns once replicas have what the script wrote."""
        given: Any = (len(keys), *keys, *arguments)
        answer: Any
        with available():
            if not replication.replicas:
                try:
                    answer = redis.evalsha(self.sha, *given)  # bounded: by the script
                except NoScriptError:
                    answer = redis.eval(self.text, *given)  # bounded: so, too
                return answer  # type: ignore[no-any-return]
            with redis.pipeline(transaction=False) as pipeline:  # so that both have the same connection
                self.queue(pipeline, keys, arguments)
                # bounded: WAIT and its two arguments
                pipeline.execute_command(*replication.command)  # type: ignore[no-untyped-call]
                answer, confirmed = pipeline.execute()
            replication.require(confirmed)
        return answer  # type: ignore[no-any-return]

    def queue(self, pipeline: Any, keys: Sequence[str], arguments: Sequence[Argument] = ()) -> None:
        """Add the script to a pipeline of either client, which sends its text."""
        pipeline.eval(self.text, len(keys), *keys, *arguments)  # bounded: by the script


Confirm = Callable[[Script[Any], list[str], list[Argument]], Awaitable[Any]]
"""What a script answers, once replicas have what it wrote. Raises StorageUnavailable."""


def unconfirmed(redis: AsyncRedis) -> Confirm:
    """Runs scripts there, and asks no replica."""
    return lambda script, keys, arguments: script.run(redis, keys, arguments)


LOST = "LEASELOST"
"""The error code of a script whose caller is no longer the trainer."""
UNFENCED = "FENCELOST"
"""The error code of a script that finds no fence. A claim sets it, and nothing removes it, so Redis has lost
it."""

FENCED = f"""
local fence = redis.call('GET', KEYS[1])
if not fence then return redis.error_reply('{UNFENCED} by Redis') end
if fence ~= ARGV[1] then return redis.error_reply('{LOST} by another claim') end
"""
"""Begins every script of the trainer's end. KEYS[1] is the fence: the token of the process that claimed the
trainer's lease last. ARGV[1] is the caller's token."""

SETTLE = """
local settled_at
local function settle(settled, stream, id)
    -- Notes the time of the session's verdict, in ms. It is never before the newest entry of the stream, so
    -- that no entry of the session is younger.
    if not settled_at then
        local time = redis.call('TIME')
        local newest = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
        settled_at = time[1] * 1000 + math.floor(time[2] / 1000)
        if newest then settled_at = math.max(settled_at, tonumber(string.match(newest[1], '%d+'))) end
    end
    redis.call('ZADD', settled, settled_at, id)
end
"""

MAY_EXPIRE = """
local function may_expire(session)
    -- Whether the session has no verdict, and lacks an outcome or a reward: only the trainer acts on others.
    local fields = redis.call('HMGET', session, 'verdict', 'outcome')
    if fields[1] then return false end
    if not fields[2] then return true end
    for _, field in ipairs(redis.call('HKEYS', session)) do -- bounded: one session
        if string.sub(field, 1, 2) == 'r:' then return false end
    end
    return true
end
"""

REMOVE_REFERENCES = """
local function remove_references(first, sorted_sets, users, responses, images)
    -- Removes the session ARGV[1] from the KEYS from `first` on. These are sorted sets, sets of users, texts
    -- of responses, and images with the sessions that show each, as many of each as the last arguments say;
    -- the rest are continuations.
    sorted_sets = first - 1 + sorted_sets
    users, responses = sorted_sets + users, sorted_sets + users + responses
    images = responses + 2 * images
    for at = first, sorted_sets do redis.call('ZREM', KEYS[at], ARGV[1]) end
    for at = sorted_sets + 1, users do redis.call('SREM', KEYS[at], ARGV[1]) end
    for at = users + 1, responses do redis.call('DEL', KEYS[at]) end
    for at = responses + 1, images, 2 do
        redis.call('SREM', KEYS[at + 1], ARGV[1])
        if redis.call('EXISTS', KEYS[at + 1]) == 0 then redis.call('DEL', KEYS[at]) end
    end
    for at = images + 1, #KEYS do -- bounded: one session; another one may own the continuation by now
        if redis.call('GET', KEYS[at]) == ARGV[1] then redis.call('DEL', KEYS[at]) end
    end
end
"""

LAST_DELIVERED = """
local function last_delivered(stream, name) -- nothing if the stream or the group is gone
    if redis.call('EXISTS', stream) == 0 then return end
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
        local fields = {}
        for at = 1, #group, 2 do fields[group[at]] = group[at + 1] end
        if fields['name'] == name then return fields['last-delivered-id'] end
    end
end
"""
