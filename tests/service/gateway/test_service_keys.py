"""The key of a service permits what that service needs of the gateway, and nothing else."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway

SERVER_KEY, TRAINER_KEY = "the-key-of-rollout-servers", "the-key-of-the-trainer"
NEEDED = {
    SERVER_KEY: {"POST /admin/rollout_servers"},
    TRAINER_KEY: {
        "GET /admin/policies",
        "POST /admin/policies",
        "GET /admin/policies/serving",
        "GET /admin/policies/{version}",
        "DELETE /admin/policies/{version}",
        "POST /admin/policies/rollback",
        "POST /admin/adapters",
        "DELETE /admin/adapters/{name}/{version}",
    },
}
FOR_EVERYBODY = {"GET /live", "GET /ready", "GET /metrics", "GET /api/v1/healthz"}


@pytest.fixture(scope="module")
def running(backends: Backends) -> Iterator[RunningGateway]:
    with backends.gateway(rollout_server_key=SERVER_KEY, trainer_key=TRAINER_KEY) as gateway:
        yield gateway


@pytest.mark.parametrize("key", NEEDED)
def test_a_service_does_only_what_it_needs(running: RunningGateway, key: str) -> None:
    def refuses(request: str) -> bool:
        method, path = re.sub(r"\{\w+\}", "1", request).split()
        body: Any = {} if method in ("POST", "PUT") else None
        return bool(running.call(method, path, body, key=key).status_code == 403)

    paths = running.get("/openapi.json").json()["paths"]
    requests = [f"{method.upper()} {path}" for path, operations in paths.items() for method in operations]
    assert NEEDED[key] <= set(requests)
    refused = set(filter(refuses, requests))
    assert set(requests) - refused - FOR_EVERYBODY == NEEDED[key]
    assert running.chat(key=key).json()["error"]["type"] == "permission_error"


def test_the_trainers_requests_are_logged_and_registrations_are_not(running: RunningGateway) -> None:
    server = {"id": "r", "url": "http://127.0.0.1:1", "engine_url": "http://127.0.0.1:1"}
    assert running.post("/admin/rollout_servers", server, key=SERVER_KEY).status_code == 200
    assert running.call("DELETE", "/admin/policies/77", key=TRAINER_KEY).status_code == 404
    actions = running.get("/admin/actions", key=ADMIN_KEY).json()["data"]
    logged = [(each["key"], each["method"], each["path"]) for each in actions]
    assert logged[0] == ("trainer", "DELETE", "/admin/policies/77")
    assert "/admin/rollout_servers" not in [path for _, _, path in logged]


def test_nobody_signs_in_on_the_page_with_it(running: RunningGateway) -> None:
    site = {"sec-fetch-site": "same-origin"}
    for key, status in ((SERVER_KEY, 401), (ADMIN_KEY, 200)):
        reply = running.http.post(f"{running.url}/page/session", json={"api_key": key}, headers=site)
        assert reply.status_code == status, reply.text


@pytest.mark.parametrize(
    "keys",
    [
        {"rollout_server_key": CLIENT_KEY},
        {"trainer_key": ADMIN_KEY},
        {"trainer_key": "same", "rollout_server_key": "same"},
        {"trainer_key": "of-the-trainer", "admin_keys": []},
        {"engine_key": "two words"},
        {"engine_key": ""},
    ],
)
def test_keys_that_cannot_work_are_refused_and_not_shown(backends: Backends, keys: dict[str, Any]) -> None:
    given: dict[str, Any] = {"client_keys": [CLIENT_KEY], "admin_keys": [ADMIN_KEY], **keys}
    with pytest.raises(ValidationError) as refused:
        GatewaySettings(redis_url=backends.redis_url, model_path=backends.model_path, **given)
    assert not any(key in str(refused.value) for key in keys.values() if isinstance(key, str) and key)
