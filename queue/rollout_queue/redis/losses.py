"""Notes what Redis has lost, and what became of it, for `GET /admin/status`, `weir doctor` and `weir audit`.

a key is gone, or had another program's value ─▶ whoever notices it ─▶ weir:losses: one sentence for each key

Where another program has written a value of another type, it is moved away from Weir's key:

a command ─▶ WRONGTYPE ─▶ which of its keys? ─▶ RENAME to weir:aside:… ─▶ note the loss ─▶ the command again

The value that Weir had under the key is lost since the other program has written. So the key is from now on
as one that was removed, and nothing but one command is late. No command of Weir relies on being sent only
once.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import Pipeline as AsyncPipeline
from redis.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from rollout_queue import clock
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.key_names import Key

logger = logging.getLogger(__name__)

MOST = 100
"""How many keys the losses name. Of further ones, only the last is named."""
SAID_S = 24 * 3600.0
"""How long a loss is a warning. The audit names it until the key is lost again."""
NOTE = """
-- KEYS: losses   ARGV: key, loss, how many are kept
redis.call('HDEL', KEYS[1], '') -- a full Redis accepts this, and then refuses no later write
local name = ARGV[1]
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) and redis.call('HEXISTS', KEYS[1], name) == 0 then
    name = '*'
end
redis.call('HSET', KEYS[1], name, ARGV[2])
"""


class Loss(msgspec.Struct, frozen=True):
    """What was lost, and when somebody noticed it."""

    at: float
    """Seconds since the epoch."""
    said: str
    """One sentence, which begins with the name of the key."""


def noting(key: str, said: str) -> tuple[str | bytes | int, ...]:
    """Log the loss. Returns the command that stores it."""
    logger.error("%s", said)
    packed = msgspec.json.encode(Loss(clock.now(), said))
    return "EVAL", NOTE, 1, key_names.LOSSES, str(key), packed, MOST


def note_loss(redis: Redis, key: str, said: str) -> None:
    """Log and store it. If Redis fails, the log alone has it."""
    try:
        redis.execute_command(*noting(key, said))  # type: ignore[no-untyped-call] # bounded: one sentence
    except (RedisError, OSError) as error:
        logger.warning("%s does not have this loss: %s", key_names.LOSSES, error)


async def note_loss_async(redis: AsyncRedis, key: str, said: str) -> None:
    """The same in an event loop."""
    try:
        await redis.execute_command(*noting(key, said))  # type: ignore[no-untyped-call] # bounded: one sentence
    except (RedisError, OSError) as error:
        logger.warning("%s does not have this loss: %s", key_names.LOSSES, error)


async def was_lost(redis: AsyncRedis, key: key_names.Key) -> bool:
    """Whether Redis has lost this key, which is gone: alone, or with everything. False if somebody has
    emptied Redis on purpose, and kept the secret. Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.sismember(key_names.LASTING, key)
        pipeline.exists(key_names.SECRET)
        named, secret = await stored(pipeline.execute())
    return bool(named) or not secret


def losses_in(packed: Mapping[bytes, bytes]) -> list[Loss]:
    """What the hash says, the last loss first."""
    return sorted(_readable(packed), key=lambda loss: -loss.at)


def recent_losses(packed: Mapping[bytes, bytes]) -> list[str]:
    """The sentences of those that are warnings, the last loss first."""
    since = clock.now() - SAID_S
    return [loss.said for loss in losses_in(packed) if loss.at >= since]


def _readable(packed: Mapping[bytes, bytes]) -> Iterator[Loss]:
    for value in packed.values():
        try:
            yield msgspec.json.decode(value, type=Loss)
        except msgspec.DecodeError:
            logger.warning("%s has a value that this build cannot read", key_names.LOSSES)


MOVE = """
-- KEYS: (key, place aside)…   ARGV: the type of each key's value
-- Returns, of each value of another type, the number of its key, and its type.
local moved = {}
for at = 1, #KEYS, 2 do -- bounded: the keys of one command
    local found = redis.call('TYPE', KEYS[at]).ok
    if found ~= 'none' and found ~= ARGV[(at + 1) / 2] then
        redis.call('RENAME', KEYS[at], KEYS[at + 1])
        moved[#moved + 1] = (at + 1) / 2
        moved[#moved + 1] = found
    end
end
return moved
"""
Arguments = tuple[Any, ...]


