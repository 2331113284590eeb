"""Errors in a chat call, and the answers that the client gets for them."""

import json
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway


def test_a_prompt_that_does_not_fit_says_so(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.session())
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 6000}])
    assert caught.value.code == "context_length_exceeded"
    assert gateway.engine.requests == []


def test_an_id_outside_the_vocabulary_never_reaches_the_record(gateway: RunningGateway) -> None:
    gateway.engine.mind = [5, 999_999]
    session = gateway.session()
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    assert reply.status_code == 503
    assert gateway.turns(session) == []


def test_a_prompt_id_outside_the_vocabulary_never_reaches_the_engine(
    gateway: RunningGateway, backends: Backends, tmp_path: Path
) -> None:
    shutil.copy(backends.model_path / "tokenizer.json", tmp_path)
    config = json.loads((backends.model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with backends.gateway(model_path=tmp_path) as narrow:
        error = narrow.chat().json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "token_out_of_vocabulary")
    assert gateway.engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "nonsense",
    [
        {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "1"}]},
        {"weight_versions": 7},
        {"finish_reason": {"type": "vanished"}},
        {"finish_reason": {}},
        {"output_token_logprobs": [[-1e300, 5, None], [-1e300, 5, None]]},
        {"output_token_logprobs": []},
        {"completion_tokens": 99},
    ],
)
def test_an_engine_that_talks_nonsense_is_503_and_nothing_is_recorded(
    gateway: RunningGateway, nonsense: dict[str, Any], stream: bool
) -> None:
    end = gateway.engine.tokenizer.token_to_id("<|im_end|>")
    for entry in nonsense.get("output_token_logprobs", [])[-1:]:
        entry[1] = end
    gateway.engine.script.append([5])
    gateway.engine.last_words = nonsense
    session = gateway.session()
    reply = gateway.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions", stream=stream)
    if reply.status_code == 200:
        assert stream
        error = json.loads(reply.text.splitlines()[-2][6:])["error"]
        assert "[DONE]" not in reply.text
    else:
        assert reply.status_code == 503
        error = reply.json()["error"]
    assert error["type"] == "engine_unavailable"
    assert gateway.turns(session) == []


def test_a_stream_asks_proxies_to_pass_it_on_at_once(gateway: RunningGateway) -> None:
    headers = gateway.chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize(
    ("key", "raised"), [("wrong", openai.AuthenticationError), ("sess-xx.yy", openai.AuthenticationError)]
)
def test_a_wrong_key_is_a_typed_error(gateway: RunningGateway, key: str, raised: type[Exception]) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(raised):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


def test_no_key_is_401_and_an_unknown_path_404_and_a_wrong_method_405(gateway: RunningGateway) -> None:
    assert gateway.chat(key=None).status_code == 401
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/chat/completions", 405)):
        reply = gateway.call(method, path)
        assert (reply.status_code, set(reply.json()["error"])) == (
            status,
            {"message", "type", "param", "code"},
        )


def test_another_content_type_is_415(gateway: RunningGateway) -> None:
    reply = gateway.call(
        "POST", "/v1/chat/completions", headers={"content-type": "text/plain"}, content=b"{}"
    )
    assert reply.status_code == 415


def test_an_engine_that_fails_is_503_and_nothing_is_recorded(gateway: RunningGateway) -> None:
    for refusal in (
        PlainTextResponse("Internal Server Error", 500),
        JSONResponse({"object": "error", "message": "full", "code": 503}, 503),
    ):
        gateway.engine.refusals = deque([refusal] * 99)
        session = gateway.session()
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client(session).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]
        assert gateway.turns(session) == []


def test_an_engine_that_dies_in_the_middle_leaves_no_seam(gateway: RunningGateway) -> None:
    gateway.engine.mind = "one two three four five six"
    gateway.engine.stop_after = 3
    session = gateway.session()
    chunks = list(
        gateway.client(session).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert said == "one two three four five six"
    (turn,) = gateway.turns(session)
    ids = gateway.engine.tokenizer.encode(said + "<|im_end|>").ids
    assert turn["output_ids"] == ids
    assert turn["versions"] == [{"version": 0, "start": 0, "end": len(ids)}]
    assert len(gateway.engine.requests) > 1
    assert gateway.engine.requests[-1]["input_ids"] == turn["context_ids"] + ids[: len(ids) // 3 * 3]


def test_an_engine_that_dies_for_good_ends_the_stream_with_an_error(gateway: RunningGateway) -> None:
    gateway.engine.stop_after = 3
    gateway.engine.mind = "one two three four five six"
    gateway.engine.interruptions.clear()
    session = gateway.session()
    stream = gateway.client(session).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], stream=True
    )
    next(stream)
    gateway.engine.refusals = deque([PlainTextResponse("gone", 500)] * 99)
    with pytest.raises(openai.APIError):
        list(stream)
    assert gateway.turns(session) == []


def test_no_engine_at_all_is_503_with_the_reason(gateway: RunningGateway) -> None:
    gateway.engine.version = "0"
    reply = gateway.chat(model="policy@7")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_any_other_model_name_is_served_by_the_policy(gateway: RunningGateway) -> None:
    assert gateway.chat(model="gpt-4o").json()["model"] == "gpt-4o"


def test_metrics_count_turns(gateway: RunningGateway) -> None:
    def turns() -> float:
        lines = gateway.get("/metrics", key=None).text.splitlines()
        found = (line for line in lines if line.startswith('weir_turns_total{finish="stop",relation="root"}'))
        return float(next(found, "0").split()[-1])

    before = turns()
    gateway.chat()
    assert turns() == before + 1


def test_status_is_for_admins(gateway: RunningGateway) -> None:
    assert gateway.get("/admin/status").status_code == 403
    status = gateway.get("/admin/status", key=ADMIN_KEY).json()
    assert status["rollout_servers"][0]["state"] == "ready"


def test_an_engine_of_the_configuration_cannot_be_replaced_or_removed(gateway: RunningGateway) -> None:
    """Such an engine stays until the configuration is changed."""
    body = {"id": "engine-0", "url": "http://127.0.0.1:9", "engine_url": "http://127.0.0.1:9"}
    assert gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY).status_code == 409
    assert gateway.call("DELETE", "/admin/rollout_servers/engine-0", key=ADMIN_KEY).status_code == 409
    assert gateway.chat().status_code == 200
