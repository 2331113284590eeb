"""Clients of a real Redis that wait as long as all tests do. redis-py's own wait 5 s, less than a pause of a
busy machine."""

from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from tests.support.waiting import PATIENCE_S


def redis_at(url: str, **more: Any) -> Redis:
    return Redis.from_url(url, socket_timeout=PATIENCE_S, **more)


def async_redis_at(url: str, **more: Any) -> AsyncRedis:
    return AsyncRedis.from_url(url, socket_timeout=PATIENCE_S, **more)
