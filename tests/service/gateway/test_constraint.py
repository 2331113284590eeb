"""The grammar of each constraint as it is sent to the engine."""

import json
from typing import Any

import pytest

from tests.support.gateway.body_parts import GET_IT, OTHER
from tests.support.gateway.families_agent import TOOL
from tests.support.gateway.running import RunningGateway

SCHEMA: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
JSON: Any = {"type": "json_object"}
SAID = {"role": "user", "content": "hi"}
GRAMMARS = {"json_schema", "regex", "ebnf", "structural_tag"}


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
    reply = gateway.chat(session=session, stream=stream, **wish)
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("wish", "kind", "form"), GUIDED)
def test_a_guided_answer_is_held_to_its_pattern_or_choices(
    gateway: RunningGateway, path: str, wish: Any, kind: str, form: Any
) -> None:
    said: Any = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [SAID]}
    reply = gateway.post(path, said | wish)
    assert reply.status_code == 200, reply.text
    sent = gateway.engine.requests[0]["sampling_params"]
    assert GRAMMARS & sent.keys() == {"structural_tag"}
    given = json.loads(sent["structural_tag"])["format"]
    assert (given["elements"][-1] if given["type"] == "sequence" else given) == form
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


def test_lengths_that_cost_too_much_are_left_out_and_the_record_says_so(gateway: RunningGateway) -> None:
    """As far as the schema is not strict; its other bounds are in the grammar."""
    properties: Any = {f"f{n}": {"type": "string", "maxLength": n} for n in range(1000, 1900)}
    properties["day"] = {"type": "string", "format": "date"}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    session = gateway.session()
    reply = gateway.chat(session=session, guided_json=schema)
    assert reply.status_code == 200, reply.text
    (kept,) = held(gateway.engine.requests[0]["sampling_params"]["structural_tag"])
    assert kept["properties"].pop("day") == properties["day"]
    assert set(map(str, kept["properties"].values())) == {"{'type': 'string'}"}
    (turn,) = gateway.turns(session)
    assert turn["sampling"]["asked"]["constraint_left_out"] == ["maxLength"]
    assert turn["sampling"]["used"]["why"].startswith("maxLength: ")
    strict = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    refused = gateway.chat(response_format=strict)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    assert len(gateway.engine.requests) == 1


def test_a_free_answer_stays_free(gateway: RunningGateway) -> None:
    free: list[Any] = [
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False},
        {"tools": [TOOL], "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"parallel_tool_calls": False},
    ]
    for wish in free:
        session = gateway.session()
        gateway.chat(session=session, **wish)
        assert not GRAMMARS & gateway.engine.requests[-1]["sampling_params"].keys(), wish
        (turn,) = gateway.turns(session)
        assert "constraint" not in turn["sampling"]["used"], wish


def test_one_call_at_most_forbids_nothing_but_the_second(gateway: RunningGateway) -> None:
    gateway.chat(tools=[TOOL], parallel_tool_calls=False)
    form = json.loads(gateway.engine.requests[0]["sampling_params"]["structural_tag"])["format"]
    opener = gateway.engine.tokenizer.token_to_id("<tool_call>")
    anything = {"type": "any_tokens", "exclude_tokens": [opener]}
    call = {"type": "sequence", "elements": [{"type": "token", "token": opener}, anything]}
    assert form == {"type": "sequence", "elements": [anything, {"type": "optional", "content": call}]}


