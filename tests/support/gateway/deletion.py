"""Deletes sessions over HTTP, and looks for what is left of them in Redis."""

from collections.abc import Iterator
from typing import Any

import httpx
from redis import Redis

from tests.support.gateway.running import RunningGateway


def path_of(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}"


def delete(gateway: RunningGateway, session: dict[str, Any], **more: Any) -> httpx.Response:
    reply: httpx.Response = gateway.call("DELETE", path_of(session), **more)
    return reply


def is_gone(reply: Any) -> bool:
    return bool(reply.status_code == 410 and reply.json()["error"]["type"] == "gone_error")


def holding(redis: Redis, mark: bytes) -> list[str]:
    """The keys whose name or value contains the bytes."""
    names: Any = redis.keys()
    return sorted(name.decode() for name in names if any(mark in part for part in parts(redis, name)))


def parts(redis: Any, name: bytes) -> Iterator[bytes]:
    """All parts of the value under a key of any type. DUMP is not used because it compresses values."""
    yield name
    match redis.type(name):
        case b"string":
            yield redis.get(name) or b""  # a lease may have expired since then
        case b"hash":
            yield from (part for field in redis.hgetall(name).items() for part in field)
        case b"set":
            yield from redis.smembers(name)
        case b"zset":
            yield from redis.zrange(name, 0, -1)
        case b"stream":
            entries = redis.xrange(name)
            yield from (part for _, fields in entries for field in fields.items() for part in field)
        case b"none":
            pass  # a lease that has expired since the names were read
        case kind:
            raise AssertionError(kind)
