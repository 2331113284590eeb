"""The Responses contract over HTTP, with the official client and its own types."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rollout_queue.redis import key_names
from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.fake_engine import logprob_of
from tests.support.gateway.running import OTHER_KEY, Backends, RunningGateway
from tests.support.waiting import wait_until

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    "strict": False,
}
THINKING = "<think>\nwhich one?\n</think>\n\n"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the official types."""
    events: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def asked(gateway: RunningGateway, index: int = -1) -> str:
    """The text of a prompt that the engine received."""
    return str(
        gateway.engine.tokenizer.decode(
            gateway.engine.requests[index]["input_ids"], skip_special_tokens=False
        )
    )


def answer(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    """The response, plain or streamed."""
    if not stream:
        return client.responses.create(model="m", **asked)
    with client.responses.stream(model="m", **asked) as events:
        return events.get_final_response()


def assert_extends(gateway: RunningGateway, session: dict[str, Any], said: str = "") -> None:
    """The session's two turns are one conversation, token by token."""
    one, two = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"]), said
    assert gateway.engine.requests[-1]["input_ids"] == (
        one["context_ids"] + one["output_ids"] + two["context_ids"]
    )


def test_the_official_client_gets_an_answer(gateway: RunningGateway) -> None:
    gateway.engine.script.append("good morning")
    session = gateway.session()
    response = gateway.client(session).responses.create(model="policy", input="hi", instructions="be kind")
    assert (response.output_text, response.status) == ("good morning", "completed")
    assert asked(gateway).startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    (turn,) = gateway.turns(session)
    assert turn["completion_id"] == response.id
    assert response.usage is not None
    assert response.usage.input_tokens == len(turn["context_ids"])
    assert response.usage.output_tokens == len(turn["output_ids"])
    assert response.usage.total_tokens == len(turn["context_ids"]) + len(turn["output_ids"])


def test_a_response_is_one_of_the_contract_and_echoes_its_request(gateway: RunningGateway) -> None:
    said = {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "instructions": "be kind",
        "max_output_tokens": 50,
        "metadata": {"run": "7"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "tools": [{"type": "web_search"}, TOOL, {"type": "custom", "name": "patch"}],
        "tool_choice": "auto",
        "text": {"verbosity": "medium"},
        "user": "u",
    }
    reply = gateway.post(PATH, said | {"service_tier": "auto", "truncation": "auto", "include": []})
    response = Response.model_validate(reply.json())
    assert response.model == "policy"
    told = reply.json()
    for name in set(said) - {"input", "text"}:
        assert told[name] == said[name], name
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert gateway.engine.requests[0]["sampling_params"]["max_new_tokens"] == 50


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_a_number_of_more_than_64_bits_is_kept_as_it_came(
    gateway: RunningGateway, number: int, background: bool
) -> None:
    limited = {**TOOL, "parameters": {"type": "object", "properties": {"n": {"maximum": number}}}}
    said = {"input": "hi", "background": background, "metadata": {"run": number}, "tools": [limited]}
    first = gateway.post(PATH, said)
    assert first.status_code == 200, first.text

    def kept() -> Any:
        return gateway.get(f"{PATH}/{first.json()['id']}").json()

    wait_until(lambda: kept()["status"] == "completed")
    assert (kept()["metadata"], kept()["tools"]) == ({"run": number}, [limited])
    again = gateway.post(PATH, {"input": "and?", "previous_response_id": kept()["id"]})
    assert again.status_code == 200, again.text
    assert "hi" in asked(gateway)


def test_a_stream_tells_its_answer_in_the_events_of_the_contract(gateway: RunningGateway) -> None:
    gateway.engine.script.append(THINKING + "let me see" + CALL_TEXT)
    events = events_of(gateway.post(PATH, {"input": "a?", "tools": [TOOL], "stream": True}).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_text.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_text.done",
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    ended = {event["output_index"]: event["item"] for event in events if "item.done" in event["type"]}
    assert [ended[index] for index in range(3)] == output
    begun = [event["item"]["id"] for event in events if "item.added" in event["type"]]
    assert begun == [item["id"] for item in output]

    def told(kind: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")

    assert told("reasoning_text") == output[0]["content"][0]["text"] == "which one?"
    assert told("output_text") == output[1]["content"][0]["text"] == "let me see"
    assert json.loads(told("function_call_arguments")) == {"key": "a"}
    assert output[2]["status"] == "completed"
    usage = events[-1]["response"]["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("limit", [2, 5, 500])
def test_a_stream_ends_in_what_the_whole_response_says(gateway: RunningGateway, limit: int) -> None:
    for said in ("one two three", THINKING + "one two three", THINKING + CALL_TEXT * 2, ""):
        gateway.engine.script.extend([said, said])
        body = {"input": "a?", "tools": [TOOL], "max_output_tokens": limit}
        whole = gateway.post(PATH, body).json()
        streamed = events_of(gateway.post(PATH, body | {"stream": True}).text)[-1]["response"]
        assert set(streamed) == set(whole)
        names = re.compile("[0-9a-f]{32}")
        for name in ("output", "status", "incomplete_details", "usage"):
            told, streamed_too = (names.sub("-", json.dumps(each[name])) for each in (whole, streamed))
            assert streamed_too == told, (name, said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_by_its_id(gateway: RunningGateway, stream: bool) -> None:
    for said in (CALL_TEXT, THINKING + "let me see" + CALL_TEXT, CALL_TEXT * 2):
        gateway.engine.script.extend([said, "seven"])
        session = gateway.session()
        with gateway.client(session) as client:
            more = {"tools": [TOOL], "instructions": "be kind"}
            first = answer(client, stream, input="value of a?", **more)
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "a = 7"}
                for item in first.output
                if item.type == "function_call"
            ]
            second = answer(client, stream, input=results, previous_response_id=first.id, **more)
            assert (second.output_text, second.previous_response_id) == ("seven", first.id), said
            assert_extends(gateway, session, said)
            context_ids = gateway.turns(session)[1]["context_ids"]
            new = gateway.engine.tokenizer.decode(context_ids, skip_special_tokens=False)
            assert new.count("<tool_response>\na = 7\n</tool_response>") == len(results)


SAID = (
    "let me see",
    "  padded \n",
    "",
    THINKING + "let me see",
    CALL_TEXT,
    THINKING + CALL_TEXT * 2,
    "let me see" + CALL_TEXT,
    "<tool_call>\n{nonsense\n</tool_call>",
    CALL_TEXT + "and then<tool_call>\n{nonsense\n</tool_call>",
)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_sends_back_as_it_got_it_extends(gateway: RunningGateway, stream: bool) -> None:
    for said in SAID:
        gateway.engine.script.extend([said, "seven"])
        session = gateway.session()
        with gateway.client(session) as client:
            history: list[Any] = [{"role": "user", "content": "value of a?"}]
            first = answer(client, stream, input=history, tools=[TOOL])
            history += [item.to_dict() for item in first.output]
            calls = [item.call_id for item in first.output if item.type == "function_call"]
            told = [{"type": "input_text", "text": "seven"}]
            history += [
                {"type": "function_call_output", "call_id": call_id, "output": told}
                for call_id in calls or ["none"]
            ]
            answer(client, stream, input=history, tools=[TOOL])
            assert_extends(gateway, session, said)


def test_instructions_hold_for_one_call(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.session())
    first = client.responses.create(model="m", input="hi", instructions="be kind")
    client.responses.create(model="m", input="and?", instructions="be brief", previous_response_id=first.id)
    assert "be kind" not in asked(gateway)
    assert asked(gateway).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>")


def test_a_response_is_continued_at_another_gateway(gateway: RunningGateway, backends: Backends) -> None:
    gateway.engine.script.extend([CALL_TEXT, "seven"])
    first = gateway.post(PATH, {"input": "a?", "tools": [TOOL]})
    result = {"type": "function_call_output", "call_id": first.json()["output"][0]["call_id"], "output": "7"}
    with backends.gateway() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        said = {"input": [result], "tools": [TOOL], "previous_response_id": first.json()["id"]}
        second = other.post(PATH, said)
    assert second.headers["x-weir-session-id"] == first.headers["x-weir-session-id"]
    assert_extends(gateway, {"session_id": first.headers["x-weir-session-id"]})


def test_a_long_chain_is_continued_to_its_end(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}{PATH}"
    last = None
    for number in range(70):
        reply = gateway.post(path, {"input": f"number {number}", "previous_response_id": last})
        last = reply.json()["id"]
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root"] + ["extends"] * 69
    assert [f"number {number}<|im_end|>" in asked(gateway) for number in range(70)] == [True] * 70


def test_a_history_that_is_sent_anew_is_kept_once(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}{PATH}"
    history: list[Any] = [{"role": "user", "content": "word " * 200}]
    for _ in range(3):
        response = gateway.post(path, {"input": history, "instructions": "be kind"}).json()
        history += [*response["output"], {"role": "user", "content": "and?"}]
    kept: list[Any] = [gateway.redis.get(name) for name in gateway.redis.scan_iter(key_names.response("*"))]
    assert (len(kept), sum(b"word" in each for each in kept)) == (3, 1)
    gateway.post(path, {"input": "so?", "instructions": "be kind", "previous_response_id": response["id"]})
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root"] + ["extends"] * 3


def test_a_history_that_was_edited_is_kept_as_it_was_said(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}{PATH}"
    first = gateway.post(path, {"input": "hi"}).json()
    history = [{"role": "user", "content": "HO"}, *first["output"], {"role": "user", "content": "and?"}]
    second = gateway.post(path, {"input": history}).json()
    gateway.post(path, {"input": "so?", "previous_response_id": second["id"]})
    assert "HO<|im_end|>" in asked(gateway)
    assert "hi<|im_end|>" not in asked(gateway)


def test_what_is_kept_lives_as_long_as_its_session(gateway: RunningGateway) -> None:
    session = gateway.session(ttl_s=50)
    client = gateway.client(session)
    first = client.responses.create(model="m", input="hi")
    gateway.redis.pexpire(key_names.response(first.id), 30_000)
    second = client.responses.create(model="m", input="and?", previous_response_id=first.id)
    for each in (first, second):
        assert 40_000 < gateway.redis.pttl(key_names.response(each.id)) <= 50_000


def test_a_response_with_store_false_is_not_stored(gateway: RunningGateway) -> None:
    first = gateway.post(PATH, {"input": "hi", "store": False}).json()
    assert first["store"] is False
    assert not list(gateway.redis.scan_iter(key_names.response("*")))
    refused = gateway.post(PATH, {"input": "and?", "previous_response_id": first["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")


def test_an_unknown_response_is_a_404_that_names_the_field(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.session())
    for unknown in ("resp_" + "0" * 32, "resp_none", "\u00e9"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="m", input="x", previous_response_id=unknown)
        error = caught.value
        assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id"), unknown


def test_a_response_of_a_finished_session_is_a_conflict(gateway: RunningGateway) -> None:
    session = gateway.session()
    first = gateway.client(session).responses.create(model="m", input="hi")
    gateway.finish(session)
    refused = gateway.post(PATH, {"input": "and?", "previous_response_id": first.id})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_finished")


def test_items_are_found_by_their_ids(gateway: RunningGateway) -> None:
    """By default, the AI SDK sends its history as references to item ids."""
    gateway.engine.script.extend(["let me see" + CALL_TEXT, "seven"])
    session = gateway.session()
    client = gateway.client(session)
    first = client.responses.create(model="m", input="a?", tools=[TOOL])
    message, call = first.output
    history: list[Any] = [
        {"role": "user", "content": "a?"},
        {"type": "item_reference", "id": message.id},
        {"id": call.id},
        {"type": "function_call_output", "call_id": getattr(call, "call_id", None), "output": "7"},
    ]
    client.responses.create(model="m", input=history, tools=[TOOL])
    assert_extends(gateway, session)
    refused = gateway.post(PATH, {"input": history}, key=OTHER_KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].id")


FUNCTION: Any = {name: TOOL[name] for name in ("name", "parameters", "strict")}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED: Any = {"name": "x", "schema": SCHEMA}
AS_IN_A_CHAT: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"tool_choice": "none"}, {"tool_choice": "none"}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    (
        {"tool_choice": {"type": "function", "name": "get"}},
        {"tool_choice": {"type": "function", "function": {"name": "get"}}},
    ),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {"text": {"format": {"type": "json_schema", **NAMED}}},
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    ),
]


def test_tools_are_read_and_an_answer_is_held_to_the_same_as_in_a_chat(gateway: RunningGateway) -> None:
    for said, in_a_chat in AS_IN_A_CHAT:
        Response.model_validate(gateway.post(PATH, {"input": "a?", "tools": [TOOL], **said}).json())
        gateway.chat("a?", tools=[{"type": "function", "function": FUNCTION}], **in_a_chat)
        ours, theirs = gateway.engine.requests[-2:]
        assert ours["input_ids"] == theirs["input_ids"], said
        held = [each["sampling_params"].get("structural_tag") for each in (ours, theirs)]
        assert held[0] == held[1], said
        assert (held[0] is None) == (said.get("tool_choice") == "none" or not said), said
    gateway.post(PATH, {"input": "a?"})
    assert gateway.engine.requests[-1]["input_ids"] == gateway.engine.requests[2]["input_ids"], "no tools"


def test_logprobs_and_ids_on_request(gateway: RunningGateway) -> None:
    asked_for = {"top_logprobs": 1, "include": ["message.output_text.logprobs"], "return_token_ids": True}
    reply = gateway.post(PATH, {"input": "hi", "stream": True, **asked_for})
    events = events_of(reply.text)
    response = events[-1]["response"]
    assert events[-1]["token_ids"] == response["token_ids"]
    told = [entry for event in events if "text.delta" in event["type"] for entry in event["logprobs"]]
    assert [entry["logprob"] for entry in told] == [logprob_of(index) for index in range(len(told))]
    assert told
    (turn,) = gateway.turns_of(reply)
    for each in (response, gateway.post(PATH, {"input": "hi", **asked_for}).json()):
        assert each["prompt_token_ids"] == gateway.engine.requests[0]["input_ids"]
        assert each["token_ids"] == turn["output_ids"]
        logprobs = each["output"][0]["content"][0]["logprobs"]
        assert [entry["logprob"] for entry in logprobs] == turn["logprobs"]
        assert logprobs[0]["top_logprobs"][0]["logprob"] == -0.1
        Response.model_validate(each)


def test_a_malformed_call_in_a_history_is_no_error(gateway: RunningGateway) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": "no"}
    for arguments in ("{nonsense", "[]", "", "null", "[" * 3000):
        call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": arguments}
        history = [{"role": "user", "content": "a?"}, call, output]
        assert gateway.post(PATH, {"input": history}).status_code == 200, arguments


@pytest.fixture
def almost_full(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Redis stores the turn, and refuses everything after it."""
    from gateway.generations.recorder import Recorder

    record = Recorder.record

    async def fill(self: Recorder, generation: Any) -> Any:
        kept = await record(self, generation)
        gateway.redis.config_set("maxmemory", 1)
        return kept

    monkeypatch.setattr(Recorder, "record", fill)
    yield
    gateway.redis.config_set("maxmemory", 0)


@pytest.mark.usefixtures("almost_full")
def test_a_response_that_cannot_be_kept_is_no_success(gateway: RunningGateway) -> None:
    for _ in range(2):  # the second call finds a Redis that is full from the beginning
        reply = gateway.post(PATH, {"input": "x"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")


@pytest.mark.usefixtures("almost_full")
def test_an_error_in_a_stream_is_readable_in_either_shape(gateway: RunningGateway) -> None:
    text = gateway.post(PATH, {"input": "x", "stream": True}).text
    last = events_of(text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "storage_unavailable")
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert (last["message"], last["code"]) == (last["error"]["message"], "storage_unavailable")
    assert "response.completed" not in text
    assert "[DONE]" not in text
