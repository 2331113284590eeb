"""How each chat template writes a tool call, as a grammar in xgrammar's structural tags.

    family ──▶ CallSyntax ──▶ calls(tools) ──▶ {"type": "sequence", "elements": [...]}

The forms are those of the renderers' own templates, so the renderer can parse whatever the grammar permits. A
marker that is one token of the tokenizer is required by its id: the same letters in several tokens would not
be a marker to the parser.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.errors import InvalidRequest
from gateway.language.render import ChatRenderer, Tool

Format = dict[str, Any]

MAX_WHITESPACE = 16
"""In a row, inside JSON: enough for indentation, and a bound for a model that repeats white space."""
MARKER = re.compile(r"(<[^<>\s]+>)")


@dataclass(frozen=True)
class CallSyntax:
    """One call is `begin`, the arguments in `style`, then `end`; all calls together lie between `around`."""

    begin: str
    """Contains `{name}`, or `{quoted}` for the name as a JSON string, and maybe `{number}` for any number."""
    end: str
    style: Literal["json", "qwen_xml", "glm_xml", "minimax_xml"] = "json"
    separator: str = ""
    around: tuple[str, str] = ("", "")
    opener: str | None = None
    """The token with which every call begins, and nothing else does; None if there is no such token."""
    parallel: bool = True
    """The template can have several calls in one answer."""

    def calls(self, renderer: ChatRenderer, tools: Sequence[Tool], *, parallel: bool) -> Format:
        """A call of one of the tools; with `parallel`, one or more such calls."""
        call = either([self._call(renderer, tool) for tool in tools])
        elements = [*literal(renderer, self.around[0]), call]
        if parallel and self.parallel:
            more = sequence([*literal(renderer, self.separator), call])
            elements.append({"type": "star", "content": more})
        return sequence([*elements, *literal(renderer, self.around[1])])

    def at_most_one(self, renderer: ChatRenderer, tools: Sequence[Tool]) -> Format:
        """Any answer without a second call."""
        opener = id_of(renderer, self.opener or self.around[0].strip())
        rest: Format = {"type": "any_tokens", "exclude_tokens": [opener]}
        after = (
            sequence([token(opener), rest]) if self.opener else self.calls(renderer, tools, parallel=False)
        )
        return sequence([rest, {"type": "optional", "content": after}])

    def _call(self, renderer: ChatRenderer, tool: Tool) -> Format:
        name = tool["function"]["name"]
        begin = self.begin.replace("{name}", name).replace("{quoted}", json.dumps(name))
        numbered = begin.partition("{number}")
        elements = list(literal(renderer, numbered[0]))
        if numbered[1]:
            elements += [{"type": "regex", "pattern": r"\d+"}, *literal(renderer, numbered[2])]
        arguments = json_format(arguments_of(tool), self.style)
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


def json_format(schema: Any, style: str = "json") -> Format:
    """JSON of the schema, written in a template's style."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": MAX_WHITESPACE,
    }


def literal(renderer: ChatRenderer, text: str) -> Iterator[Format]:
    """The formats of a fixed text: markers by their token ids, the rest as strings."""
    tokenizer = renderer.tokenizer
    for piece in filter(None, MARKER.split(text)):
        token_id = tokenizer.backend.token_to_id(piece)
        if token_id in tokenizer.added_ids:
            yield token(token_id)
        else:
            yield {"type": "const_string", "value": piece}


def id_of(renderer: ChatRenderer, marker: str) -> int:
    """Raises InvalidRequest for a model whose tokenizer lacks its family's marker."""
    token_id = renderer.tokenizer.backend.token_to_id(marker)
    if token_id is None:
        raise InvalidRequest(f"a constrained answer needs the token {marker!r}, which the tokenizer lacks")
    return token_id


def token(token_id: int) -> Format:
    return {"type": "token", "token": token_id}


def sequence(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
