"""Chat completions over HTTP, with the official client where a client would use one."""

import json
from typing import Any

import openai
import pytest

from tests.support.gateway.examples import CALL_TEXT
from tests.support.gateway.fake_engine import logprob_of
from tests.support.gateway.running import RunningGateway

TOOL: Any = {
    "type": "function",
    "function": {"name": "get", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}


def answer(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    """The choice of an answer, plain or streamed."""
    if not stream:
        return client.chat.completions.create(model="m", **asked).choices[0]
    with client.chat.completions.stream(model="m", **asked) as events:
        return events.get_final_completion().choices[0]


def test_the_official_client_gets_an_answer(gateway: RunningGateway) -> None:
    gateway.engine.script.append("good morning")
    client = gateway.client(gateway.session())
    completion = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    assert completion.choices[0].message.content == "good morning"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(gateway.engine.tokenizer.encode("good morning").ids) + 1


def test_the_record_holds_what_the_engine_returned(gateway: RunningGateway) -> None:
    session = gateway.session()
    reply = gateway.chat(session=session, headers={"x-request-id": "mine-1"})
    (turn,) = gateway.turns(session)
    (asked,) = gateway.engine.requests
    assert turn["context_ids"] == asked["input_ids"]
    assert turn["output_ids"][-1] == gateway.engine.tokenizer.token_to_id("<|im_end|>")
    assert turn["logprobs"] == [logprob_of(index) for index in range(len(turn["output_ids"]))]
    assert turn["versions"] == [{"version": 0, "start": 0, "end": len(turn["output_ids"])}]
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-weir-session-id"] == session["session_id"]
    assert reply.headers["x-weir-turn-id"] == turn["turn_id"]
    assert reply.headers["x-weir-policy-version"] == "0"
    assert json.loads(reply.headers["x-weir-sampling"])["temperature"] == 1.0


def test_both_ways_of_engine_streaming_give_the_same_record(gateway: RunningGateway) -> None:
    outputs = []
    for cumulative in (False, True):
        gateway.engine.cumulative = cumulative
        gateway.engine.script.append("one two three four five")
        (turn,) = gateway.turns_of(gateway.chat(stream=True))
        outputs.append((turn["output_ids"], turn["logprobs"]))
    assert outputs[0] == outputs[1]


def test_version_spans_are_recorded_as_sampled(gateway: RunningGateway) -> None:
    gateway.engine.spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    gateway.engine.script.append([*gateway.engine.tokenizer.encode("hello").ids[:1], 5])
    session = gateway.session()
    gateway.chat(session=session)
    (turn,) = gateway.turns(session)
    assert turn["versions"] == [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]


def test_streamed_text_is_the_answer_token_by_token(gateway: RunningGateway) -> None:
    text = "a longer answer, with ünïcödé and 漢字 in it"
    gateway.engine.script.append(text)
    gateway.engine.pace_s = 0.03  # a pause between tokens: those that arrive together are sent as one chunk
    client = gateway.client(gateway.session())
    chunks = list(
        client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert sum(bool(piece) for piece in pieces) > 5
    assert chunks[-1].usage is not None
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_reaches_the_client(gateway: RunningGateway, stream: bool) -> None:
    gateway.engine.script.append("let me see" + CALL_TEXT)
    client = gateway.client(gateway.session())
    choice = answer(client, stream, messages=[{"role": "user", "content": "a?"}], tools=[TOOL])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me see"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get", {"key": "a"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_tool_call_stays_readable_and_the_session_goes_on(
    gateway: RunningGateway, stream: bool
) -> None:
    gateway.engine.script.append("<tool_call>\n{nonsense\n</tool_call>")
    session = gateway.session()
    client = gateway.client(session)
    history: list[Any] = [{"role": "user", "content": "a?"}]
    message = answer(client, stream, messages=history).message
    assert "nonsense" in message.content
    history += [
        {"role": "assistant", "content": message.content},
        {"role": "tool", "content": "no", "tool_call_id": "x"},
    ]
    answer(client, stream, messages=history)
    assert [turn["relation"] for turn in gateway.turns(session)] == ["root", "extends"]


def test_turn_two_is_turn_one_and_its_sample_and_the_new_messages(gateway: RunningGateway) -> None:
    gateway.engine.script.extend([CALL_TEXT, "seven"])
    session = gateway.session()
    client = gateway.client(session)
    history: list[Any] = [{"role": "user", "content": "value of a?"}]
    reply = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    first: Any = reply.choices[0].message
    history += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a = 7"}]
    client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    one, two = gateway.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert (
        gateway.engine.requests[1]["input_ids"] == one["context_ids"] + one["output_ids"] + two["context_ids"]
    )
    result = "<tool_response>\na = 7\n</tool_response>"
    new = gateway.engine.tokenizer.decode(two["context_ids"], skip_special_tokens=False)
    assert new == f"\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"


def test_sessions_that_begin_alike_go_on_apart(gateway: RunningGateway) -> None:
    """Sessions that begin with the same prompt share its rendering, but do not affect each other."""
    begin: list[dict[str, Any]] = [{"role": "user", "content": "the task of a group"}]
    prompts = []
    for number in range(3):
        session = gateway.session()
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        answer = gateway.post(path, {"messages": begin}).json()["choices"][0]["message"]
        gateway.post(path, {"messages": [*begin, answer, {"role": "user", "content": f"go on {number}"}]})
        first, second = gateway.turns(session)
        prompts.append(first["context_ids"])
        given = [request["input_ids"] for request in gateway.engine.requests[-2:]]
        assert given[0] == first["context_ids"]
        assert given[1][-len(second["context_ids"]) :] == second["context_ids"]
    assert prompts[0] == prompts[1] == prompts[2]


def test_n_choices_are_n_turns(gateway: RunningGateway) -> None:
    gateway.engine.script.extend(["one", "two", "three"])
    session = gateway.session()
    reply = gateway.chat(session=session, n=3)
    texts = {choice["message"]["content"] for choice in reply.json()["choices"]}
    assert texts == {"one", "two", "three"}
    assert len(reply.headers["x-weir-turn-id"].split(",")) == len(gateway.turns(session)) == 3
    assert len({request["rid"] for request in gateway.engine.requests}) == 3


def test_logprobs_and_ids_on_request(gateway: RunningGateway) -> None:
    reply = gateway.chat(logprobs=True, top_logprobs=1, return_token_ids=True).json()
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] == gateway.engine.requests[0]["input_ids"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
        logprob_of(index) for index in range(len(choice["token_ids"]))
    ]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.1


def test_side_by_side_each_streamed_token_has_its_own_logprob_once(gateway: RunningGateway) -> None:
    session = gateway.session()
    gateway.engine.script += [f"{index} " * 400 for index in range(4)]
    stream = gateway.client(session).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "go"}], n=4, stream=True, logprobs=True
    )
    told: dict[int, list[float]] = {index: [] for index in range(4)}
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.content:
                told[choice.index] += [token.logprob for token in choice.logprobs.content]
    assert sorted(told.values()) == sorted(turn["logprobs"] for turn in gateway.turns(session))


