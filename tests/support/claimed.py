"""A reader of the stream, as its trainer has one: with the lease claimed."""

from redis import Redis

from rollout_queue.redis import keys
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.reader import RedisReader


def claimed_reader(redis: Redis) -> RedisReader:
    """Whoever had the lease before has let it go."""
    redis.delete(keys.LEASE)
    lease = Lease(redis, 1000.0)
    assert lease.claim() is None
    return RedisReader(redis, lease.token)
