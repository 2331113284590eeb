"""Whether the format of calls of each family follows the grammar that the engine gets."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.language.call_syntax import SYNTAX_OF_FAMILY, FormatOrigin, JsonFormat, Pattern
from gateway.language.constraint import constraint_of, shown_tools
from gateway.language.grammar_cost import fitted, steps_of
from gateway.language.render import ChatRenderer
from gateway.language.schema import check_pattern
from tests.support.gateway.body_parts import OTHER
from tests.support.gateway.families_agent import TOOL, RendererOf

JSON: Any = {"type": "json_object"}


def spoken(form: Any, renderer: ChatRenderer, calls: int) -> list[int]:
    """The ids of an answer with `calls` calls that the grammar accepts."""
    kind = form["type"]
    if kind == "token":
        return [form["token"]]
    if kind == "sequence":
        return [each for part in form["elements"] for each in spoken(part, renderer, calls)]
    if kind == "or":
        return spoken(form["elements"][0], renderer, calls)
    if kind == "star":
        return spoken(form["content"], renderer, calls) * (calls - 1)
    if kind == "optional":
        return []
    if kind == "const_string":
        return renderer.tokenizer.encode(form["value"])
    if kind == "regex":
        return renderer.tokenizer.encode("0" if "d" in form["pattern"] else "")
    return renderer.tokenizer.encode("so" if kind == "any_tokens" else WRITTEN[form["style"]])


WRITTEN = {
    "json": '{"key": "a", "n": 1}',
    "qwen_xml": "<parameter=key>\na\n</parameter>\n<parameter=n>\n1\n</parameter>",
    "glm_xml": "<arg_key>key</arg_key><arg_value>a</arg_value>\n<arg_key>n</arg_key><arg_value>1</arg_value>",
    "minimax_xml": '<parameter name="key">a</parameter>\n<parameter name="n">1</parameter>\n',
}


@pytest.mark.parametrize("family", SYNTAX_OF_FAMILY)
def test_an_answer_that_follows_the_grammar_is_parsed_as_calls(renderer: RendererOf, family: str) -> None:
    syntax, of_family = SYNTAX_OF_FAMILY[family], renderer(family)
    for calls in (1, 2) if syntax.parallel else (1,):
        tag = constraint_of(of_family, [TOOL, OTHER], "required").structural_tag or ""
        ids = [*spoken(json.loads(tag)["format"], of_family, calls), of_family.stop_ids[0]]
        prompt = of_family.render([{"role": "user", "content": "hi"}], [TOOL, OTHER])
        answer = of_family.parse(ids, [TOOL, OTHER], "t", prompt_ids=prompt)
        assert [call.name for call in answer.tool_calls] == ["get"] * calls
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"key": "a", "n": 1}] * calls
        assert not answer.content


@pytest.mark.parametrize("family", [*SYNTAX_OF_FAMILY, "gemma4", "hy3"])
def test_without_a_grammar_that_allows_some_tools_the_prompt_has_no_others(
    renderer: RendererOf, family: str
) -> None:
    of_family, tools = renderer(family), [TOOL, OTHER]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "put"}]}
    constraint = constraint_of(of_family, tools, choice)
    shown = shown_tools(of_family, tools, choice)
    syntax = SYNTAX_OF_FAMILY.get(family)
    if syntax is None or not syntax.marked(of_family):
        assert (constraint.kind, shown) == ("", [OTHER])
    else:
        assert (constraint.kind, shown) == ("tool_choice", tools)
        written = "".join(literals(json.loads(constraint.structural_tag or "")))
        assert ("put" in written, "get" in written) == (True, False)
    if syntax is not None:
        required = choice | {"mode": "required"}
        assert shown_tools(of_family, tools, required) == tools
        assert constraint_of(of_family, tools, required) == constraint_of(of_family, [OTHER], "required")


@pytest.mark.parametrize("family", SYNTAX_OF_FAMILY)
def test_a_marker_that_is_a_token_is_asked_for_by_its_id(renderer: RendererOf, family: str) -> None:
    """The family's parser recognizes only this id, and not ordinary tokens with the marker's text."""
    of_family = renderer(family)
    tag = constraint_of(of_family, [TOOL], "required").structural_tag or ""
    added = [of_family.text_of([token_id]) for token_id in of_family.tokenizer.added_ids]
    assert not [text for text in literals(json.loads(tag)) if any(marker in text for marker in added)]


def literals(value: Any) -> list[str]:
    """The texts in a grammar that the model writes with ordinary tokens."""
    if isinstance(value, list):
        return [text for each in value for text in literals(each)]
    if not isinstance(value, dict):
        return []
    if value.get("type") == "const_string":
        return [value["value"]]
    return [text for each in value.values() for text in literals(each)]


@pytest.mark.parametrize("wish", [("required", None), (None, JSON)])
@pytest.mark.parametrize("family", ["gemma4", "inkling", "deepseek-v4", "hy3"])
def test_a_family_without_a_known_call_format_is_named_in_the_error(
    renderer: RendererOf, family: str, wish: Any
) -> None:
    with pytest.raises(InvalidRequest, match=family) as refused:
        constraint_of(renderer(family), [TOOL], *wish, format_param="text.format")
    assert refused.value.param == ("text.format" if wish[1] else "tool_choice")


def test_a_thought_stays_possible_where_the_template_has_one(renderer: RendererOf) -> None:
    asks = {family: json.loads(grammar_of(renderer(family)))["format"] for family in ("qwen3", "qwen3.5")}
    think, over = (renderer("qwen3").tokenizer.backend.token_to_id(mark) for mark in ("<think>", "</think>"))
    thought = next(part for part in asks["qwen3"]["elements"] if part["type"] == "optional")["content"]
    assert thought["elements"][0] == {"type": "token", "token": think}
    assert thought["elements"][-1] == {"type": "token", "token": over}
    opened = asks["qwen3.5"]["elements"][0]
    assert opened["elements"][0]["type"] == "any_tokens", "the prompt has opened the thought"
    assert "any_tokens" not in grammar_of(renderer("llama-3"))


def grammar_of(renderer: ChatRenderer) -> str:
    return constraint_of(renderer, None, None, JSON).structural_tag or ""


HONEST: Any = {
    "type": "object",
    "properties": {
        **{f"text_{n}": {"type": "string", "maxLength": n} for n in (20, 60, 120, 500, 2000)},
        "email": {"type": "string", "format": "email"},
        "from": {"type": "string", "format": "date"},
        "until": {"type": "string", "format": "date-time"},
        "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 50},
        "format": {"type": "object", "properties": {"maxLength": {"type": "integer"}}},
    },
    "required": ["text_20", "email"],
}


def fitted_schema(schema: Any, vocab_size: int, *, strict: bool) -> tuple[Any, tuple[str, ...]]:
    """The schema of the grammar, and what it does without."""
    kept = fitted(JsonFormat(json_schema=schema, origin=FormatOrigin("response_format", strict)), vocab_size)
    return json.loads(msgspec.json.encode(kept.form))["json_schema"], kept.left_out


@pytest.mark.parametrize("strict", [False, True])
def test_an_honest_schema_is_enforced_whole_by_a_small_vocabulary(strict: bool) -> None:
    assert fitted_schema(HONEST, 4000, strict=strict) == (HONEST, ())


@pytest.mark.parametrize("vocab_size", [32_000, 150_000, 260_000])
def test_a_large_vocabulary_does_without_lengths_that_are_not_strict(vocab_size: int) -> None:
    kept, left_out = fitted_schema(HONEST, vocab_size, strict=False)
    assert left_out == ("maxLength",)
    plain = {f"text_{n}": {"type": "string"} for n in (20, 60, 120, 500, 2000)}
    assert kept == HONEST | {"properties": HONEST["properties"] | plain}
    with pytest.raises(InvalidRequest, match=r"maxLength of \$\.properties\.text_.*leave out strict"):
        fitted_schema(HONEST, vocab_size, strict=True)
    mild = {"type": "object", "properties": {"code": {"type": "string", "minLength": 3, "maxLength": 8}}}
    assert fitted_schema(mild, vocab_size, strict=True) == (mild, ())


PATTERNS = st.recursive(
    st.sampled_from(["a", ".", "[a-z]", r"\\d", "-", "é", "", "^", "(", ")", "|", "[^x]"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{9}", "{0,99}", "{,7}", "{3,}", "{}"])).map(
            "".join
        ),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@given(PATTERNS)
def test_every_pattern_has_a_cost_and_longer_vocabularies_cost_no_less(pattern: str) -> None:
    with suppress(InvalidRequest):
        check_pattern(pattern, "regex")
        assert steps_of(pattern) >= 0
        form = Pattern(pattern=pattern, origin=FormatOrigin("regex", strict=True))
        fitted(form, 150_000)
        fitted(form, 4000)  # does not raise: what a large vocabulary takes, a small one takes, too
