"""Waiting for a moment in another process."""

import time
from collections.abc import Callable

LONGEST_WAIT_S = 30.0


class NeverCame(Exception):
    """The moment did not come within `LONGEST_WAIT_S`, or had passed already."""


def until(condition: Callable[[], bool]) -> None:
    """Check the condition a thousand times a second. Raises NeverCame."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise NeverCame
        time.sleep(0.001)  # the moment is in another process, and is over soon
