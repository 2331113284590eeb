"""Checks the fields of requests and of the objects inside them: notes unknown ones, refuses others by name.

A field is accepted if the gateway serves it, or if it changes no token (`prompt_cache_key`). A field that
would change the prompt, the sampling or the answer, and is not served, is accepted only with a value that
asks for nothing. Any other field is unknown (`unknown.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.dialects.fields.unknown import note_unknown
from gateway.errors import InvalidRequest

MAX_METADATA_BYTES = 16 * 2**10
"""Limit on the JSON of `metadata`."""

Refusals = Mapping[str, tuple[Sequence[Any], str]]
"""By field: the values that are accepted because they ask for nothing, as null does; why others are not."""

VERBOSITIES = ("low", "medium", "high")


def verbosity_of(value: Any, param: str) -> Mapping[str, str]:
    """The verbosity that a call asks for, as its turn records it. The model has one level, which serves all
    three: SDKs send one by default. Raises InvalidRequest for any other value."""
    if value is None:
        return {}
    if value not in VERBOSITIES:
        raise InvalidRequest(f"{param}: one of {', '.join(VERBOSITIES)}", param=param)
    return {"verbosity": value}


def refuse_unserved(body: msgspec.Struct, refusals: Refusals) -> None:
    """Raises InvalidRequest that names the first field whose value the gateway cannot serve."""
    for name, (neutral, reason) in refusals.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name}: {reason}", param=name)


def check_metadata(metadata: Mapping[str, Any] | None, param: str = "metadata") -> None:
    """Raises InvalidRequest for metadata over the limit, in the field `param`."""
    if metadata and len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
        raise InvalidRequest(f"{param}: more than {MAX_METADATA_BYTES} bytes of JSON", param=param)


class Fields(msgspec.Struct, frozen=True):
    """The fields of one kind of object."""

    accepted: frozenset[str]
    """Names of the fields that the gateway reads, or that change no token."""
    refused: Refusals = {}
    """Other fields that clients send: the values that ask for nothing, and why any other value is refused."""


def check_fields(given: Mapping[str, Any], fields: Fields, where: str) -> None:
    """Note the unknown fields of the object `where`. Raises InvalidRequest that names a refused one."""
    if given.keys() <= fields.accepted:
        return
    for name, value in given.items():
        if name not in fields.accepted:
            check_unread(name, value, fields.refused, f"{where}.{name}")


def check_names(names: Iterable[tuple[str, str]]) -> None:
    """Raises InvalidRequest for a tool with the name of an earlier one; each name comes with its path."""
    known: set[str] = set()
    for path, name in names:
        if name in known:
            raise InvalidRequest(f"{path}: another tool has the name {name[:128]!r}, too", param=path)
        known.add(name)


def check_unread(name: str, value: Any, refusals: Refusals, path: str) -> None:
    """Note a field that the gateway does not read, if nobody knows it. Raises InvalidRequest if it is one of
    `refusals`, and its value asks for something."""
    if value is None:
        return
    if name not in refusals:
        note_unknown(path)
    elif value not in refusals[name][0]:
        raise InvalidRequest(f"{path}: {refusals[name][1]}", param=path)