# `functions` and `function_call`, the older form of tools

FUNCTION: Any = {
    "name": "get",
    "description": "Looks a key up.",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}
OTHER: Any = {"name": "put", "parameters": {"type": "object"}}
AS_TOOLS: Any = [{"type": "function", "function": each} for each in (FUNCTION, OTHER)]
ASKED: Any = {"role": "user", "content": "value of a?"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_extends_the_conversation(
    gateway: RunningGateway, stream: bool
) -> None:
    gateway.engine.script.extend(["let me see" + CALL_TEXT, "seven"])
    session = gateway.session()
    client = gateway.client(session)
    arguments: Any = {"model": "m", "functions": [FUNCTION]}
    if stream:
        chunks = list(client.chat.completions.create(messages=[ASKED], stream=True, **arguments))
        choices = [chunk.choices[0] for chunk in chunks]
        content = "".join(choice.delta.content or "" for choice in choices)
        (call,) = [each.delta.function_call for each in choices if each.delta.function_call is not None]
        assert not any(choice.delta.tool_calls for choice in choices)
        finish = choices[-1].finish_reason
    else:
        (choice,) = client.chat.completions.create(messages=[ASKED], **arguments).choices
        content, call, finish = choice.message.content, choice.message.function_call, choice.finish_reason
        assert choice.message.tool_calls is None
    assert (content, finish) == ("let me see", "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get", {"key": "a"})
    history: Any = [
        ASKED,
        {"role": "assistant", "content": content, "function_call": call.to_dict()},
        {"role": "function", "name": "get", "content": "a = 7"},
    ]
    (choice,) = client.chat.completions.create(messages=history, **arguments).choices
    assert (choice.message.content, choice.finish_reason) == ("seven", "stop")
    one, two = gateway.turns(session)
    assert one["finish_reason"] == "tool_calls"
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert "a = 7" in gateway.engine.tokenizer.decode(two["context_ids"])


PUT: Any = {"name": "put"}
CHOICES: list[tuple[Any, Any]] = [
    ({}, {}),
    ({"function_call": "auto"}, {"tool_choice": "auto"}),
    ({"function_call": "none"}, {"tool_choice": "none"}),
    ({"function_call": PUT}, {"tool_choice": {"type": "function", "function": PUT}}),
]


def test_functions_are_read_as_tools_of_which_one_may_be_called(gateway: RunningGateway) -> None:
    for older, newer in CHOICES:
        assert gateway.chat(functions=[FUNCTION, OTHER], **older).status_code == 200
        assert gateway.chat(tools=AS_TOOLS, parallel_tool_calls=False, **newer).status_code == 200
        one, two = gateway.engine.requests[-2:]
        assert one["input_ids"] == two["input_ids"], older
        assert one["sampling_params"] == two["sampling_params"], older


def test_a_history_of_function_calls_reads_like_one_of_tool_calls(gateway: RunningGateway) -> None:
    call = {"name": "get", "arguments": '{"key": "a"}'}
    made = {"tool_calls": [{"id": "c", "type": "function", "function": call}]}
    asked: Any = {"role": "assistant", "content": None}
    for history in (
        [asked | {"function_call": call}, {"role": "function", "name": "get", "content": "7"}],
        [asked | made, {"role": "tool", "tool_call_id": "c", "content": "7"}],
    ):
        reply = gateway.post("/v1/chat/completions", {"messages": [ASKED, *history]})
        assert reply.status_code == 200, history
    one, two = gateway.engine.requests
    assert one["input_ids"] == two["input_ids"]
