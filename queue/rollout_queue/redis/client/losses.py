"""Notes what Redis has lost, and what became of it, for `GET /admin/status`, `weir doctor` and `weir audit`.

a key is gone, or had another program's value ─▶ whoever notices it ─▶ weir:losses: one sentence for each key
"""

import logging
from collections.abc import Iterator, Mapping

import msgspec
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from rollout_queue import clock
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

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
    return "EVAL", NOTE, 1, keys.LOSSES, str(key), packed, MOST


def note_loss(redis: Redis, key: str, said: str) -> None:
    """Log and store it. If Redis fails, the log alone has it."""
    try:
        redis.execute_command(*noting(key, said))  # type: ignore[no-untyped-call] # bounded: one sentence
    except (RedisError, OSError) as error:
        logger.warning("%s does not have this loss: %s", keys.LOSSES, error)


async def note_loss_async(redis: AsyncRedis, key: str, said: str) -> None:
    """The same in an event loop."""
    try:
        await redis.execute_command(*noting(key, said))  # type: ignore[no-untyped-call] # bounded: one sentence
    except (RedisError, OSError) as error:
        logger.warning("%s does not have this loss: %s", keys.LOSSES, error)


async def was_lost(redis: AsyncRedis, key: keys.Key, *, had_secret: bool = True) -> bool:
    """Whether Redis has lost this key, which is gone: alone; or with everything, if there was a secret. False
    if somebody has emptied Redis on purpose, and kept the secret. Raises StorageUnavailable."""
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.sismember(keys.LASTING, str(key))
        pipeline.exists(keys.SECRET)
        named, secret = await stored(pipeline.execute())
    return bool(named) or (had_secret and not secret)


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
            logger.warning("%s has a value that this build cannot read", keys.LOSSES)
