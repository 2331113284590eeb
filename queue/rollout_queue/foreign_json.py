"""Reads JSON that others wrote: whatever the bytes are, there is a value, or a sentence that says why not.

bytes, maybe with a byte order mark ──▶ msgspec ──▶ the value │ `NoJson` │ msgspec's ValidationError
"""

import codecs
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""The byte order marks of other encodings; that of UTF-8 is skipped."""


class NoJson(msgspec.DecodeError):
    """These bytes are not JSON in UTF-8."""


@overload
def read_json(data: bytes | bytearray | str) -> Any: ...


@overload
def read_json(
    data: bytes | bytearray | str,
    kind: type[T],
    *,
    strict: bool = True,
    dec_hook: Callable[[type, Any], Any] | None = None,
) -> T: ...


def read_json(
    data: bytes | bytearray | str,
    kind: Any = Any,
    *,
    strict: bool = True,
    dec_hook: Callable[[type, Any], Any] | None = None,
) -> Any:
    """The value as `kind`. Raises msgspec.DecodeError, and nothing else."""
    data = data.removeprefix("\ufeff") if isinstance(data, str) else data.removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(data, type=kind, strict=strict, dec_hook=dec_hook)
    except msgspec.ValidationError:
        raise
    except RecursionError as error:
        raise NoJson("it is nested too deeply") from error
    except ValueError as error:
        raise NoJson(_why(data, error)) from error


def _why(data: bytes | bytearray | str, error: ValueError) -> str:
    if isinstance(data, str):
        return "it has half of a surrogate pair" if isinstance(error, UnicodeError) else str(error)
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return f"it is in {encoding}: write it in UTF-8"
    if b"\0" in data[:4]:
        return "it is in UTF-16 or UTF-32: write it in UTF-8"
    try:
        data.decode()
    except UnicodeDecodeError as broken:
        place, byte = broken.start + 1, data[broken.start]
        return f"its byte {place}, {byte:#04x}, is not UTF-8 (Windows-1252?): write it in UTF-8"
    return str(error)
