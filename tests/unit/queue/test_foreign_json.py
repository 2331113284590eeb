"""Whatever bytes others send, the decoder returns a value or says in words why there is none."""

import codecs
import gc
import json
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_queue.foreign_json import MOST_VALUES, NoJson, TooManyValues, check_values, read_json
from tests.support.hypothesis_profiles import examples

GIVEN = {"a": "café \u2028", "b": [1, None]}
TEXT = json.dumps(GIVEN, ensure_ascii=False)


class Named(msgspec.Struct):
    a: str


@pytest.mark.hypothesis
@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=40), st.integers(0, len(TEXT.encode())), st.integers(0, 9))
def test_no_bytes_make_another_error(put: bytes, at: int, left_out: int) -> None:
    sound = TEXT.encode()
    for data in (put, sound[:at] + put + sound[at + left_out :], put.decode("latin-1")):
        for kind in (Any, Named, list[str]):
            with suppress(msgspec.DecodeError):
                read_json(data, kind)


@pytest.mark.parametrize("data", [TEXT, TEXT.encode(), bytearray(TEXT.encode())])
def test_a_byte_order_mark_of_utf_8_is_skipped(data: Any) -> None:
    mark: Any = "\ufeff" if isinstance(data, str) else codecs.BOM_UTF8
    assert read_json(data) == read_json(mark + data) == GIVEN
    assert read_json(mark + data, Named) == Named(str(GIVEN["a"]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        *((TEXT.encode(each), each.upper()[:6]) for each in ("utf-16", "utf-32")),
        *((TEXT.encode(each), "UTF-16 or UTF-32") for each in ("utf-16-le", "utf-16-be", "utf-32-be")),
        ('{"a": "café"}'.encode("cp1252"), "byte 11, 0xe9, is not UTF-8"),
        (b'{"a": caf\xe9}', "byte 10, 0xe9, is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        ('{"a": "\ud800"}', "half of a surrogate pair"),
        ("", "truncated"),
    ],
)
def test_the_error_says_what_is_wrong(data: Any, why: str) -> None:
    with pytest.raises(NoJson, match=why):
        read_json(data)


def test_json_of_another_shape_is_told_as_ever() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"Expected `str`, got `int` - at `\$.a`"):
        read_json('{"a": 1}', Named)


MANY = MOST_VALUES - 10
BODIES: dict[str, bytes] = {
    "lists": b"[" + b"[]," * (MANY // 2) + b"1]",
    "objects": b"[" + b"{}," * (MANY // 2) + b"1]",
    "messages": b"[" + b'{"role":"user","content":"x"},' * (MANY // 3) + b"1]",
    "biases": b"{" + b",".join(b'"%d":1.5' % (n * 7919 % 10**9) for n in range(MANY)) + b"}",
    "long numbers": b"[" + b"9" * 30 + (b"," + b"9" * 30) * MANY + b"]",
    "ids": b"[1" + b",151643" * MANY + b"]",
    "texts": b'["x"' + b',"hello world"' * MANY + b"]",
    "escapes": b'["' + b"\\n" * (16 * MANY) + b'"]',
    "one text": b'["' + b"x" * (31 * 2**20) + b'"]',
}
"""Each has about as many values as are decoded, or as many bytes as a body may have."""


@pytest.mark.parametrize("kind", BODIES)
def test_the_largest_bodies_are_decoded_in_50_ms(kind: str) -> None:
    """Of this thread's time, on a machine that does nothing else; here it may take twice as long."""
    took, others = [], [[number] for number in range(200_000)]  # what the collector would look at
    for _ in range(5):
        began = time.thread_time()
        check_values(BODIES[kind])
        read_json(BODIES[kind])
        took.append(time.thread_time() - began)
    assert min(took) < 0.1
    assert others
    assert gc.isenabled()


@pytest.mark.parametrize("piece", [b"[],", b"{},", b"1,", b'"\\n\\n",', b'"a":1,'])
def test_more_values_are_refused_before_they_are_decoded(piece: bytes) -> None:
    body = b"[" + piece * (2**25 // len(piece)) + b"1]"
    with pytest.raises(TooManyValues, match="more than 150000 values"):
        check_values(body)
    check_values(b"[" + piece * 1000 + b"1]")
