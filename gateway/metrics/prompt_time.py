"""Measures how long one prompt takes to render, and how much of that the tokenizer takes, in any thread."""

import threading
from collections.abc import Callable
from typing import TypeVar

from rollout_queue import clock

T = TypeVar("T")


class ThreadSeconds(threading.local):
    """How many seconds the current thread has spent in the tokenizer, since the thread began."""

    seconds = 0.0


class PromptTime:
    """The times of one prompt, once `run` has returned or raised."""

    __slots__ = ("_spent", "seconds", "tokenizer_s")

    def __init__(self, spent: ThreadSeconds) -> None:
        self._spent = spent
        self.seconds = self.tokenizer_s = 0.0

    def run(self, work: Callable[[], T]) -> T:
        spent = self._spent
        began, before = clock.monotonic(), spent.seconds
        try:
            return work()
        finally:
            self.seconds, self.tokenizer_s = clock.monotonic() - began, spent.seconds - before
