"""Decodes the body of a request, and bounds what that costs.

body ──count──▶ few enough values ──msgspec──▶ a struct; unknown fields are noted or refused
"""

import re
from functools import cache
from typing import TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Raw

from gateway.dialects.fields.others import check_other
from gateway.errors import InvalidRequest
from rollout_queue.foreign_json import MOST_VALUES, TooManyValues, check_values, read_json

T = TypeVar("T", bound=msgspec.Struct)

LISTS, MOST_ITEMS = ("messages", "input", "tools"), 10_000
"""What the gateway goes through item by item, and how many items it takes."""
UNKNOWN_FIELD = re.compile("Object contains unknown field `")
encode = msgspec.json.Encoder().encode


def decode_body(body: bytes, kind: type[T], context_length: int = 0) -> T:
    """The body as the struct `kind`. Raises InvalidRequest that names a wrong field, or an unread one whose
    value asks for something (`fields.others`); also for a body with more values than a context holds."""
    try:
        check_values(body, max(MOST_VALUES, context_length))
        decoded = _decode(body, kind)
        if len(body) > MOST_ITEMS:
            _check_lists(decoded)
        return decoded
    except TooManyValues as error:
        raise InvalidRequest(f"the body has {error}", code="too_many_values") from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        param = where.strip("`.") or None
        raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _check_lists(decoded: msgspec.Struct) -> None:
    for name in LISTS:
        if len(value := getattr(decoded, name, None) or ()) > MOST_ITEMS and isinstance(value, list):
            raise InvalidRequest(f"{name}: more than {MOST_ITEMS}", param=name)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return read_json(body, kind)
    except msgspec.ValidationError as error:
        if UNKNOWN_FIELD.match(str(error)) is None:
            raise
    return read_json(_read_part(body, kind), kind)


def _read_part(body: bytes | Raw, kind: type[msgspec.Struct], where: str = "") -> bytes:
    """The body without the fields that the struct `kind` does not have. These are noted, or refused."""
    inner = _structs_in(kind)
    kept: dict[str, Raw] = {}
    for name, value in read_json(bytes(body), dict[str, Raw]).items():
        if name not in kind.__struct_fields__:
            check_other(name, read_json(bytes(value)), where + name, kind.__struct_fields__)
        elif name in inner and bytes(value).startswith(b"{"):
            kept[name] = Raw(_read_part(value, inner[name], f"{where}{name}."))
        else:
            kept[name] = value
    return encode(kept)


@cache
def _structs_in(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields of a struct that are structs themselves."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        for each in (hint, *get_args(hint)):
            if isinstance(each, type) and issubclass(each, msgspec.Struct):
                found[name] = each
    return found
