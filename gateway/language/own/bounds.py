"""What one run of a chat template may still use: its time, and the characters that it makes on its way."""

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from rollout_queue import clock

RENDER_S: Final = 5.0
"""A template that takes longer is stopped at its next loop, look-up, call, filter or operator."""
VIEWS: Final = (KeysView, ValuesView, ItemsView)
"""What `keys`, `values` and `items` of a dictionary return."""


@dataclass
class Bounds:
    """What one run of a template may still use."""

    deadline: float
    characters: int
    """Of all texts, and items of all lists, that the run makes on its way."""

    def check(self) -> None:
        """Raise SecurityError if the time is over."""
        if clock.monotonic() > self.deadline:
            raise SecurityError(f"it takes more than {RENDER_S:g} s")

    def spend(self, characters: int) -> None:
        """Count characters, before they are made. Raises SecurityError for too many."""
        self.characters -= characters
        if self.characters < 0:
            raise SecurityError("it makes far more text than the messages have")


BOUNDS: ContextVar[Bounds] = ContextVar("BOUNDS")
"""The bounds of the run in this thread."""


def counted(value: Any) -> Any:
    """The value, whose characters or items are counted."""
    if isinstance(value, str | list | tuple):
        BOUNDS.get().spend(len(value))
    return value


def text_of(value: Any) -> str:
    """The value as text, which is counted before it is made."""
    if isinstance(value, str):
        return value
    spend_size(value)
    return str(value)


def compared(value: Any) -> Any:
    """The value, which is about to be compared, or hashed. Python does that item by item and looks at no
    clock meanwhile. So the items are counted first."""
    if not isinstance(value, str | int | float | None):
        value = listed(value)
        spend_size(value)
    return value


def searched(value: Any) -> Any:
    """The value, in which something is about to be looked up."""
    return value if isinstance(value, dict | KeysView | ItemsView) else compared(value)


def listed(value: Any) -> Any:
    """The value, or the items that it yields: they can be counted."""
    return counted(list(value)) if isinstance(value, Iterator) else value


def spend_size(value: Any) -> None:
    """Count the text of a value item by item: a list that holds itself twice, many times over, is short."""
    bounds, left = BOUNDS.get(), [value]
    while left:
        each = left.pop()
        if not isinstance(each, str):
            bounds.check()
        bounds.spend(len(each) + 1 if isinstance(each, str) else 1)
        if isinstance(each, Namespace):
            each = object.__getattribute__(each, "_Namespace__attrs")
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, *VIEWS)):
            left += each
