"""API keys: operators make, rotate, limit and revoke them over REST, or write them into a file."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from gateway.callers.api_keys import ApiKeys, WrongKeyFile, configured_keys, keys_of_file
from gateway.callers.key_store import ApiKey, KeyLimits, KeyStore, KeyUse, Secret
from gateway.settings import GatewaySettings
from rollout_queue.contract.ids import new_id
from rollout_queue.http.callers import bearer, digest
from rollout_queue.redis import key_names
from rollout_queue.tracing import Begun, Kind, use_tracer
from tests.support.gateway.polls import polled
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.serving import free_port
from tests.support.waiting import wait_until


def made(gateway: RunningGateway, name: str, **more: Any) -> str:
    reply = gateway.admin("POST", "/keys", {"name": name, **more})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["api_key"])


def listed(gateway: RunningGateway, name: str) -> dict[str, Any]:
    (found,) = [each for each in gateway.admin("GET", "/keys").json()["data"] if each["name"] == name]
    return dict(found)


def refusal(reply: Any) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.fixture
def team() -> str:
    """A name of its own for each test, since the gateway remembers what a key has used."""
    return f"team-{new_id()}"


# Making


def test_a_new_key_opens_the_side_of_the_clients(
    gateway: RunningGateway, other: RunningGateway, team: str
) -> None:
    secret = made(gateway, team)
    for each in (gateway, other):
        polled()
        assert each.chat(key=secret).status_code == 200
        assert each.get("/admin/keys", key=secret).status_code == 403


def test_no_reply_but_the_first_has_the_secret_and_redis_has_none(gateway: RunningGateway, team: str) -> None:
    secret = made(gateway, team)
    gateway.chat(key=secret)
    polled()
    assert secret not in gateway.admin("GET", "/keys").text
    assert secret not in gateway.admin("GET", "/actions").text
    found: Any = gateway.redis.hgetall(key_names.KEYS)
    assert secret.encode() not in found[team.encode()]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "name"),
    ({"name": ""}, "name"),
    ({"name": "two words"}, "name"),
    ({"name": "a" * 64}, "name"),
    ({"name": "team-b", "role": "owner"}, "role"),
    ({"name": "team-b", "token_budget": 0}, "token_budget"),
    ({"name": "team-b", "budget": 1}, "budget"),
]


def test_a_wrong_body_is_a_400_and_a_name_is_used_once(gateway: RunningGateway, team: str) -> None:
    made(gateway, team)
    assert refusal(gateway.admin("POST", "/keys", {"name": team})) == (409, "key_exists")
    assert gateway.admin("DELETE", f"/keys/{team}").json()["revoked_at"]
    assert refusal(gateway.admin("POST", "/keys", {"name": team})) == (409, "key_exists")
    for body, param in WRONG:
        reply = gateway.admin("POST", "/keys", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), body


def test_an_open_gateway_makes_no_key_that_would_shut_its_operators_out(
    backends: Backends, team: str
) -> None:
    backends.clear(None)
    with backends.gateway(client_keys=[], admin_keys=[]) as gateway:
        assert refusal(gateway.post("/admin/keys", {"name": team}, key=None)) == (409, "no_admin_key")


# Rotating


def test_sessions_stay_with_their_key_when_its_secret_changes(gateway: RunningGateway, team: str) -> None:
    first = made(gateway, team)
    session = gateway.post("/sessions", key=first).json()
    reply = gateway.admin("POST", f"/keys/{team}/rotate", {"keep_s": 0})
    second = reply.json()["api_key"]
    path = f"/sessions/{session['session_id']}"
    assert gateway.get(path, key=second).status_code == 200
    assert gateway.get(path, key=first).status_code == 401
    assert gateway.chat(key=session["api_key"]).status_code == 200
    assert gateway.post(f"{path}/reward", {"value": 1}, key=second).status_code == 200


def test_the_earlier_secret_is_accepted_for_a_while(gateway: RunningGateway, team: str) -> None:
    first = made(gateway, team)
    assert gateway.admin("POST", f"/keys/{team}/rotate", {"keep_s": 3600}).is_success
    assert [each["expires_at"] is None for each in listed(gateway, team)["secrets"]] == [False, True]
    assert gateway.get("/sessions", key=first).status_code == 200
    third = gateway.admin("POST", f"/keys/{team}/rotate", {"keep_s": 1}).json()["api_key"]
    wait_until(lambda: gateway.get("/sessions", key=first).status_code == 401)
    assert gateway.get("/sessions", key=third).status_code == 200
    for _ in range(8):
        reply = gateway.admin("POST", f"/keys/{team}/rotate", {})
    assert refusal(reply) == (409, "too_many_secrets")
    assert gateway.admin("POST", f"/keys/{team}/rotate", {"keep_s": 0}).status_code == 200
    assert len(listed(gateway, team)["secrets"]) == 1


# Revoking


def test_a_revoked_key_and_the_keys_of_its_sessions_are_refused(
    gateway: RunningGateway, other: RunningGateway, team: str
) -> None:
    secret = made(gateway, team)
    session = gateway.post("/sessions", key=secret).json()
    assert gateway.admin("DELETE", f"/keys/{team}").status_code == 200
    for each in (gateway, other):
        wait_until(lambda each=each: each.chat(key=secret).status_code == 401)  # type: ignore[misc]
        assert each.chat(key=session["api_key"]).status_code == 401
    assert gateway.get(f"/sessions/{session['session_id']}", key=ADMIN_KEY).status_code == 200
    assert gateway.admin("DELETE", f"/keys/{team}").status_code == 200, "it may be repeated"
    assert refusal(gateway.admin("POST", f"/keys/{team}/rotate", {})) == (409, "key_revoked")


def test_only_keys_that_were_made_over_rest_are_changed_over_rest(gateway: RunningGateway) -> None:
    plain = f"key-{digest(CLIENT_KEY)[:8]}"
    assert listed(gateway, plain)["source"] == "settings"
    assert refusal(gateway.admin("DELETE", f"/keys/{plain}")) == (409, "key_configured")
    assert gateway.admin("DELETE", "/keys/nobody").status_code == 404


@pytest.fixture
def later(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    """A gateway on the same Redis, whose operator has taken CLIENT_KEY out of the settings."""
    with backends.gateway(client_keys=[OTHER_KEY]) as running:
        yield running


def test_the_keys_of_sessions_end_with_the_key_that_opened_them(
    gateway: RunningGateway, later: RunningGateway
) -> None:
    session = gateway.session()
    key, of_session = session["api_key"], f"/sessions/{session['session_id']}"
    calls = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens")
    for path in (*calls, *(of_session + path for path in calls)):
        assert gateway.chat(path=path, key=key, max_tokens=4).status_code == 200, path
        reply = later.chat(path=path, key=key, max_tokens=4)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error"), path
    beats = [each.post(f"{of_session}/heartbeat", key=key).status_code for each in (gateway, later)]
    assert beats == [200, 401]
    for other in (OTHER_KEY, ADMIN_KEY):
        theirs = gateway.post("/sessions", key=other).json()
        assert later.chat(key=theirs["api_key"]).status_code == 200
    assert later.get(of_session, key=ADMIN_KEY).status_code == 200
    ended = later.post(f"{of_session}/finish", {"status": "abandoned"}, key=ADMIN_KEY)
    assert ended.status_code == 200


# Limits


def test_a_key_has_rates_of_its_own_which_may_change_and_hears_what_is_left(
    other: RunningGateway, team: str
) -> None:
    """At a gateway of its own, which runs scripts for a minute: other tests count scripts."""
    secret = made(other, team, requests_per_minute=2)
    headers = [other.chat(key=secret).headers for _ in range(2)]
    assert [each["x-ratelimit-remaining-requests"] for each in headers] == ["1", "0"]
    assert headers[0]["x-ratelimit-limit-requests"] == "2"
    assert 0 < int(headers[1]["x-ratelimit-reset-requests"].removesuffix("ms")) <= 60_000
    reply = other.chat(key=secret)
    assert refusal(reply) == (429, "rate_limited")
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    others = other.chat()
    assert others.status_code == 200
    assert not any(name.startswith("x-ratelimit") for name in others.headers)
    changed = other.admin("PUT", f"/keys/{team}/limits", {"requests_per_minute": 100}).json()
    assert changed["requests_per_minute"] == 100
    wait_until(lambda: other.chat(key=secret).status_code == 200)  # not after a minute, as before


def test_a_used_up_budget_refuses_calls_at_every_gateway(
    gateway: RunningGateway, other: RunningGateway, team: str
) -> None:
    secret = made(gateway, team, token_budget=10)
    polled()
    reply = gateway.chat(key=secret)
    assert reply.headers["x-weir-token-budget-remaining"] == "10"
    used = reply.json()["usage"]["total_tokens"]
    assert used >= 10
    for each in (gateway, other):
        wait_until(lambda each=each: each.chat(key=secret).status_code == 429)  # type: ignore[misc]
    reply = gateway.chat(key=secret)
    assert refusal(reply) == (429, "insufficient_quota")
    assert (reply.headers["x-should-retry"], "retry-after" in reply.headers) == ("false", False)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=secret)
    calls = len(gateway.engine.requests)
    with pytest.raises(openai.RateLimitError):  # at once: the client makes no second attempt
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert len(gateway.engine.requests) == calls
    assert gateway.admin("PUT", f"/keys/{team}/limits", {"token_budget": 10**6}).status_code == 200
    assert gateway.chat(key=secret).status_code == 200


def test_the_list_says_what_a_key_used_and_when(gateway: RunningGateway, team: str) -> None:
    secret = made(gateway, team)
    assert (listed(gateway, team)["last_used_at"], listed(gateway, team)["tokens_used"]) == (None, 0)
    used = gateway.chat(key=secret).json()["usage"]["total_tokens"]
    session = gateway.post("/sessions", key=secret).json()
    used += gateway.chat(key=session["api_key"]).json()["usage"]["total_tokens"]
    wait_until(lambda: listed(gateway, team)["tokens_used"] == used)
    assert listed(gateway, team)["last_used_at"] >= listed(gateway, team)["created_at"]


class SlowStore(KeyStore):
    """Redis adds the use, and its answer comes later."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def add_usage(self, usage: Mapping[str, KeyUse]) -> Mapping[str, int]:
        spent = await super().add_usage(usage)
        self.asked.set()
        await self.gate.wait()
        return spent


