"""The grammar of each constraint as it is sent to the engine, and whether each family's format follows it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.language.call_syntax import SYNTAX_OF_FAMILY
from gateway.language.constraint import constraint_of
from gateway.language.render import ChatRenderer
from gateway.language.schema import MAX_BYTES
from tests.support.gateway.families_agent import TOOL, renderer_of
from tests.support.gateway.running import RunningGateway

OTHER: Any = {"type": "function", "function": {"name": "put", "parameters": {"type": "object"}}}
GET_IT: Any = {"type": "function", "function": {"name": "get"}}
SCHEMA: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
JSON: Any = {"type": "json_object"}
GRAMMARS = {"json_schema", "regex", "ebnf", "structural_tag"}

RendererOf = Callable[[str], ChatRenderer]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> RendererOf:
    directory: Path = tmp_path_factory.mktemp("families")
    return lambda family: renderer_of(directory, family)


def held(tag: str) -> list[Any]:
    """The JSON schemas in a structural tag."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value["json_schema"]] if value.get("type") == "json_schema" else [])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    look(json.loads(tag))
    return found


# Over HTTP


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wish", "kind", "schemas"),
    [
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, "tool_choice", ["get", "put"]),
        ({"tools": [TOOL, OTHER], "tool_choice": GET_IT}, "tool_choice", ["get"]),
        ({"response_format": FORMAT}, "json_schema", [SCHEMA]),
        ({"response_format": JSON}, "json_object", [{"type": "object"}]),
        ({"tools": [OTHER], "response_format": FORMAT}, "json_schema", ["put", SCHEMA]),
        ({"tools": [OTHER], "response_format": FORMAT, "tool_choice": "none"}, "json_schema", [SCHEMA]),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", []),
    ],
)
def test_an_answer_is_held_to_what_was_asked_and_the_record_says_so(
    gateway: RunningGateway, wish: Any, kind: str, schemas: list[Any], stream: bool
) -> None:
    session = gateway.session()
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", stream=stream, **wish)
    assert reply.status_code == 200, reply.text
    sent = gateway.engine.requests[0]["sampling_params"]
    assert GRAMMARS & sent.keys() == {"structural_tag"}
    assert "constraint" not in sent
    of_tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (TOOL, OTHER)}
    wanted = [of_tools[each] if isinstance(each, str) else each for each in schemas]
    seen = held(sent["structural_tag"])
    assert all(each in wanted for each in seen)
    assert all(each in seen for each in wanted)
    (turn,) = gateway.turns(session)
    assert turn["sampling"]["asked"]["constraint"] == turn["sampling"]["used"]["constraint"] == kind
    assert json.loads(reply.headers["x-weir-sampling"])["constraint"] == kind


PATTERN = {"type": "regex", "pattern": "[a-c]{2,4}"}
CHOICE = {"type": "or", "elements": [{"type": "const_string", "value": word} for word in ("yes", "no")]}
GUIDED: Any = [
    ({"guided_regex": "[a-c]{2,4}"}, "regex", PATTERN),
    ({"regex": "[a-c]{2,4}"}, "regex", PATTERN),
    ({"guided_choice": ["yes", "no"]}, "choice", CHOICE),
]


def elements_of(format_: Any) -> list[Any]:
    """The parts of a sequence. For any other format, a list of the format alone."""
    return list(format_["elements"]) if format_["type"] == "sequence" else [format_]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("wish", "kind", "form"), GUIDED)
def test_a_guided_answer_is_held_to_its_pattern_or_choices(
    gateway: RunningGateway, path: str, wish: Any, kind: str, form: Any
) -> None:
    said = (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    reply = gateway.post(path, said | wish)
    assert reply.status_code == 200, reply.text
    sent = gateway.engine.requests[0]["sampling_params"]
    assert GRAMMARS & sent.keys() == {"structural_tag"}
    assert elements_of(json.loads(sent["structural_tag"])["format"])[-1] == form
    (turn,) = gateway.turns({"session_id": reply.headers["x-weir-session-id"]})
    assert turn["sampling"]["asked"]["constraint"] == turn["sampling"]["used"]["constraint"] == kind


def test_guided_json_is_a_response_format_with_that_schema(gateway: RunningGateway) -> None:
    gateway.chat(response_format=FORMAT)
    gateway.chat(guided_json=SCHEMA)
    gateway.chat(guided_json=json.dumps(SCHEMA))
    gateway.chat(guided_json=SCHEMA, response_format={"type": "text"})
    tags = {request["sampling_params"]["structural_tag"] for request in gateway.engine.requests}
    assert (len(gateway.engine.requests), len(tags)) == (4, 1)
    gateway.post("/v1/completions", {"prompt": "hi", "guided_json": SCHEMA})
    assert held(gateway.engine.requests[-1]["sampling_params"]["structural_tag"]) == [SCHEMA]


@pytest.mark.parametrize(
    "wish",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": [TOOL], "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"parallel_tool_calls": False},
    ],
)
def test_a_free_answer_stays_free(gateway: RunningGateway, wish: Any) -> None:
    session = gateway.session()
    gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", **wish)
    assert not GRAMMARS & gateway.engine.requests[0]["sampling_params"].keys()
    (turn,) = gateway.turns(session)
    assert "constraint" not in turn["sampling"]["used"]


