"""Waits until the gateways of this process have polled Redis: counts the rounds of their periodic tasks."""

import asyncio
from functools import wraps
from weakref import WeakKeyDictionary

from gateway import periodic_tasks
from gateway.parts import GatewayParts
from gateway.periodic_tasks import Task
from tests.support.waiting import wait_until

ROUNDS: WeakKeyDictionary["asyncio.Task[None]", int] = WeakKeyDictionary()
"""How many rounds each task of each gateway has made."""


def counted(task: Task) -> Task:
    @wraps(task)
    async def one_round(gateway: GatewayParts) -> None:
        running = asyncio.current_task()
        assert running is not None
        before = ROUNDS.setdefault(running, 0)
        try:
            await task(gateway)
        finally:
            ROUNDS[running] = before + 1

    return one_round


def polled(times: int = 2) -> None:
    """Wait until each gateway that runs has made `times` whole polls."""
    wanted = {task: rounds + times + 1 for task, rounds in [*ROUNDS.items()]}  # one may have begun before
    wait_until(lambda: all(task.done() or ROUNDS[task] >= rounds for task, rounds in wanted.items()))


def count_polls() -> None:
    """Count those of all gateways that start after this."""
    periodic_tasks.POLLED = tuple(map(counted, periodic_tasks.POLLED))
