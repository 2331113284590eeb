"""A reader of the stream that holds the lease, as the trainer's reader does."""

from redis import Redis

from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.stream_reader import StreamReader


def claimed_reader(redis: Redis) -> StreamReader:
    """Takes the lease away from any other holder."""
    redis.delete(key_names.LEASE)
    lease = Lease(redis, 1000.0)
    assert lease.claim() is None
    return StreamReader(redis, lease.token, lease.renew)
