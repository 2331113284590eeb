"""Sessions that this build cannot read: written by a newer build, or broken. They stop nothing and stay."""

from typing import Any

import pytest

from rollout_queue.contract.codec import SCHEMA
from rollout_queue.redis import key_names
from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.waiting import wait_until

POISON = {
    "newer": bytes([SCHEMA + 1]) + b"whatever a newer build writes",
    "broken": bytes([SCHEMA]) + b"\xff",
}


def write(gateway: RunningGateway, session_id: str, field: str, value: bytes) -> bytes:
    """Replace a field of a session. Returns its former value."""
    former: Any = gateway.redis.hget(key_names.session(session_id), field)
    gateway.redis.hset(key_names.session(session_id), field, value)
    return bytes(former or b"")


def overdue(gateway: RunningGateway, session_id: str, since: float = 1.0) -> None:
    """Let the session be overdue since this time, in seconds since the epoch."""
    gateway.redis.zadd(key_names.DEADLINES, {session_id: since})


def code(gateway: RunningGateway, session_id: str) -> str:
    return str(gateway.get(f"/sessions/{session_id}").json()["verdict"]["code"])


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_an_unreadable_session_stops_neither_expiry_nor_the_pipeline(
    gateway: RunningGateway, poison: bytes
) -> None:
    for number in range(120):  # more than one batch of overdue sessions
        name = gateway.session(session_id=f"poison-{number}")["session_id"]
        write(gateway, name, "spec", poison)
        overdue(gateway, name, 1.0)
    other = gateway.session()["session_id"]
    overdue(gateway, other, 2.0)
    wait_until(lambda: code(gateway, other) == "expired")
    report = gateway.admin("GET", "/pipeline")
    assert report.status_code == 200
    (named,) = [each for each in report.json()["sentences"] if "cannot be read" in each]
    assert named.startswith("120 sessions cannot be read by this build and do not expire: poison-")
    assert all(
        gateway.redis.hget(key_names.session(f"poison-{number}"), "spec") == poison for number in range(120)
    )


@pytest.mark.parametrize("field", ["spec", "outcome"])
def test_one_unreadable_member_does_not_hide_its_group(gateway: RunningGateway, field: str) -> None:
    first, second = gateway.post("/groups", {"size": 2}).json()["sessions"]
    for session in (first, second):
        gateway.finish(session, reward=1.0)
    write(gateway, first["session_id"], field, POISON["newer"])
    assert gateway.admin("GET", "/pipeline").status_code == 200
    assert code(gateway, second["session_id"]) == "ready"
    assert len(gateway.get("/sessions").json()["data"]) == 1


def test_a_call_on_a_session_of_a_newer_build_may_be_repeated(gateway: RunningGateway) -> None:
    path = f"/sessions/{gateway.session(session_id='s')['session_id']}"
    write(gateway, "s", "spec", POISON["newer"])
    calls = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/reward": {"value": 1.0},
        "/finish": {"status": "completed"},
        "/heartbeat": {},
    }
    for where, body in calls.items():
        reply = gateway.post(path + where, body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable"), where
        assert "cannot read session s" in reply.json()["error"]["message"]
    assert gateway.get(path).status_code == 503
    assert gateway.post("/sessions", {"session_id": "s"}).status_code == 503
    assert gateway.call("DELETE", path, key=ADMIN_KEY).status_code == 200


def test_one_version_up_and_down_again(gateway: RunningGateway) -> None:
    """A newer gateway writes sessions, this one runs for a while, and then the newer one runs again."""
    spec_of: dict[str, bytes] = {}
    for name in ("open", "ended"):
        gateway.session(session_id=name)
    gateway.chat(path="/sessions/ended/v1/chat/completions")
    gateway.finish({"session_id": "ended"}, reward=1.0)
    for name in ("open", "ended"):
        spec_of[name] = write(gateway, name, "spec", POISON["newer"])
        overdue(gateway, name)
    before = gateway.redis.hgetall(key_names.session("ended"))
    bystander = gateway.session()["session_id"]
    overdue(gateway, bystander, 2.0)
    wait_until(lambda: code(gateway, bystander) == "expired")
    assert gateway.redis.hgetall(key_names.session("ended")) == before
    for name in ("open", "ended"):
        write(gateway, name, "spec", spec_of[name])
    assert code(gateway, "ended") == "ready"
    assert code(gateway, "open") == "open"
    overdue(gateway, "open")  # so that the newer gateway reads the session, which it skipped before
    wait_until(lambda: code(gateway, "open") == "expired")
    assert len(gateway.turns({"session_id": "ended"})) == 1