def test_one_call_at_most_forbids_nothing_but_the_second(gateway: RunningGateway) -> None:
    gateway.chat(tools=[TOOL], parallel_tool_calls=False)
    form = json.loads(gateway.engine.requests[0]["sampling_params"]["structural_tag"])["format"]
    opener = gateway.engine.tokenizer.token_to_id("<tool_call>")
    anything = {"type": "any_tokens", "exclude_tokens": [opener]}
    call = {"type": "sequence", "elements": [{"type": "token", "token": opener}, anything]}
    assert form == {"type": "sequence", "elements": [anything, {"type": "optional", "content": call}]}


def test_responses_and_messages_hold_an_answer_to_the_same(gateway: RunningGateway) -> None:
    gateway.chat(tools=[TOOL], tool_choice="required")
    gateway.chat(tools=[TOOL], tool_choice=GET_IT)
    gateway.chat(response_format=FORMAT)
    flat = {"type": "function", **TOOL["function"]}
    said = {"role": "user", "content": "hi"}
    asked: list[tuple[str, Any]] = [
        ("responses", {"input": "hi", "tools": [flat], "tool_choice": "required"}),
        ("responses", {"input": "hi", "tools": [flat], "tool_choice": {"type": "function", "name": "get"}}),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}}}),
    ]
    schema = TOOL["function"]["parameters"]
    plain = {"messages": [said], "max_tokens": 9, "tools": [{"name": "get", "input_schema": schema}]}
    asked.append(("messages", {**plain, "tool_choice": {"type": "any"}}))
    asked.append(("messages", {**plain, "tool_choice": {"type": "tool", "name": "get"}}))
    for path, body in asked:
        assert gateway.post(f"/v1/{path}", body).status_code == 200
    required, named, form, *others = [
        request["sampling_params"]["structural_tag"] for request in gateway.engine.requests
    ]
    assert others == [required, named, form, required, named]


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": GET_IT, "tools": []}, "tool_choice"),
        ({"tool_choice": GET_IT, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": 'a"<'}}], "tool_choice": "required"}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_contradiction_is_refused_before_any_engine_hears_of_it(
    gateway: RunningGateway, wish: Any, param: str
) -> None:
    reply = gateway.chat(**wish)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not gateway.engine.requests


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "name": "x"},
        {"type": "json_schema", "name": "x", "schema": {"$ref": "http://elsewhere/schema"}},
        {"type": "json_schema", "name": "x", "schema": {"enum": ["x" * (MAX_BYTES - 20)]}},
    ],
    ids=["no schema", "elsewhere", "too much with what is around it"],
)
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", lambda form: {"input": "x", "text": {"format": form}}, "text.format"),
        ("/v1/messages", lambda form: {"output_config": {"format": form}}, "output_config.format"),
        ("/v1/messages", lambda form: {"output_format": form}, "output_format"),
    ],
    ids=["responses", "messages", "older messages"],
)
def test_a_format_that_is_refused_is_called_as_its_dialect_does(
    gateway: RunningGateway, path: str, body: Any, param: str, form: Any
) -> None:
    said = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} if "messages" in path else {}
    error = gateway.post(path, said | body(form)).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")
    assert not gateway.engine.requests


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def in_format(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


MANY_STATES = "([a-z]{1,60}|x){1,60}"


def test_a_schema_may_have_many_simple_patterns(gateway: RunningGateway) -> None:
    names = {f"name{number}": {"pattern": "^[a-z]{1,64}(-[0-9]{1,32})?$"} for number in range(80)}
    assert gateway.chat(response_format=in_format({"properties": names})).status_code == 200


@pytest.mark.parametrize("pattern", [MANY_STATES, r"[)(]{1,9}\({9}", "(((", ")a{2}", "a{2}{3}", "{3}"])
def test_the_gateway_reads_any_pattern(gateway: RunningGateway, pattern: str) -> None:
    assert gateway.chat(response_format=in_format({"pattern": pattern})).status_code == 200


def test_the_patterns_of_all_tools_count_together(gateway: RunningGateway) -> None:
    parameters = {"properties": {"a": {"pattern": MANY_STATES}}}
    tools = [
        {"type": "function", "function": {"name": f"t{number}", "parameters": parameters}}
        for number in range(4)
    ]
    reply = gateway.chat(tools=tools, tool_choice="required")
    assert reply.status_code == 400
    assert "too complex" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (nested(40), "levels"),
        (nested(450), "levels"),
        ({"enum": ["x" * 10] * (MAX_BYTES // 10)}, "bytes"),
        ({"$ref": "#"}, "back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "back to itself"),
        (
            {
                "properties": {"x": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "back to itself",
        ),
        ({"$ref": "http://elsewhere/schema"}, "elsewhere"),
        ({"anyOf": [{"type": "null"}] * 1000}, "parts"),
        ({"type": "string", "pattern": "(.{0,1000}){0,1000}"}, "too complex to compile"),
        ({"patternProperties": {"(a|b|ab)*" * 65: {}}}, "too complex to compile"),
        ({"type": "string", "pattern": "a{" + "9" * 5000 + "}"}, "too complex to compile"),
        ({"items": [{"pattern": "a?" * 70}]}, "too complex to compile"),
        (
            {"properties": {key: {"pattern": f"{key}{MANY_STATES}"} for key in "abcd"}},
            "too complex to compile",
        ),
        ({"properties": {"a": {"type": "integer", "multipleOf": 3}}}, "multipleOf"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "allOf"),
    ],
)
def test_a_schema_that_no_engine_could_keep_is_refused(
    gateway: RunningGateway, schema: Any, why: str
) -> None:
    reply = gateway.chat(
        response_format={"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    )
    assert reply.status_code == 400
    assert why in reply.json()["error"]["message"]
    assert not gateway.engine.requests


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        ({"type": "object", "properties": {"next": {"$ref": "#"}, "not": {"type": "null"}}}, True),
        ({"enum": [{"$ref": "#", "if": 1}]}, True),
        ({"type": "array", "uniqueItems": True}, False),
        ({"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{4}$"}, True),
    ],
)
def test_a_schema_that_only_looks_like_one_of_those_is_taken(
    gateway: RunningGateway, schema: Any, strict: bool
) -> None:
    wish = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    assert gateway.chat(response_format=wish).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_engine_cannot_compile_is_the_callers_fault(
    gateway: RunningGateway, stream: bool
) -> None:
    """The engine reports the failure in the stream, with one id that was not sampled and has no logprob."""
    session = gateway.session()
    message = 'Failed to compile structural_tag grammar: Unsupported type "nonsense"'
    abort = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
    gateway.engine.script.append([])
    gateway.engine.last_words = {"finish_reason": abort, "output_token_logprobs": []}
    reply = gateway.chat(
        path=f"/sessions/{session['session_id']}/v1/chat/completions", response_format=FORMAT, stream=stream
    )
    assert reply.status_code == 400
    assert "Unsupported type" in reply.json()["error"]["message"]
    assert len(gateway.engine.requests) == 1
    assert not gateway.turns(session)


def test_biases_reach_the_engine_where_the_caller_owns_the_sampling(gateway: RunningGateway) -> None:
    trained, evaluated = gateway.session(), gateway.session(train=False)
    for session in (trained, evaluated):
        gateway.chat(
            path=f"/sessions/{session['session_id']}/v1/chat/completions", logit_bias={"12": -100, "007": 2.5}
        )
    of_trained, of_evaluated = [request["sampling_params"] for request in gateway.engine.requests]
    assert "logit_bias" not in of_trained
    assert of_evaluated["logit_bias"] == {"12": -100, "7": 2.5}
    (turn,) = gateway.turns(trained)
    assert turn["sampling"]["asked"]["logit_bias"] == {"12": -100, "7": 2.5}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "bias",
    [{"99999": 1}, {"-1": 1}, {"x": 1}, {"": 1}, {"٣": 1}, {"1" * 30: 1}, {"1": 101}, {"1": -100.5}],
)
def test_a_bias_for_an_id_outside_the_vocabulary_never_reaches_an_engine(
    gateway: RunningGateway, path: str, bias: Any
) -> None:
    chat = path == "chat/completions"
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    reply = gateway.post(f"/v1/{path}", asked | {"logit_bias": bias})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias")
    assert not gateway.engine.requests


# The families


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
