"""xgrammar's structural tags: the JSON form in which an engine receives the grammar of an answer.

xgrammar is the library with which SGLang enforces grammars.

StructuralTag ─ format ─▶ a sequence of fixed texts, single tokens, JSON of a schema, patterns, …
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

MAX_WHITESPACE = 16
"""The most white space in a row inside JSON: enough for indentation, and a bound if a model repeats it."""

JsonStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml"]


class _Format(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class FixedText(_Format, frozen=True, kw_only=True, tag="const_string"):
    value: str


class TokenFormat(_Format, frozen=True, kw_only=True, tag="token"):
    token: int


class AnyTokens(_Format, frozen=True, kw_only=True, tag="any_tokens"):
    """Any number of tokens, except for some."""

    exclude_tokens: list[int]


class FormatOrigin(msgspec.Struct, frozen=True):
    """Where a request asks for a format."""

    param: str
    strict: bool = False
    """Whether the engine has to enforce all of it."""


class Pattern(_Format, frozen=True, kw_only=True, tag="regex"):
    pattern: str
    origin: FormatOrigin | msgspec.UnsetType = msgspec.UNSET
    """Set until the grammar is sent, if a request has the pattern."""


class JsonFormat(_Format, frozen=True, kw_only=True, tag="json_schema"):
    """JSON of the schema, written in a template's style."""

    json_schema: Any
    style: JsonStyle = "json"
    max_whitespace_cnt: int = MAX_WHITESPACE
    origin: FormatOrigin | msgspec.UnsetType = msgspec.UNSET
    """Set until the grammar is sent, if a request has the schema."""


class SequenceFormat(_Format, frozen=True, kw_only=True, tag="sequence"):
    elements: "list[Format]"


class Alternatives(_Format, frozen=True, kw_only=True, tag="or"):
    elements: "list[Format]"


class OptionalFormat(_Format, frozen=True, kw_only=True, tag="optional"):
    content: "Format"


class Repeated(_Format, frozen=True, kw_only=True, tag="star"):
    """The content any number of times, or not at all."""

    content: "Format"


Format = (
    FixedText
    | TokenFormat
    | AnyTokens
    | Pattern
    | JsonFormat
    | SequenceFormat
    | Alternatives
    | OptionalFormat
    | Repeated
)


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="structural_tag"):
    """The grammar of a whole answer."""

    format: Format


def sequence(elements: Sequence[Format]) -> Format:
    """The formats one after the other."""
    return elements[0] if len(elements) == 1 else SequenceFormat(elements=list(elements))


def either(elements: Sequence[Format]) -> Format:
    """One of the formats."""
    return elements[0] if len(elements) == 1 else Alternatives(elements=list(elements))
