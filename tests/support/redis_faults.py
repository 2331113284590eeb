"""Faults around a script in Redis: another client acts just before it, or the connection breaks."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_queue.redis.lua import Script


def before_script(
    patch: pytest.MonkeyPatch, redis: Any, script: Script[Any], happens: Callable[[], Awaitable[object]]
) -> None:
    """Await `happens` once, just before this asynchronous client runs the script for the first time."""
    run, waiting = redis.evalsha, [happens]

    async def run_later(sha: str, *given: Any) -> Any:
        if sha == script.sha and waiting:
            await waiting.pop()()
        return await run(sha, *given)

    patch.setattr(redis, "evalsha", run_later)


def break_script(patch: pytest.MonkeyPatch, redis: Any, script: Script[Any]) -> None:
    """Break the client's connection whenever it would run the script; works for asynchronous clients, too."""
    run = redis.evalsha

    def run_or_break(sha: str, *given: Any) -> Any:
        if sha == script.sha:
            raise RedisConnectionError("the connection broke")
        return run(sha, *given)

    patch.setattr(redis, "evalsha", run_or_break)
