"""Builds the grammar to which an answer is constrained, from the fields of a request.

tool_choice, parallel_tool_calls, response_format, guided_json, … ──▶ SGLang's parameter `structural_tag`

The engine masks the tokens that the grammar forbids *before* the softmax. So the recorded logprobs are those
of the masked distribution: 0.0 for a token without an alternative. `sampling.used` names the constraint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from gateway.errors import invalid
from gateway.language.call_syntax import (
    SYNTAX_OF_FAMILY,
    AnyTokens,
    CallSyntax,
    FixedText,
    Format,
    FormatOrigin,
    JsonFormat,
    OptionalFormat,
    Pattern,
    TokenFormat,
    either,
    id_of,
    sequence,
)
from gateway.language.chat_messages import Tool
from gateway.language.grammar_cost import fitted_tag
from gateway.language.render import ChatRenderer
from gateway.language.schema import check_pattern, check_schema, check_tool

GAP = Pattern(pattern=r"\n{0,3}")
"""Templates differ in the blank lines around reasoning."""

ReasoningState = Literal["open", "possible", "over"]
"""Whether a prompt ends inside reasoning, before possible reasoning, or after it."""
ConstraintKind = Literal[
    "", "tool_choice", "json_object", "json_schema", "regex", "choice", "parallel_tool_calls"
]
MAX_CHOICES = 1000


@dataclass(frozen=True)
class AnswerForm:
    """What the text of an answer must be."""

    kind: ConstraintKind = ""
    content: Format | None = None
    """None: any text."""


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer may call."""

    mode: str = "auto"
    """`auto`, `required` (it has to be a call), `none`."""
    names: tuple[str, ...] | None = None
    """The functions that may be called; None: all."""
    single: bool = False
    """At most one call."""

    @property
    def some(self) -> bool:
        """Whether the answer may be text, or a call of some of the tools."""
        return self.mode == "auto" and self.names is not None

    def limits(self, renderer: ChatRenderer) -> bool:
        """Whether a grammar keeps such an answer to these tools; if not, the prompt has no others."""
        if not self.some:
            return False
        syntax = SYNTAX_OF_FAMILY.get(renderer.family.syntax or "")
        return syntax is not None and syntax.marked(renderer)


PLAIN_CHOICES = {word: ToolChoice(word or "auto") for word in (None, "auto", "none", "required")}
"""The choices that a word makes."""


@dataclass(frozen=True)
class Constraint:
    """What one answer is constrained to."""

    kind: ConstraintKind = ""
    structural_tag: str | None = None
    """The grammar, as JSON; None without one."""
    left_out: tuple[str, ...] = ()
    """Keywords of a schema that the grammar does not enforce, because they cost too much."""

    @property
    def asked(self) -> dict[str, Any]:
        """The entries in the turn's sampling parameters; empty if the answer is not constrained."""
        without = {"constraint_left_out": list(self.left_out)} if self.left_out else {}
        return {"constraint": self.kind, **without} if self.kind else {}


UNCONSTRAINED = Constraint()
Constrain = Callable[[ChatRenderer], Constraint]
"""Makes the constraint of a call for a template with these options."""


def constraint_of(
    renderer: ChatRenderer,
    tools: Sequence[Tool] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | AnswerForm | None = None,
    parallel_tool_calls: bool | None = True,
    *,
    format_param: str = "response_format",
) -> Constraint:
    """The constraint of the answer to a call.

    `tool_choice` and `response_format` are as in Chat Completions or as in Responses; `format_param` is the
    field that says what `response_format` says. If the template permits reasoning, the model may still reason
    first.

    Raises InvalidRequest for a request that contradicts itself, that no engine can enforce, or that the
    model's family (its chat template) does not support.
    """
    if not tools and response_format is None and tool_choice in (None, "auto"):
        return UNCONSTRAINED
    choice = read_choice(tool_choice)
    callable_tools = _callable(tools or (), choice)
    form = response_format
    if not isinstance(form, AnswerForm):
        form = _form_of(form, format_param)
    kind, content = form.kind, form.content
    single = parallel_tool_calls is False
    if choice.mode == "required":
        kind, content = "tool_choice", None
    elif not kind and choice.limits(renderer):
        kind = "tool_choice"
    elif not kind and single and callable_tools:
        kind = "parallel_tool_calls"
    if not kind or (kind == "parallel_tool_calls" and renderer.family.syntax not in SYNTAX_OF_FAMILY):
        return UNCONSTRAINED  # one call at a time is best effort: no error where no grammar is known
    param = kind if content is None else format_param
    syntax, vocab_size = _syntax_of(renderer, param), renderer.config.vocab_size
    for tool in callable_tools:
        check_tool(tool["function"])
    if kind == "parallel_tool_calls":
        if not syntax.parallel or renderer.family.text_calls:
            return UNCONSTRAINED
        return Constraint(kind, *fitted_tag(syntax.at_most_one(renderer, callable_tools), param, vocab_size))
    single = single or choice.single
    if kind == "tool_choice" and choice.some:
        only = syntax.only_of(renderer, callable_tools, parallel=not single)
        return Constraint(kind, *fitted_tag(only, param, vocab_size))
    answers = [syntax.calls(renderer, callable_tools, parallel=not single)] if callable_tools else []
    if content is not None:
        answers.append(content)
    whole = sequence([*_reasoning(renderer), GAP, either(answers)])
    return Constraint(kind, *fitted_tag(whole, param, vocab_size))


