"""A reader of the stream that holds the lease, as the trainer's reader does."""

from redis import Redis

from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_reader import RedisReader


def claimed_reader(redis: Redis) -> RedisReader:
    """Takes the lease away from any other holder."""
    redis.delete(key_names.LEASE)
    lease = Lease(redis, 1000.0)
    assert lease.claim() is None
    return RedisReader(redis, lease.token, lease.renew)
