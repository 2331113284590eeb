"""Errands: fetch four items with a tool, in the order in which they were asked for."""

from collections.abc import Iterator
from random import Random
from typing import Any

ITEMS = "abcdefghij"
CALLS = 4


def asked_for(items: str) -> str:
    return f"fetch {' '.join(items)}"


class Errands:
    """Each right call earns a quarter. With `credit="turn"` the reward is that of the call, with
    `credit="episode"` the sum comes at the end. An answer without a call ends the errand."""

    tools = ("fetch",)

    def __init__(self, credit: str = "turn") -> None:
        self._by_turn = credit == "turn"

    def tasks(self, seed: int) -> Iterator[dict[str, Any]]:
        draw = Random(seed)
        while True:
            yield {"items": "".join(draw.choices(ITEMS, k=CALLS))}

    def reset(self, task: dict[str, Any]) -> str:
        self._items, self._made, self._earned = task["items"], 0, 0.0
        return asked_for(self._items)

    def fetch(self, item: str) -> tuple[str, float | None, bool, bool, dict[str, float]]:
        """Fetch an item."""
        earned = (item == self._items[self._made]) / CALLS
        self._made, self._earned = self._made + 1, self._earned + earned
        return "ok", *self._reward(earned, self._made == CALLS)

    def step(self, answer: str) -> tuple[None, float | None, bool, bool, dict[str, float]]:
        return None, *self._reward(0.0, True)

    def _reward(self, earned: float, ended: bool) -> tuple[float | None, bool, bool, dict[str, float]]:
        if self._by_turn:
            return earned, ended, False, {}
        return self._earned if ended else None, ended, False, {}
