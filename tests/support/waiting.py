"""Waits for a condition that no event announces: checks it again and again, with time for a busy machine."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 300.0
"""Only a failing test waits so long. On a busy machine other tests wait for seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.1


def wait_until(ask: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Ask until the answer is truthy, and return it."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout_s} s"
        time.sleep(pause_s)  # the condition changes in another thread or process, without an event
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return answer


async def wait_until_async(ask: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """`wait_until` for a condition that changes in this event loop."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout_s} s"
        await asyncio.sleep(pause_s)  # lets the loop's other tasks run
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    return answer
