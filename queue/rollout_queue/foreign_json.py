"""Reads JSON that others wrote: whatever the bytes are, there is a value, or a sentence that says why not.

bytes, maybe with a byte order mark ──▶ msgspec ──▶ the value │ `NoJson` │ msgspec's ValidationError

A decoder holds the interpreter's lock until it ends. So whoever takes bodies from others counts their values
first (`check_values`).
"""

import codecs
import gc
from collections.abc import Callable, Mapping
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


SMALL_BYTES = 4 * 2**10
"""The lists in a smaller one are too few for the garbage collector to begin more than a few times."""
LARGE_BYTES = 256 * 2**10
"""The values of a smaller body are not counted: it is decoded in 10 ms at most, whatever is in it."""
MOST_VALUES = 150_000
"""So many values are decoded in 50 ms at most, whatever they are."""
STEP = 16 * 2**10
"""Bytes that are counted at once. A step without the byte, as most are, is searched much faster."""
VALUES = {b",": 1.0, b"[": 1.0, b"{": 1.0, b"\\": 1 / 16}
"""What is counted: each value but the first comes after one of these bytes. An escape in a text, such as
`\\n`, takes less than a value."""


class TooManyValues(msgspec.DecodeError):
    """These bytes have more values than are decoded at once."""


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
    if collects := len(data) > SMALL_BYTES and gc.isenabled():
        gc.disable()  # every new list would have it look at all those before: ten times the work
    try:
        return msgspec.json.decode(data, type=kind, strict=strict, dec_hook=dec_hook)
    except msgspec.ValidationError:
        raise
    except RecursionError as error:
        raise NoJson("it is nested too deeply") from error
    except ValueError as error:
        raise NoJson(_why(data, error)) from error
    finally:
        if collects:
            gc.enable()


def check_values(data: bytes, most: int = MOST_VALUES, counted: Mapping[bytes, float] = VALUES) -> None:
    """Raises TooManyValues for JSON that may have more than `most` values.

    The bytes in texts count as well. A body with too few bytes for so many values is not counted.
    """
    if len(data) <= min(LARGE_BYTES, 2 * most):
        return
    found = 0.0
    for byte, weight in counted.items():
        for start in range(0, len(data), STEP):
            if data.find(byte, start, start + STEP) >= 0:
                found += weight * data.count(byte, start, start + STEP)
                if found > most:
                    raise TooManyValues(f"more than {most} values, those that its texts name included")


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
