"""Errors in a chat call, and the answers that the client gets for them."""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.long_cases import in_turn


def test_an_id_outside_the_vocabulary_never_reaches_the_record(gateway: RunningGateway) -> None:
    gateway.engine.mind = [5, 999_999]
    session = gateway.session()
    reply = gateway.chat(session=session)
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


NONSENSE: list[dict[str, Any]] = [
    {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
    {"weight_versions": [{"version": "1"}]},
    {"weight_versions": 7},
    {"finish_reason": {"type": "vanished"}},
    {"finish_reason": {}},
    {"output_token_logprobs": [[-1e300, 5, None], [-1e300, 5, None]]},
    {"output_token_logprobs": []},
    {"completion_tokens": 99},
]


@pytest.mark.parametrize(("nonsense", "stream"), in_turn(NONSENSE, [False, True]))
def test_an_engine_that_talks_nonsense_is_503_and_nothing_is_recorded(
    gateway: RunningGateway, nonsense: dict[str, Any], stream: bool
) -> None:
    end = gateway.engine.tokenizer.token_to_id("<|im_end|>")
    for entry in nonsense.get("output_token_logprobs", [])[-1:]:
        entry[1] = end
    gateway.engine.script.append([5])
    gateway.engine.last_words = nonsense
    session = gateway.session()
    reply = gateway.chat(session=session, stream=stream)
    if reply.status_code == 200:
        assert stream
        error = json.loads(reply.text.splitlines()[-2][6:])["error"]
        assert "[DONE]" not in reply.text
    else:
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        error = reply.json()["error"]
    assert error["type"] == "engine_unavailable"
    assert gateway.turns(session) == []


def test_a_stream_asks_proxies_to_pass_it_on_at_once(gateway: RunningGateway) -> None:
    headers = gateway.chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


def test_no_key_is_401_and_an_unknown_path_404_and_a_wrong_method_405(gateway: RunningGateway) -> None:
    for method, path, key, status in (
        ("POST", "/v1/chat/completions", None, 401),
        ("POST", "/v1/chat/completions", "wrong", 401),
        ("GET", "/nowhere", CLIENT_KEY, 404),
        ("GET", "/v1/chat/completions", CLIENT_KEY, 405),
    ):
        reply = gateway.call(method, path, key=key)
        assert reply.status_code == status, (method, path, key)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, path
    with pytest.raises(openai.AuthenticationError):
        gateway.client(gateway.session() | {"api_key": "wrong"}).models.list()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_version_that_nobody_serves_is_404_and_says_how_it_is_served(
    gateway: RunningGateway, method: str
) -> None:
    reply = gateway.chat(model="policy@7") if method == "POST" else gateway.get("/v1/models/policy@7")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "model_not_found")
    assert error["message"] == "no server serves version 7; POST /admin/policies/7/pin has one keep it"


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


def test_an_engine_of_the_configuration_cannot_be_replaced_or_removed(gateway: RunningGateway) -> None:
    """Such an engine stays until the configuration is changed."""
    body = {"id": "engine-0", "url": "http://127.0.0.1:9", "engine_url": "http://127.0.0.1:9"}
    assert gateway.post("/admin/rollout_servers", body, key=ADMIN_KEY).status_code == 409
    assert gateway.call("DELETE", "/admin/rollout_servers/engine-0", key=ADMIN_KEY).status_code == 409
    assert gateway.chat().status_code == 200
