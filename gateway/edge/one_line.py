"""Keeps JSON on one line for clients that split texts as Python does, such as those that use httpx."""

LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Characters in UTF-8 that JSON need not escape, and that Unicode calls the end of a line."""


def one_line(encoded: bytes) -> bytes:
    """Lines of JSON, or events of it, with those characters escaped."""
    if encoded.isascii():
        return encoded
    for raw, escaped in LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded
