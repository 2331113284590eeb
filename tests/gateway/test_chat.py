"""Chat completions through the public door, with the official client where a client would use one."""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from tests.gateway.conftest import ADMIN_KEY, Door, Stage
from tests.gateway.fake_engine import logprob_of

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


# Errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 0}', "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', "stream"),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "policy@x"}', "model"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "magic"}]}', "tools"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(door: Door, body: bytes, param: str | None) -> None:
    reply = door.call(
        "POST", "/v1/chat/completions", headers={"content-type": "application/json"}, content=body
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert reply.headers["x-request-id"]


def test_a_prompt_that_does_not_fit_says_so(door: Door) -> None:
    client = door.client(door.session())
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"
    assert door.engine.requests == []


def test_an_id_outside_the_vocabulary_never_reaches_the_record(door: Door) -> None:
    door.engine.script.append([5, 999_999])
    session = door.session()
    reply = door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    assert reply.status_code == 503
    assert door.turns(session) == []


def test_a_prompt_id_outside_the_vocabulary_never_reaches_the_engine(
    door: Door, stage: Stage, tmp_path: Path
) -> None:
    shutil.copy(stage.model_path / "tokenizer.json", tmp_path)
    config = json.loads((stage.model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with stage.door(model_path=tmp_path) as narrow:
        error = narrow.chat().json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "token_out_of_vocabulary")
    assert door.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "nonsense",
    [
        {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "1"}]},
        {"weight_versions": 7},
        {"finish_reason": {"type": "vanished"}},
        {"finish_reason": {}},
        {"finish_reason": {"type": "abort"}},
        {"output_token_logprobs": [[-1e300, 5, None], [-1e300, 5, None]]},
        {"output_token_logprobs": []},
        {"completion_tokens": 99},
    ],
)
def test_an_engine_that_talks_nonsense_is_503_and_nothing_is_recorded(
    door: Door, nonsense: dict[str, Any], stream: bool
) -> None:
    end = door.engine.tokenizer.token_to_id("<|im_end|>")
    for entry in nonsense.get("output_token_logprobs", [])[-1:]:
        entry[1] = end
    door.engine.script.append([5])
    door.engine.last_words = nonsense
    session = door.session()
    reply = door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", stream=stream)
    if reply.status_code == 200:
        assert stream
        error = json.loads(reply.text.splitlines()[-2][6:])["error"]
        assert "[DONE]" not in reply.text
    else:
        assert reply.status_code == 503
        error = reply.json()["error"]
    assert error["type"] == "engine_unavailable"
    assert door.turns(session) == []


def test_a_stream_asks_proxies_to_pass_it_on_at_once(door: Door) -> None:
    headers = door.chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize(
    ("key", "raised"), [("wrong", openai.AuthenticationError), ("sess-xx.yy", openai.AuthenticationError)]
)
def test_a_wrong_key_is_a_typed_error(door: Door, key: str, raised: type[Exception]) -> None:
    client = openai.OpenAI(base_url=f"{door.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(raised):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


def test_no_key_is_401_and_an_unknown_path_404_and_a_wrong_method_405(door: Door) -> None:
    assert door.chat(key=None).status_code == 401
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405)):
        reply = door.call(method, path)
        assert (reply.status_code, set(reply.json()["error"])) == (
            status,
            {"message", "type", "param", "code"},
        )


def test_another_content_type_is_415(door: Door) -> None:
    reply = door.call("POST", "/v1/chat/completions", headers={"content-type": "text/plain"}, content=b"{}")
    assert reply.status_code == 415


def test_an_engine_that_fails_is_503_and_nothing_is_recorded(door: Door) -> None:
    for refusal in (
        PlainTextResponse("Internal Server Error", 500),
        JSONResponse({"object": "error", "message": "full", "code": 503}, 503),
    ):
        door.engine.refusals.append(refusal)
        session = door.session()
        with pytest.raises(openai.InternalServerError) as caught:
            door.client(session).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]
        assert door.turns(session) == []


def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error(door: Door) -> None:
    door.engine.stop_after = 3
    door.engine.script.append("one two three four five six")
    session = door.session()
    stream = door.client(session).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True
    )
    with pytest.raises(openai.APIError):
        list(stream)
    assert door.turns(session) == []


def test_no_engine_at_all_is_503_with_the_reason(door: Door) -> None:
    door.engine.version = "0"
    reply = door.chat(model="policy@7")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_any_other_model_name_is_served_by_the_policy(door: Door) -> None:
    assert door.chat(model="gpt-4o").json()["model"] == "gpt-4o"


def test_metrics_count_turns(door: Door) -> None:
    def turns() -> float:
        lines = door.get("/metrics", key=None).text.splitlines()
        found = (line for line in lines if line.startswith('weir_turns_total{finish="stop",relation="root"}'))
        return float(next(found, "0").split()[-1])

    before = turns()
    door.chat()
    assert turns() == before + 1


def test_status_is_for_admins(door: Door) -> None:
    assert door.get("/admin/status").status_code == 403
    status = door.get("/admin/status", key=ADMIN_KEY).json()
    assert status["rollout_servers"][0]["state"] == "ready"
