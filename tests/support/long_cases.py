"""Which cases of a parametrised test every run makes, and which only the long run."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def cases(short: Iterable[Any], long: Iterable[Any]) -> list[Any]:
    """Parameters of which the long run alone has the latter."""
    return [*short, *(_long(*each) if isinstance(each, tuple) else _long(each) for each in long)]


def in_turn(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """All pairs. The short run has each of `one` with the next of `other` in turn, so that each occurs."""
    return [
        pytest.param(first, second) if at % len(other) == nth else _long(first, second)
        for at, first in enumerate(one)
        for nth, second in enumerate(other)
    ]


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)
