"""Chat completions through the public door, with the official client where a client would use one."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Door
from tests.support.gateway.fake_engine import logprob_of

TOOL: Any = {
    "type": "function",
    "function": {"name": "get", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}},
}
CALL_TEXT = '<tool_call>\n{"name": "get", "arguments": {"key": "a"}}\n</tool_call>'


def test_the_official_client_gets_an_answer(door: Door) -> None:
    door.engine.script.append("good morning")
    client = door.client(door.session())
    completion = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    assert completion.choices[0].message.content == "good morning"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(door.engine.tokenizer.encode("good morning").ids) + 1


def test_the_record_holds_what_the_engine_returned(door: Door) -> None:
    session = door.session()
    door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    (turn,) = door.turns(session)
    (asked,) = door.engine.requests
    assert turn["context_ids"] == asked["input_ids"]
    assert turn["output_ids"][-1] == door.engine.tokenizer.token_to_id("<|im_end|>")
    assert turn["logprobs"] == [logprob_of(index) for index in range(len(turn["output_ids"]))]
    assert turn["versions"] == [{"version": 0, "start": 0, "end": len(turn["output_ids"])}]


def test_both_ways_of_engine_streaming_give_the_same_record(door: Door) -> None:
    outputs = []
    for cumulative in (False, True):
        door.engine.cumulative = cumulative
        door.engine.script.append("one two three four five")
        session = door.session()
        with door.client(session).chat.completions.stream(
            model="m", messages=[{"role": "user", "content": "x"}]
        ) as s:
            s.until_done()
        (turn,) = door.turns(session)
        outputs.append((turn["output_ids"], turn["logprobs"]))
    assert outputs[0] == outputs[1]


def test_version_spans_are_recorded_as_sampled(door: Door) -> None:
    door.engine.spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    door.engine.script.append([*door.engine.tokenizer.encode("hello").ids[:1], 5])
    session = door.session()
    door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    (turn,) = door.turns(session)
    assert turn["versions"] == [
        {"version": 3, "start": 0, "end": 1},
        {"version": 4, "start": 1, "end": 3},
    ]


def test_streamed_text_is_the_answer_token_by_token(door: Door) -> None:
    text = "a longer answer, with ünïcödé and 漢字 in it"
    door.engine.script.append(text)
    door.engine.pace_s = 0.005  # what arrives together is told together
    client = door.client(door.session())
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
def test_a_tool_call_reaches_the_client(door: Door, stream: bool) -> None:
    door.engine.script.append("let me see" + CALL_TEXT)
    client = door.client(door.session())
    arguments: Any = {"model": "m", "messages": [{"role": "user", "content": "a?"}], "tools": [TOOL]}
    if stream:
        with client.chat.completions.stream(**arguments) as events:
            completion: Any = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**arguments)
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "let me see"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get", {"key": "a"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_tool_call_stays_readable_and_the_session_goes_on(door: Door, stream: bool) -> None:
    door.engine.script.append("<tool_call>\n{nonsense\n</tool_call>")
    session = door.session()
    client = door.client(session)
    history: list[Any] = [{"role": "user", "content": "a?"}]
    if stream:
        with client.chat.completions.stream(model="m", messages=history) as events:
            message: Any = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="m", messages=history).choices[0].message
    assert "nonsense" in message.content
    history += [
        {"role": "assistant", "content": message.content},
        {"role": "tool", "content": "no", "tool_call_id": "x"},
    ]
    client.chat.completions.create(model="m", messages=history)
    assert [turn["relation"] for turn in door.turns(session)] == ["root", "extends"]


def test_turn_two_is_turn_one_and_its_sample_and_the_new_messages(door: Door) -> None:
    door.engine.script.extend([CALL_TEXT, "seven"])
    session = door.session()
    client = door.client(session)
    history: list[Any] = [{"role": "user", "content": "value of a?"}]
    reply = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    first: Any = reply.choices[0].message
    history += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a = 7"}]
    client.chat.completions.create(model="m", messages=history, tools=[TOOL])
    one, two = door.turns(session)
    assert (two["relation"], two["parent_id"]) == ("extends", one["turn_id"])
    assert door.engine.requests[1]["input_ids"] == one["context_ids"] + one["output_ids"] + two["context_ids"]
    new = door.engine.tokenizer.decode(two["context_ids"], skip_special_tokens=False)
    assert (
        new
        == "\n<|im_start|>user\n<tool_response>\na = 7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_sessions_that_begin_alike_go_on_apart(door: Door) -> None:
    """A group's first prompt is rendered once, and belongs to each of its sessions alone."""
    begin: list[dict[str, Any]] = [{"role": "user", "content": "the task of a group"}]
    prompts = []
    for number in range(3):
        session = door.session()
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        answer = door.post(path, {"messages": begin}).json()["choices"][0]["message"]
        door.post(path, {"messages": [*begin, answer, {"role": "user", "content": f"go on {number}"}]})
        first, second = door.turns(session)
        prompts.append(first["context_ids"])
        given = [request["input_ids"] for request in door.engine.requests[-2:]]
        assert given[0] == first["context_ids"]
        assert given[1][-len(second["context_ids"]) :] == second["context_ids"]
    assert prompts[0] == prompts[1] == prompts[2]


