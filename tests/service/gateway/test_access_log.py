"""The log of a gateway in JSON: the access log, the ids in its lines, and that no key gets into it."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.settings import GatewaySettings
from tests.support.gateway.fake_engine import Interruption
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.service_log import log_of
from tests.support.waiting import wait_until

WRONG_KEY = "a-key-that-nobody-knows"


def entries(log: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def served(log: StringIO, path: str) -> dict[str, Any]:
    """The line of the one request of this path, once it is written."""

    def found() -> list[dict[str, Any]]:
        return [each for each in entries(log) if each.get("path") == path]

    wait_until(found)
    (entry,) = found()
    return entry


@pytest.fixture(scope="module")
def url(own_backends: Backends) -> Iterator[str]:
    own_backends.clear(None)
    with own_backends.gateway_url(access_log=True) as url:
        yield url


@pytest.fixture
def log(tiny_model: Path) -> Iterator[StringIO]:
    """In the form and with the secrets of the gateway's settings."""
    settings = GatewaySettings(
        model_path=tiny_model, client_keys=[CLIENT_KEY], admin_keys=[ADMIN_KEY], log_format="json"
    )
    with log_of(settings) as written:
        yield written


@pytest.fixture
def gateway(url: str, own_backends: Backends) -> Iterator[RunningGateway]:
    with httpx.Client(timeout=120) as http:
        gateway = RunningGateway(url, own_backends.engine, own_backends.redis, http)
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        yield gateway


def test_a_call_is_a_line_with_its_ids_and_the_name_of_the_key(
    gateway: RunningGateway, log: StringIO
) -> None:
    reply = gateway.chat(headers={"x-request-id": "my-request"})
    assert reply.status_code == 200
    entry = served(log, "/v1/chat/completions")
    line = {"method": "POST", "status": 200, "request_id": "my-request"}
    assert entry.items() >= (line | {"logger": "weir.access", "level": "INFO"}).items()
    assert entry["bytes"] == len(reply.content)
    assert entry["key"].startswith("key-")
    assert entry["turn_id"] == reply.headers["x-weir-turn-id"]
    assert entry["session_id"] == reply.headers["x-weir-session-id"]
    assert entry["seconds"] > 0


def test_paths_are_templates_without_a_query(gateway: RunningGateway, log: StringIO) -> None:
    session = gateway.session()
    name = session["session_id"]
    gateway.get(f"/sessions/{name}?tokens=true&api_key={WRONG_KEY}")
    entry = served(log, "/sessions/{session_id}")
    assert (entry["session_id"], entry["method"], entry["status"]) == (name, "GET", 200)
    gateway.chat(path=f"/sessions/{name}/v1/chat/completions", key=session["api_key"])
    entry = served(log, "/sessions/{session_id}/v1/chat/completions")
    assert (entry["session_id"], entry["key"]) == (name, "session")
    gateway.get("/admin/policies/7?wait=true", key=ADMIN_KEY)
    assert served(log, "/admin/policies/{version}")["status"] == 404
    gateway.get(f"/no/such/{WRONG_KEY}%0AFAKE")
    assert served(log, "-")["status"] == 404
    assert "tokens=true" not in log.getvalue()


def test_a_key_never_gets_into_the_log(gateway: RunningGateway, log: StringIO) -> None:
    made = gateway.post("/admin/keys", {"name": "an-agent", "role": "client"}, key=ADMIN_KEY)
    assert made.status_code == 201, made.text
    secret = made.json()["api_key"]
    session = gateway.session()
    keys = (CLIENT_KEY, ADMIN_KEY, WRONG_KEY, secret, session["api_key"])
    for key in keys:
        gateway.chat(key=key)
        gateway.chat(key=None, headers={"x-api-key": key})
        gateway.get(f"/sessions?api_key={key}", key=key)
        gateway.get(f"/admin/keys/{key}", key=key)
        gateway.post(f"/v1/{key}", {"key": key}, key=key)
        gateway.post("/v1/chat/completions", {"messages": key, "model": key}, key=key)
        gateway.http.request(key.upper(), gateway.url + "/v1/messages", headers={"x-api-key": key})
        gateway.http.post(gateway.url + "/v1/messages", content=key, headers={"authorization": key})
    gateway.get("/v1/models", key=secret)
    assert served(log, "/v1/models")["key"] == "an-agent"
    text = log.getvalue()
    assert not [key for key in keys if key in text]


def test_without_the_setting_no_request_is_logged(own_backends: Backends, log: StringIO) -> None:
    with own_backends.gateway() as quiet:
        wait_until(lambda: quiet.get("/ready").status_code == 200)
        assert quiet.chat().status_code == 200
        assert [each for each in entries(log) if each["logger"] == "weir.access"] == []


def test_an_answer_that_is_retried_is_logged_with_its_ids(
    own_backends: Backends, gateway: RunningGateway, log: StringIO
) -> None:
    own_backends.engine.interruptions.append(Interruption(0, "reset"))
    reply = gateway.chat(headers={"x-request-id": "retried"})
    lines = [each for each in entries(log) if each["logger"] == "gateway.fleet.failover"]
    assert [each["request_id"] for each in lines] == ["retried"]
    assert lines[0]["turn_id"] == reply.headers["x-weir-turn-id"]
    assert lines[0]["session_id"] == reply.headers["x-weir-session-id"]