async def test_tokens_count_while_redis_is_told_of_them(redis_url: str, team: str) -> None:
    redis = async_redis_at(redis_url)
    store = SlowStore(redis)
    key = ApiKey(team, "client", (Secret(digest("secret")),), KeyLimits(token_budget=10))
    known = ApiKeys((key,), store)
    known.spend(key.owner, 7)
    sharing = asyncio.create_task(known.refresh())
    await store.asked.wait()
    assert known.left(key.owner) == 3
    known.spend(key.owner, 2)
    assert known.left(key.owner) == 1
    store.gate.set()
    await sharing
    assert known.left(key.owner) == 1
    await redis.aclose()


# The log of admin actions


def actions(gateway: RunningGateway, least: int) -> Any:
    """What is logged, once there are so many: an action is logged when it has been answered."""
    wait_until(lambda: len(gateway.admin("GET", "/actions").json()["data"]) >= least)
    return gateway.admin("GET", "/actions").json()["data"]


def test_each_change_by_an_admin_is_logged(gateway: RunningGateway, team: str) -> None:
    made(gateway, team)
    name = f"key-{digest(ADMIN_KEY)[:8]}"
    session = gateway.session()
    reply = gateway.call("DELETE", f"/sessions/{session['session_id']}", key=ADMIN_KEY)
    gateway.admin("GET", "/status")
    gateway.admin("POST", "/keys/nobody/rotate", {})
    found = actions(gateway, 3)
    assert [(each["method"], each["path"], each["status"]) for each in found] == [
        ("POST", "/admin/keys/nobody/rotate", 404),
        ("DELETE", f"/sessions/{session['session_id']}", 200),
        ("POST", "/admin/keys", 201),
    ]
    assert {each["key"] for each in found} == {name}
    assert found[1]["request_id"] == reply.headers["x-request-id"]
    (older,) = gateway.admin("GET", f"/actions?limit=1&before={found[1]['id']}").json()["data"]
    for none_before in ("0", "0-0", "0-1"):
        assert gateway.admin("GET", f"/actions?before={none_before}").json()["data"] == []
    assert gateway.admin("GET", f"/actions?before={2**64 - 1}").json()["data"] == found
    for no_id in (2**64, f"1-{2**64}", "9" * 20):
        refused = gateway.admin("GET", f"/actions?before={no_id}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "before")
    assert older == found[2]
    gateway.admin("DELETE", "/users/ann/data")
    found = actions(gateway, 4)
    assert found[0]["path"] == f"/admin/users/sha256:{digest('ann')}/data", "it does not name the user"


@pytest.mark.parametrize("keys", [{}, {"client_keys": [], "admin_keys": []}], ids=["keys", "no keys"])
def test_what_agents_do_is_no_action_whatever_their_key(backends: Backends, keys: dict[str, Any]) -> None:
    backends.clear(None)
    with backends.gateway(**keys) as gateway:
        session = gateway.call("POST", "/sessions", {"task_id": "t"}, key=ADMIN_KEY).json()
        path = f"/sessions/{session['session_id']}"
        for what, body in (
            ("heartbeat", {}),
            ("reward", {"value": 1.0}),
            ("finish", {"status": "completed"}),
        ):
            assert gateway.call("POST", f"{path}/{what}", body, key=ADMIN_KEY).status_code == 200
        gateway.call("POST", "/groups", {"task_id": "t", "n": 2}, key=ADMIN_KEY)
        assert actions(gateway, 0) == []
        gateway.call("DELETE", path, key=ADMIN_KEY)
        gateway.admin("POST", "/keys/nobody/rotate", {})
        found = actions(gateway, 2)
        assert [each["path"] for each in found] == ["/admin/keys/nobody/rotate", path]


def test_a_server_that_registers_again_is_no_action(gateway: RunningGateway) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    server = {"id": "r1", "url": nobody, "engine_url": f"{nobody}/e", "process": "p1"}
    for body in (server, server, server, {**server, "process": "p2"}, {**server, "process": "p2"}):
        gateway.admin("POST", "/rollout_servers", body)
    found = actions(gateway, 2)
    assert [each["path"] for each in found] == ["/admin/rollout_servers"] * 2


# The file


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


FILE = """
keys:
  - name: team-a
    secrets: [first-secret, second-secret]
    requests_per_minute: 5
  - name: operator
    role: admin
    secrets_sha256: [{sha}]
"""


def test_a_file_has_keys_with_several_secrets(backends: Backends, tmp_path: Path) -> None:
    file = write(tmp_path / "keys.yaml", FILE.format(sha=digest("admin-secret")))
    backends.clear(None)
    with backends.gateway(client_keys=[], admin_keys=[], keys_file=file) as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        session = gateway.post("/sessions", key="first-secret").json()
        path = f"/sessions/{session['session_id']}"
        assert gateway.get(path, key="second-secret").status_code == 200
        assert gateway.get(path, key="admin-secret").status_code == 200
        assert gateway.get("/admin/keys", key="admin-secret").status_code == 200
        assert gateway.get(path, key="third-secret").status_code == 401
        assert gateway.chat(key="first-secret").headers["x-ratelimit-limit-requests"] == "5"


def test_a_key_that_gets_a_name_keeps_the_sessions_of_its_secret(
    gateway: RunningGateway, backends: Backends, tmp_path: Path
) -> None:
    path = f"/sessions/{gateway.session()['session_id']}"
    file = write(tmp_path / "keys.yaml", f"keys: [{{name: team-a, secrets: [{CLIENT_KEY}]}}]")
    with backends.gateway(client_keys=[], keys_file=file) as named:
        assert named.get(path).status_code == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys: [{name: a}]", "has no secret"),
        ("keys: [{name: 'a b', secrets: [hunter2]}]", "name"),
        ("keys: [{name: a, secrets: [hunter2]}, {name: a, secrets: [hunter3]}]", "several"),
        ("keys: [{name: a, secrets: [hunter2], rate: 1}]", "rate"),
        ("keys: [{name: a, secrets: [hunter2]", "not YAML"),
        ("keys: [{name: a, secrets_sha256: [hunter2]}]", "SHA-256"),
        ("keys: [{name: a, secrets: ['']}]", "empty"),
        ("keys: [{name: a, secrets: [hunter2, '***']}]", "asterisks"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_without_its_secrets(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "keys.yaml"
    if text is not None:
        write(file, text)
    with pytest.raises(WrongKeyFile, match=said) as raised:
        keys_of_file(file)
    assert str(file) in str(raised.value)
    assert "hunter" not in str(raised.value)


def test_wrong_keys_change_nothing_when_they_are_read_again(tmp_path: Path, tiny_model: Path) -> None:
    file = write(tmp_path / "keys.yaml", "keys: [{name: a, secrets: [first-secret]}]")
    settings = GatewaySettings(model_path=tiny_model, keys_file=file)
    accepted = ApiKeys(configured_keys(settings))
    for text in ("keys: [", "keys: []"):
        write(file, text)
        accepted.reload(lambda: configured_keys(settings))
        assert accepted.find(digest("first-secret")) is not None
    write(file, "keys: [{name: a, secrets: [second-secret]}]")
    accepted.reload(lambda: configured_keys(settings))
    assert accepted.find(digest("first-secret")) is None
    assert accepted.find(digest("second-secret")) is not None


class Noted:
    """A tracer that notes the parents of spans, and samples nothing."""

    def __init__(self) -> None:
        self.parents: list[str | None] = []

    def begin(self, name: str, kind: Kind, parent: str | None, links: Iterable[str]) -> Begun | None:
        self.parents.append(parent)
        return None


def test_only_a_known_key_decides_that_a_request_is_traced(gateway: RunningGateway) -> None:
    noted, parent = Noted(), f"00-{'8' * 32}-{'9' * 16}-01"
    opened = gateway.session()
    use_tracer(noted)
    try:
        for key, known in (
            (None, False),
            ("not-a-key", False),
            ("sess-bm9uZQ.00", False),
            (CLIENT_KEY, True),
            (opened["api_key"], True),
        ):
            for path in ("/v1/chat/completions", "/sessions"):
                noted.parents.clear()
                headers = {"traceparent": parent} | bearer(key)
                httpx.post(gateway.url + path, json={}, headers=headers, timeout=300)
                assert (parent in noted.parents) is known, (key, path)
    finally:
        use_tracer(None)
