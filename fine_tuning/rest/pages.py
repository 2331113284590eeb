"""Pages of lists, as OpenAI's clients read them: `after` is the id of the last object of the page before."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fine_tuning.errors import BadInput

T = TypeVar("T")


def page_of(
    found: Sequence[T],
    show: Callable[[T], dict[str, Any]],
    ids: Callable[[T], str],
    after: str | None,
    limit: int,
) -> dict[str, Any]:
    """Raises BadInput for an `after` that is not in the list."""
    start = 0
    if after is not None:
        place = next((place for place, each in enumerate(found) if ids(each) == after), None)
        if place is None:
            raise BadInput(f"the list has no {after[:100]!r}", "after")
        start = place + 1
    data = [show(each) for each in found[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(found),
    }