def allowed(mode: str, *names: str, flat: bool = False) -> Any:
    """A choice of some of the tools, as in Chat or (`flat`) as in Responses."""
    if flat:
        tools: Any = [{"type": "function", "name": name} for name in names]
        hosted = {"type": "mcp", "server_label": "deepwiki"}
        return {"type": "allowed_tools", "mode": mode, "tools": [hosted, *tools]}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_only_allowed_tools_can_be_called_and_the_prompt_keeps_them_all(
    gateway: RunningGateway, path: str, stream: bool
) -> None:
    flat = path == "/v1/responses"
    tools = [{"type": "function", **each["function"]} if flat else each for each in (TOOL, OTHER)]
    body = ({"input": "hi"} if flat else {"messages": [SAID]}) | {"tools": tools, "stream": stream}

    def sent(choice: Any, **more: Any) -> Any:
        reply = gateway.post(path, body | {"tool_choice": choice} | more)
        assert reply.status_code == 200, reply.text
        (turn,) = gateway.turns_of(reply)
        assert turn["sampling"]["used"].get("constraint") == (None if choice == "auto" else "tool_choice")
        return gateway.engine.requests[-1]

    def form(request: Any) -> Any:
        return json.loads(request["sampling_params"]["structural_tag"])["format"]

    free, required = sent("auto"), sent(GET_IT["function"] | {"type": "function"} if flat else GET_IT)
    some = sent(allowed("auto", "get", flat=flat))
    assert some["input_ids"] == free["input_ids"] == required["input_ids"]
    rest, calls = form(some)["elements"]
    opener = gateway.engine.tokenizer.token_to_id("<tool_call>")
    assert rest == {"type": "any_tokens", "exclude_tokens": [opener]}, "text stays free, but for other calls"
    assert calls["type"] == "optional"
    assert held(json.dumps(calls)) == [TOOL["function"]["parameters"]] * 2, "one call, and more of the same"
    single = sent(allowed("auto", "get", flat=flat), parallel_tool_calls=False)
    assert len(held(json.dumps(form(single)))) == 1
    must = sent(allowed("required", "get", flat=flat), parallel_tool_calls=False)
    assert form(must) == form(required)
    both = sent(allowed("required", "get", "put", flat=flat))
    assert form(both) == form(sent("required"))
    error = gateway.post(path, body | {"tool_choice": allowed("auto", "absent", flat=flat)}).json()["error"]
    assert (error["param"], "'absent'" in error["message"]) == ("tool_choice", True)


def test_responses_and_messages_hold_an_answer_to_the_same(gateway: RunningGateway) -> None:
    gateway.chat(tools=[TOOL], tool_choice="required")
    gateway.chat(tools=[TOOL], tool_choice=GET_IT)
    gateway.chat(response_format=FORMAT)
    flat = {"type": "function", **TOOL["function"]}
    asked: list[tuple[str, Any]] = [
        ("responses", {"input": "hi", "tools": [flat], "tool_choice": "required"}),
        ("responses", {"input": "hi", "tools": [flat], "tool_choice": {"type": "function", "name": "get"}}),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", **FORMAT["json_schema"]}}}),
    ]
    schema = TOOL["function"]["parameters"]
    plain = {"messages": [SAID], "max_tokens": 9, "tools": [{"name": "get", "input_schema": schema}]}
    asked.append(("messages", {**plain, "tool_choice": {"type": "any"}}))
    asked.append(("messages", {**plain, "tool_choice": {"type": "tool", "name": "get"}}))
    for path, body in asked:
        assert gateway.post(f"/v1/{path}", body).status_code == 200
    required, named, form, *others = [
        request["sampling_params"]["structural_tag"] for request in gateway.engine.requests
    ]
    assert others == [required, named, form, required, named]


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
    reply = gateway.chat(session=session, response_format=FORMAT, stream=stream)
    assert reply.status_code == 400
    assert "Unsupported type" in reply.json()["error"]["message"]
    assert len(gateway.engine.requests) == 1
    assert not gateway.turns(session)


def test_biases_reach_the_engine_where_the_caller_owns_the_sampling(gateway: RunningGateway) -> None:
    trained, evaluated = gateway.session(), gateway.session(train=False)
    for session in (trained, evaluated):
        gateway.chat(session=session, logit_bias={"12": -100, "007": 2.5})
    of_trained, of_evaluated = [request["sampling_params"] for request in gateway.engine.requests]
    assert "logit_bias" not in of_trained
    assert of_evaluated["logit_bias"] == {"12": -100, "7": 2.5}
    (turn,) = gateway.turns(trained)
    assert turn["sampling"]["asked"]["logit_bias"] == {"12": -100, "7": 2.5}
