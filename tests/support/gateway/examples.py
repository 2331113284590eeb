"""Texts that a model may write, and JSON that any client may send."""

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