def shown_tools(
    renderer: ChatRenderer, tools: list[Tool] | None, tool_choice: str | Mapping[str, Any] | None
) -> list[Tool] | None:
    """The tools that are in the prompt: all, though only some may be called, if a grammar can say which."""
    if not tools:
        return tools
    choice = read_choice(tool_choice)
    if choice.mode == "none":
        return None
    return list(_callable(tools or (), choice)) if choice.some and not choice.limits(renderer) else tools


def constraint_of_text(form: AnswerForm, param: str, vocab_size: int) -> Constraint:
    """The constraint of an answer without a chat template: all of its text."""
    if form.content is None:
        return UNCONSTRAINED
    return Constraint(form.kind, *fitted_tag(form.content, param, vocab_size))


def schema_form(schema: Any, param: str, *, strict: bool = False) -> AnswerForm:
    """JSON of the schema. Raises InvalidRequest if it is none, or cannot be enforced."""
    if not isinstance(schema, dict):
        raise invalid(param, "not a JSON schema")
    check_schema(schema, param, strict=strict)
    return AnswerForm("json_schema", JsonFormat(json_schema=schema, origin=FormatOrigin(param, strict)))


def pattern_form(pattern: str, param: str) -> AnswerForm:
    """Text that a regular expression matches as a whole. Raises InvalidRequest for an empty or long one."""
    if not pattern:
        raise invalid(param, "an empty pattern")
    check_pattern(pattern, param)
    return AnswerForm("regex", Pattern(pattern=pattern, origin=FormatOrigin(param, strict=True)))


def choice_form(choices: Sequence[str], param: str) -> AnswerForm:
    """One of the texts. Raises InvalidRequest for no text, an empty one, or too many."""
    if not (0 < len(choices) <= MAX_CHOICES and all(choices)):
        raise invalid(param, f"1 to {MAX_CHOICES} texts that are not empty")
    return AnswerForm("choice", either([FixedText(value=choice) for choice in choices]))


def read_choice(tool_choice: str | Mapping[str, Any] | None) -> ToolChoice:
    """A `tool_choice` as in Chat Completions or as in Responses. Raises InvalidRequest for an unknown one."""
    if tool_choice is None or isinstance(tool_choice, str):
        if (plain := PLAIN_CHOICES.get(tool_choice)) is not None:
            return plain
    elif tool_choice.get("type") == "allowed_tools":
        allowed = tool_choice.get("allowed_tools", tool_choice)
        if isinstance(allowed, Mapping) and allowed.get("mode") in ("auto", "required"):
            return ToolChoice(allowed["mode"], _allowed_names(allowed.get("tools")))
    elif (name := _name_of(tool_choice)) is not None:
        return ToolChoice("required", (name,), single=True)
    raise invalid(
        "tool_choice", "auto, none, required, a function by its name, or allowed_tools with their mode"
    )


def _allowed_names(tools: Any) -> tuple[str, ...]:
    """The names of functions that may be called; tools of other types are not in the prompt."""
    listed = tools if isinstance(tools, list) else ()
    names = [name for each in listed if (name := _name_of(each)) is not None]
    if not names:
        raise invalid("tool_choice", "allowed_tools names no function")
    return tuple(names)


def _name_of(named: Any) -> str | None:
    if not isinstance(named, Mapping) or named.get("type") != "function":
        return None
    function = named.get("function")
    name = (function if isinstance(function, Mapping) else named).get("name")
    return name if isinstance(name, str) else None


def _callable(tools: Sequence[Tool], choice: ToolChoice) -> Sequence[Tool]:
    """The tools that may be called. Raises InvalidRequest for a choice of none, or of an unknown one."""
    if choice.mode == "none":
        return ()
    if choice.names is None and (tools or choice.mode == "auto"):
        return tools
    if not tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    names, known = choice.names or (), [tool["function"].get("name") for tool in tools]
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"there is no function {name[:140]!r}")
    return [tool for tool in tools if tool["function"].get("name") in names]


def _form_of(response_format: Mapping[str, Any] | None, param: str) -> AnswerForm:
    """What kind of JSON a format asks for. Raises InvalidRequest for an unknown format."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return AnswerForm()
    if kind == "json_object":
        return AnswerForm("json_object", JsonFormat(json_schema={"type": "object"}))
    if kind != "json_schema":
        raise invalid(param, "its type is text, json_object or json_schema")
    inner = response_format.get("json_schema", response_format)
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, dict):
        raise invalid(param, "json_schema needs a schema")
    return schema_form(schema, param, strict=inner.get("strict") is True)


def _syntax_of(renderer: ChatRenderer, param: str) -> CallSyntax:
    syntax = SYNTAX_OF_FAMILY.get(renderer.family.syntax or "")
    if syntax is not None:
        return syntax
    raise invalid(param, f"answers of the model family {renderer.family.name!r} cannot be constrained")


def _reasoning(renderer: ChatRenderer) -> list[Format]:
    state = _reasoning_state(renderer)
    if state == "over":
        return []
    begin, end = (id_of(renderer, mark) for mark in ("<think>", "</think>"))
    inside = AnyTokens(exclude_tokens=[begin, end, *renderer.stop_ids])
    if state == "open":
        return [sequence([inside, TokenFormat(token=end)])]
    block = sequence([TokenFormat(token=begin), inside, TokenFormat(token=end)])
    return [GAP, OptionalFormat(content=block)]


@lru_cache(maxsize=64)
def _reasoning_state(renderer: ChatRenderer) -> ReasoningState:
    if renderer.tokenizer.backend.token_to_id("</think>") is None:
        return "over"
    prompt = renderer.text_of(renderer.render([{"role": "user", "content": "hi"}], None)[-16:].tolist())
    if prompt.rstrip().endswith("<think>"):
        return "open"
    return "over" if prompt.rstrip().endswith("</think>") else "possible"
