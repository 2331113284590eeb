"""Faults around a script in Redis: another client acts just before it, or the connection breaks."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError


def before_script(
    patch: pytest.MonkeyPatch, redis: Any, script: str, happens: Callable[[], Awaitable[object]]
) -> None:
    """Await `happens` once, just before this asynchronous client runs the script for the first time."""
    run, digest, waiting = redis.evalsha, _digest(script), [happens]

    async def run_later(sha: str, *given: Any) -> Any:
        if sha == digest and waiting:
            await waiting.pop()()
        return await run(sha, *given)

    patch.setattr(redis, "evalsha", run_later)


def break_script(patch: pytest.MonkeyPatch, redis: Any, script: str) -> None:
    """Break the client's connection whenever it would run the script; works for asynchronous clients, too."""
    run, digest = redis.evalsha, _digest(script)

    def run_or_break(sha: str, *given: Any) -> Any:
        if sha == digest:
            raise RedisConnectionError("the connection broke")
        return run(sha, *given)

    patch.setattr(redis, "evalsha", run_or_break)


def _digest(script: str) -> str:
    """The SHA-1 by which Redis names a script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
