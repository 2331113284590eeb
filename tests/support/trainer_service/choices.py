"""The choices of a union of settings, by the names that can be set."""

from typing import Any, get_args


def choices(union: Any) -> dict[str, Any]:
    kinds = get_args(get_args(union)[0])
    return {name: kind for kind in kinds for name in get_args(kind.model_fields["name"].annotation)}
