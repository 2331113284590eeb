"""What comes between a client of Redis and its script: the change of another, or a lost connection."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError


def before_script(
    patch: pytest.MonkeyPatch, redis: Any, script: str, happens: Callable[[], Awaitable[object]]
) -> None:
    """Await `happens` once, before this asynchronous client runs the script for the first time."""
    run, digest, waiting = redis.evalsha, _digest(script), [happens]

    async def run_later(sha: str, *given: Any) -> Any:
        if sha == digest and waiting:
            await waiting.pop()()
        return await run(sha, *given)

    patch.setattr(redis, "evalsha", run_later)


def break_script(patch: pytest.MonkeyPatch, redis: Any, script: str) -> None:
    """The connection of this client breaks whenever it would run the script; asynchronous clients too."""
    run, digest = redis.evalsha, _digest(script)

    def run_or_break(sha: str, *given: Any) -> Any:
        if sha == digest:
            raise RedisConnectionError("the connection broke")
        return run(sha, *given)

    patch.setattr(redis, "evalsha", run_or_break)


def _digest(script: str) -> str:
    """The name by which Redis knows a script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