def is_wrong_type(error: BaseException) -> bool:
    return "WRONGTYPE" in str(error)  # Redis 6 has it in the middle of a script's error


def keys_in(arguments: Sequence[Any]) -> list[Key]:
    return list(dict.fromkeys(each for each in arguments if isinstance(each, Key) and each.kind))


def moving(found: Sequence[Key]) -> Arguments:
    """The command that moves the values of other types."""
    names = [name for key in found for name in (key, key.aside)]
    return "EVAL", MOVE, len(names), *names, *(key.kind for key in found)


def sentences(found: Sequence[Key], moved: Sequence[Any]) -> Mapping[Key, str]:
    """What to say of each key that MOVE has answered."""
    said = {}
    for number, kind in zip(moved[::2], moved[1::2], strict=True):
        key, other = found[int(number) - 1], kind.decode() if isinstance(kind, bytes) else kind
        said[key] = (
            f"{key} had a {other}, which Weir did not write: it is now in {key.aside}, and what {key} had is "
            "lost; give the other program a database or a prefix of its own"
        )
    return said


def not_moved(error: Exception, found: Sequence[Key], why: Exception) -> ResponseError:
    """The error if the values cannot be moved."""
    named = ", ".join(found[:5])
    return ResponseError(
        f"{error}: another program has written to one of {named}; rename that key, or allow this user the "
        f"commands TYPE and RENAME (docs/redis.md): {why}"
    )


class CarefulRedis(Redis):
    """redis-py's client, which moves such values, and then repeats the command."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # bounded: by the caller
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._clear(args, error)
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # bounded: by the caller

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return CarefulPipeline(self, transaction, shard_hint)

    def _clear(self, arguments: Sequence[Any], error: Exception) -> None:
        run, found = super().execute_command, keys_in(arguments)
        try:
            for key, said in sentences(found, run(*moving(found))).items():  # type: ignore[no-untyped-call]
                run(*noting(key, said))  # type: ignore[no-untyped-call]
        except RedisError as why:
            raise not_moved(error, found, why) from error


class CarefulPipeline(Pipeline):
    """Moves such values, and does not repeat its commands: some of them were carried out."""

    def __init__(self, redis: CarefulRedis, transaction: bool, shard_hint: str | None) -> None:
        pool, callbacks = redis.connection_pool, redis.response_callbacks
        super().__init__(pool, callbacks, transaction, shard_hint)
        self._client = redis

    def execute(self, *given: Any, **named: Any) -> list[Any]:
        sent = [each for command in self.command_stack for each in command[0]]
        try:
            return super().execute(*given, **named)
        except ResponseError as error:
            if is_wrong_type(error):
                self._client._clear(sent, error)
            raise


class CarefulAsyncRedis(AsyncRedis):
    """The same for asyncio."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # bounded: by the caller
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            await self._clear(args, error)
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # bounded: by the caller

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> AsyncPipeline:
        return CarefulAsyncPipeline(self, transaction, shard_hint)

    async def _clear(self, arguments: Sequence[Any], error: Exception) -> None:
        run, found = super().execute_command, keys_in(arguments)
        try:
            moved = await run(*moving(found))  # type: ignore[no-untyped-call]
            for key, said in sentences(found, moved).items():
                await run(*noting(key, said))  # type: ignore[no-untyped-call]
        except RedisError as why:
            raise not_moved(error, found, why) from error


class CarefulAsyncPipeline(AsyncPipeline):
    """The same for asyncio."""

    def __init__(self, redis: CarefulAsyncRedis, transaction: bool, shard_hint: str | None) -> None:
        pool, callbacks = redis.connection_pool, redis.response_callbacks
        super().__init__(pool, callbacks, transaction, shard_hint)
        self._client = redis

    async def execute(self, *given: Any, **named: Any) -> list[Any]:
        sent = [each for command in self.command_stack for each in command[0]]
        try:
            return await super().execute(*given, **named)
        except ResponseError as error:
            if is_wrong_type(error):
                await self._client._clear(sent, error)
            raise