def test_an_edited_history_is_its_own_branch(door: Door) -> None:
    session = door.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    door.chat("one", path=path)
    door.chat("another", path=path)
    root, fork = door.turns(session)
    assert (root["relation"], fork["relation"], fork["parent_id"]) == ("root", "forks", None)


def test_a_new_user_turn_rerenders_where_the_template_says_so(door: Door) -> None:
    session = door.session()
    client = door.client(session)
    history: list[Any] = [{"role": "user", "content": "a"}]
    reply = client.chat.completions.create(model="m", messages=history).choices[0].message
    history += [reply, {"role": "user", "content": "b"}]
    client.chat.completions.create(model="m", messages=history)
    _, second = door.turns(session)
    assert (
        door.engine.requests[1]["input_ids"][: len(door.engine.requests[0]["input_ids"])]
        == (door.engine.requests[0]["input_ids"])
    )
    assert second["relation"] == "extends"


def test_the_gateway_owns_the_sampling_of_training_traffic(door: Door) -> None:
    door.chat(temperature=0.0, top_p=0.1, frequency_penalty=1.0)
    sent = door.engine.requests[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (1.0, 1.0, -1, 0.0)
    assert sent["repetition_penalty"] == 1.0
    assert "frequency_penalty" not in sent


def test_an_evaluation_keeps_its_own_sampling(door: Door) -> None:
    session = door.session(train=False)
    door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", temperature=0.25)
    assert door.engine.requests[0]["sampling_params"]["temperature"] == 0.25
    (turn,) = door.turns(session)
    assert turn["sampling"]["asked"] == {"temperature": 0.25}


def test_an_answer_may_use_what_the_context_leaves(door: Door) -> None:
    door.chat()
    request = door.engine.requests[0]
    assert request["sampling_params"]["max_new_tokens"] == 4096 - len(request["input_ids"])
    door.chat(max_tokens=7)
    assert door.engine.requests[1]["sampling_params"]["max_new_tokens"] == 7


def test_a_cut_answer_says_length(door: Door) -> None:
    door.engine.script.append("one two three four five six")
    assert door.chat(max_completion_tokens=2).json()["choices"][0]["finish_reason"] == "length"


def test_n_choices_are_n_turns(door: Door) -> None:
    door.engine.script.extend(["one", "two", "three"])
    session = door.session()
    reply = door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", n=3)
    texts = {choice["message"]["content"] for choice in reply.json()["choices"]}
    assert texts == {"one", "two", "three"}
    assert len(reply.headers["x-weir-turn-id"].split(",")) == len(door.turns(session)) == 3
    assert len({request["rid"] for request in door.engine.requests}) == 3


def test_logprobs_and_ids_on_request(door: Door) -> None:
    reply = door.chat(logprobs=True, top_logprobs=1, return_token_ids=True).json()
    choice = reply["choices"][0]
    assert reply["prompt_token_ids"] == door.engine.requests[0]["input_ids"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
        logprob_of(index) for index in range(len(choice["token_ids"]))
    ]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["logprob"] == -0.1


def test_reply_headers_name_session_turn_version_and_sampling(door: Door) -> None:
    session = door.session()
    reply = door.chat(
        path=f"/sessions/{session['session_id']}/v1/chat/completions", headers={"x-request-id": "mine-1"}
    )
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-weir-session-id"] == session["session_id"]
    assert reply.headers["x-weir-policy-version"] == "0"
    assert json.loads(reply.headers["x-weir-sampling"])["temperature"] == 1.0


def test_a_stop_string_is_cut_from_the_text_and_kept_in_the_record(door: Door) -> None:
    door.engine.script.append("yes. Observation: no")
    reply = door.chat(stop=["Observation:"], stream=True)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == "yes."


def test_models_lists_the_policy(door: Door) -> None:
    client = door.client(door.session())
    assert [model.id for model in client.models.list()] == ["policy"]


def test_side_by_side_each_streamed_token_has_its_own_logprob_once(door: Door) -> None:
    session = door.session()
    door.engine.script += [f"{index} " * 400 for index in range(4)]
    stream = door.client(session).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "go"}], n=4, stream=True, logprobs=True
    )
    told: dict[int, list[float]] = {index: [] for index in range(4)}
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs and choice.logprobs.content:
                told[choice.index] += [token.logprob for token in choice.logprobs.content]
    assert sorted(told.values()) == sorted(turn["logprobs"] for turn in door.turns(session))
