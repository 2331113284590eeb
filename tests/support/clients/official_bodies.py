"""Prints request bodies with every field that the types of an installed SDK have, one field in each body.

It runs in the SDK's own environment: `python official_bodies.py openai` prints a JSON object a line, with the
`path` of a request, the `field`, and the `body`.
"""

import json
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin
from typing import NotRequired as OlderNotRequired

from typing_extensions import get_type_hints, is_typeddict

HEADERS = frozenset({"betas"})
"""Fields that an SDK sends as headers."""
SCALARS: dict[Any, Any] = {str: "x", int: 1, float: 0.5, bool: True, object: {}, type(None): None}


class Given(NamedTuple):
    """A value, and the path of the one field that it is made for."""

    path: str
    value: Any


class Walk:
    """Goes through the types of one request. Each type is entered once from each place that names it."""

    def __init__(self) -> None:
        self._entered: set[tuple[Any, str, Any]] = set()

    def values(self, kind: Any, path: str = "", owner: Any = None, field: str = "") -> Iterator[Given]:
        """The values of a type: of an object, one for each field, and one for each value of the field."""
        origin: Any = get_origin(kind)
        args = get_args(kind)
        if is_typeddict(kind):
            yield from self._objects(kind, path, owner, field)
        elif origin in (Union, types.UnionType):
            for each in args:
                yield from self.values(each, path, owner, field)
        elif origin is Literal:
            yield from (Given(path, each) for each in args)
        elif _wraps(origin):
            yield from self.values(args[0], path, owner, field)
        elif _is_list(kind):
            for each in self.values(args[-1] if args else str, f"{path}[0]", owner, field):
                yield Given(each.path, [each.value])
        else:
            yield Given(path, smallest(kind))

    def _objects(self, kind: Any, path: str, owner: Any, field: str) -> Iterator[Given]:
        least = smallest(kind)
        yield Given(path, least)
        if (owner, field, kind) in self._entered:
            return
        self._entered.add((owner, field, kind))
        for name, hint in get_type_hints(kind, include_extras=True).items():
            name = _alias(hint) or name
            if name in HEADERS:
                continue
            below = f"{path}.{name}" if path else name
            for each in self.values(hint, below, kind, name):
                yield Given(each.path, least | {name: each.value})


def smallest(kind: Any, within: tuple[Any, ...] = ()) -> Any:
    """A value of a type: of an object, with its required fields only."""
    origin: Any = get_origin(kind)
    args = get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = {name: hint for name, hint in hints.items() if _is_required(hint)}
        return {_alias(hint) or name: smallest(hint, (*within, kind)) for name, hint in needed.items()}
    if origin in (Union, types.UnionType):
        return smallest(next((each for each in args if each not in within), args[0]), within)
    if origin is Literal:
        return args[0]
    if _wraps(origin):
        return smallest(args[0], within)
    if _is_list(kind):
        return [smallest(args[-1] if args else str, within)]
    return {} if origin is dict or kind is dict else SCALARS.get(kind, "x")


def _is_required(hint: Any) -> bool:
    origin: Any = get_origin(hint)
    return origin is Required


def _wraps(origin: Any) -> bool:
    return origin in (Annotated, Required, NotRequired, OlderNotRequired)


def _is_list(kind: Any) -> bool:
    name = getattr(get_origin(kind) or kind, "__name__", "")
    return name in ("list", "Iterable", "Sequence", "SequenceNotStr", "tuple")


def _alias(hint: Any) -> str | None:
    """The name of a field on the wire, if Python reserves it."""
    if _wraps(get_origin(hint)):
        for each in getattr(hint, "__metadata__", ()):
            if alias := getattr(each, "alias", None):
                return str(alias)
        return _alias(get_args(hint)[0])
    return None


REQUESTS: dict[str, dict[str, list[str]]] = {
    "openai": {
        "/v1/chat/completions": ["openai.types.chat.completion_create_params:CompletionCreateParamsBase"],
        "/v1/completions": ["openai.types.completion_create_params:CompletionCreateParamsBase"],
        "/v1/responses": ["openai.types.responses.response_create_params:ResponseCreateParamsBase"],
    },
    "anthropic": {
        "/v1/messages": [
            "anthropic.types.message_create_params:MessageCreateParamsBase",
            "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
        ],
    },
}
"""By SDK and path: the types of its requests, each with its module."""


def type_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


if __name__ == "__main__":
    for path, places in REQUESTS[sys.argv[1]].items():
        for place in places:
            for given in Walk().values(type_at(place)):
                print(json.dumps({"path": path, "field": given.path, "body": given.value}))
