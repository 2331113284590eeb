"""Texts that a model may write, and JSON and bytes that any client may send."""

from typing import Any

from hypothesis import strategies as st

CALL_TEXT = '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'


TEXTS = (
    "Hello",
    " world",
    "\n",
    "  \n\n ",
    "naïve 日本語 ",
    "👩‍👩‍👧",
    "<",
    "</",
    "{",
    "a < b",
    "<thi",
    "STOP",
    "<think>",
)


SCALARS: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63) - 1, 2**64, 10**400, 0, 1e308]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "\ud800", "a" * 300, "policy@1", "policy@", "user", "assistant", "tool", "completed"]
    ),
)


JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


def no_bodies(sound: bytes, text: bytes, number: bytes) -> dict[str, bytes]:
    """Bytes that are no body, each with its name. Some are a sound body whose text or number is replaced."""
    return {
        "nothing": b"",
        "a beginning": b"{",
        "null": b"null",
        "a list": b"[]",
        "text": b'"text"',
        "no UTF-8": sound.replace(text, b'"\xff"'),
        "half a surrogate pair": sound.replace(text, b'"\\ud800"'),
        "half a surrogate pair in UTF-8": sound.replace(text, b'"\xed\xa0\x80"'),
        "a bare NUL": sound.replace(text, b'"\0"'),
        "NaN": sound.replace(number, b"NaN"),
        "infinity": sound.replace(number, b"1e999"),
        "a number without end": sound.replace(number, b"9" * 5000),
        "an abyss": sound.replace(number, b'3, "metadata": ' + b"[" * 50_000),
        "two bodies": sound.replace(b"}", b"}}"),
    }
