"""Cancels tasks and waits for their end."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout_queue import clock

CANCEL_AGAIN_S = 2.0


async def cancel_and_wait(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended.

    A task that still runs after `CANCEL_AGAIN_S` is cancelled again: redis-py sends through asyncio.wait_for,
    which in Python 3.11 loses a cancellation that arrives together with the result.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        await clock.wait_tasks(left, CANCEL_AGAIN_S)
        left = {task for task in left if not task.done()}
    await asyncio.gather(*tasks, return_exceptions=True)
