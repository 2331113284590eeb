"""How each chat template writes a tool call, as a grammar in xgrammar's structural tags.

    family ──▶ CallSyntax ──▶ calls(tools) ──▶ {"type": "sequence", "elements": [...]}

The forms are those of the renderers' own templates, so the renderer can parse whatever the grammar permits.
If a marker is one token of the tokenizer, the grammar requires that token's id: the parser does not recognise
the same letters in several tokens as a marker.

xgrammar's structural tags: the JSON form in which an engine receives the grammar of an answer.

xgrammar is the library with which SGLang enforces grammars.

StructuralTag ─ format ─▶ a sequence of fixed texts, single tokens, JSON of a schema, patterns, …
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from gateway.errors import InvalidRequest
from gateway.language.chat_messages import Tool
from gateway.language.render import ChatRenderer

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


MARKER = re.compile(r"(<[^<>\s]+>)")


@dataclass(frozen=True)
class CallSyntax:
    """One call is `begin`, the arguments in `style`, then `end`; all calls together lie between `around`."""

    begin: str
    """Contains `{name}`, or `{quoted}` for the name as a JSON string, and maybe `{number}` for any number."""
    end: str
    style: JsonStyle = "json"
    separator: str = ""
    around: tuple[str, str] = ("", "")
    opener: str | None = None
    """The token that begins every call and nothing else; None if there is no such token."""
    parallel: bool = True
    """The template permits several calls in one answer."""

    def calls(self, renderer: ChatRenderer, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """A call of one of the tools; with `parallel`, one or more such calls."""
        call = either([self._call(renderer, tool) for tool in tools])
        elements = [*literal(renderer, self.around[0]), call]
        if parallel and self.parallel:
            more = sequence([*literal(renderer, self.separator), call])
            elements.append(Repeated(content=more))
        return sequence([*elements, *literal(renderer, self.around[1])])

    def at_most_one(self, renderer: ChatRenderer, tools: Sequence[Tool]) -> Format:
        """Any answer with at most one call."""
        opener = id_of(renderer, self.opener or self.around[0].strip())
        rest = AnyTokens(exclude_tokens=[opener])
        if self.opener:
            call = sequence([TokenFormat(token=opener), rest])
        else:
            call = self.calls(renderer, tools, parallel=False)
        return sequence([rest, OptionalFormat(content=call)])

    def only_of(self, renderer: ChatRenderer, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """Any answer whose calls, if it has any, are calls of these tools."""
        rest = AnyTokens(exclude_tokens=[id_of(renderer, marker) for marker in self._markers])
        return sequence([rest, OptionalFormat(content=self.calls(renderer, tools, parallel=parallel))])

    def marked(self, renderer: ChatRenderer) -> bool:
        """Whether tokens tell calls from text."""
        known = [renderer.tokenizer.backend.token_to_id(marker) is not None for marker in self._markers]
        return bool(known) and all(known)

    @property
    def _markers(self) -> Sequence[str]:
        """The tokens without which no call begins."""
        return [*dict.fromkeys(filter(None, (self.opener, self.around[0].strip())))]

    def _call(self, renderer: ChatRenderer, tool: Tool) -> Format:
        name = tool["function"]["name"]
        begin = self.begin.replace("{name}", name).replace("{quoted}", json.dumps(name))
        numbered = begin.partition("{number}")
        elements = list(literal(renderer, numbered[0]))
        if numbered[1]:
            elements += [Pattern(pattern=r"\d+"), *literal(renderer, numbered[2])]
        origin = FormatOrigin(param="tools", strict=tool["function"].get("strict") is True)
        arguments = JsonFormat(json_schema=arguments_of(tool), style=self.style, origin=origin)
        return sequence([*elements, arguments, *literal(renderer, self.end)])


HERMES = CallSyntax(
    begin='<tool_call>\n{"name": {quoted}, "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    opener="<tool_call>",
)
XML = CallSyntax(
    begin="<tool_call>\n<function={name}>\n",
    end="\n</function>\n</tool_call>",
    style="qwen_xml",
    separator="\n",
    opener="<tool_call>",
)
NEMOTRON = replace(XML, end=f"{XML.end}\n", separator="")
GLM_4 = CallSyntax("<tool_call>{name}\n", "</tool_call>", "glm_xml", separator="\n", opener="<tool_call>")
GLM_5 = CallSyntax("<tool_call>{name}", "</tool_call>", "glm_xml", opener="<tool_call>")
KIMI = CallSyntax(
    begin="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    opener="<|tool_call_begin|>",
)
DEEPSEEK = CallSyntax(
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",  # noqa: RUF001
    end="\n```<｜tool▁call▁end｜>",  # noqa: RUF001
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
    opener="<｜tool▁call▁begin｜>",  # noqa: RUF001
)
MINIMAX = CallSyntax(
    begin='<invoke name="{name}">\n',
    end="</invoke>\n",
    style="minimax_xml",
    around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
)
LLAMA = CallSyntax('{"name": {quoted}, "parameters": ', "}", parallel=False)

SYNTAX_OF_FAMILY: dict[str, CallSyntax] = {
    **dict.fromkeys(("qwen3", "qwen3-vl"), HERMES),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"), XML),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), NEMOTRON),
    "glm-4.5": GLM_4,
    **dict.fromkeys(("glm-5", "glm-5.1", "glm-5.3"), GLM_5),
    **dict.fromkeys(("kimi-k2", "kimi-k2.5"), KIMI),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), DEEPSEEK),
    "minimax-m2": MINIMAX,
    "llama-3": LLAMA,
}
"""The other families wrap every answer in control tokens of their own, and cannot be constrained."""


def arguments_of(tool: Tool) -> Any:
    """The schema of a tool's arguments, which are always an object."""
    schema = tool["function"].get("parameters")
    if not isinstance(schema, dict):
        return {"type": "object"}
    known = schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}
    return schema if known else {"type": "object", **schema}


def literal(renderer: ChatRenderer, text: str) -> Iterator[Format]:
    """The formats of a fixed text: markers by their token ids, the rest as strings."""
    tokenizer = renderer.tokenizer
    for part in filter(None, MARKER.split(text)):
        token_id = tokenizer.backend.token_to_id(part)
        if token_id in tokenizer.added_ids:
            yield TokenFormat(token=token_id)
        else:
            yield FixedText(value=part)


def id_of(renderer: ChatRenderer, marker: str) -> int:
    """The id of a marker that is one token. Raises InvalidRequest if the model's tokenizer lacks it."""
    token_id = renderer.tokenizer.backend.token_to_id(marker)
    if token_id is None:
        raise InvalidRequest(f"a constrained answer needs the token {marker!r}, which the tokenizer lacks")
    return token_id
