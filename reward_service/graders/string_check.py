"""OpenAI's grader `string_check`: 1 if a text equals or contains another one, else 0."""

from collections.abc import Callable
from typing import Literal

StringOperation = Literal["eq", "ne", "like", "ilike"]

_CHECKS: dict[StringOperation, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}


def string_check(operation: StringOperation, text: str, reference: str) -> float:
    """`like` and `ilike`: whether `text` contains `reference`; `ilike` takes upper case for lower case."""
    return float(_CHECKS[operation](text, reference))
