"""How long settled sessions are kept, over HTTP: retention by age, by memory, and never too short."""

import logging
from typing import Any

import pytest
from redis import Redis

from rollout_queue.clock import Clock
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.stream_reader import StreamReader
from tests.support.claimed import claimed_reader
from tests.support.gateway.deletion import path_of
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.redis_clients import redis_at
from tests.support.waiting import wait_until

TRAINED = Verdict(code="trained", step=1, version=1)
FULL = 0.95
"""A share of maxmemory above 0.9, at which the gateway refuses new sessions."""


def ended(gateway: RunningGateway, **terms: Any) -> dict[str, Any]:
    """A session with one call, finished and rewarded, which waits for the trainer's verdict."""
    session = gateway.session(**terms)
    assert gateway.chat(key=session["api_key"]).status_code == 200
    gateway.finish(session, reward=1.0)
    return session


@pytest.fixture
def trainer(backends: Backends) -> StreamReader:
    backends.clear(None)
    return claimed_reader(backends.redis)


def learn(trainer: StreamReader) -> None:
    """The trainer reads all entries and acknowledges them with the verdict `trained`."""
    entries = trainer.read(1000, 0.01)
    records = [entry.record for entry in entries]
    turns = {(each.session_id, each.turn_id): TRAINED for each in records if isinstance(each, Turn)}
    sessions = {each.session_id: TRAINED for each in records}
    trainer.acknowledge([entry.entry_id for entry in entries], Verdicts(sessions, turns))


def forgotten(gateway: RunningGateway) -> int:
    counts: Any = gateway.redis.hgetall(key_names.FORGOTTEN)
    return sum(int(number) for name, number in counts.items() if name.startswith(b"session:"))


def passes(gateway: RunningGateway, number: int = 5) -> None:
    """Wait until the gateway has looked at the settled sessions so many times."""

    def looked() -> int:
        stats: Any = gateway.redis.info("commandstats")
        return int(stats.get("cmdstat_zscan", {}).get("calls", 0) + stats["cmdstat_hgetall"]["calls"])

    began = looked()
    wait_until(lambda: looked() > began + 3 * number)


def filled(gateway: RunningGateway) -> None:
    """Fill Redis so far that the memory of connections does not matter, and through none of them."""
    gateway.redis.setrange("ballast", 40 * 2**20 - 1, b"\0")


def pressed(gateway: RunningGateway, share: float) -> None:
    """Set `maxmemory` so that Redis uses this share of it."""
    used: Any = gateway.redis.info("memory")
    gateway.redis.config_set("maxmemory", int(used["used_memory"] / share))


@pytest.fixture
def roomy(backends: Backends) -> Any:
    """Removes the memory limit after the test."""
    yield
    backends.redis.config_set("maxmemory", 0)
    backends.redis.delete("ballast")


def test_what_is_settled_for_long_enough_is_as_if_it_had_never_been(
    backends: Backends, trainer: StreamReader, caplog: pytest.LogCaptureFixture
) -> None:
    with backends.gateway(retention_s=0.01) as gateway, caplog.at_level(logging.INFO, "gateway"):
        session, going = ended(gateway, user="ann"), gateway.session()
        learn(trainer)
        wait_until(lambda: forgotten(gateway) == 1)
        path = path_of(session)
        for reply in (
            gateway.get(path),
            gateway.get(path, key=ADMIN_KEY),
            gateway.get(path, key=OTHER_KEY),
            gateway.post(f"{path}/reward", {"value": 1.0}),
            gateway.post(f"{path}/finish", {"status": "completed"}),
            gateway.post(f"{path}/heartbeat"),
            gateway.call("DELETE", path),
            gateway.chat(path=f"{path}/v1/chat/completions", key=session["api_key"]),
        ):
            assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert gateway.get(path_of(going)).status_code == 200
        assert [each["session_id"] for each in gateway.get("/sessions").json()["data"]] == [
            going["session_id"]
        ]
        exported = gateway.get("/admin/export?empty=true", key=ADMIN_KEY).text
        assert session["session_id"] not in exported
        assert going["session_id"] in exported
        report = gateway.get("/admin/pipeline", key=ADMIN_KEY).json()
        assert report["forgotten"] == 1
        assert report["states"] == {"open": 1, "waiting_reward": 0, "finished": 1}
        assert report["verdicts"]["session:trained"] == 1
        assert any(said.startswith("1 session was removed by retention") for said in report["sentences"])
        wait_until(lambda: 'weir_sessions_forgotten_total{why="age"} 1.0' in gateway.get("/metrics").text)
    assert "forgot 1 settled sessions, 0 of them early because Redis fills up: 1 trained" in caplog.messages


def test_an_id_that_is_forgotten_is_not_given_again(backends: Backends, trainer: StreamReader) -> None:
    """The trainer still knows the id, and would not train a new session with it."""
    with backends.gateway(retention_s=0.01) as gateway:
        session = ended(gateway, group_id="g", group_size=1)
        learn(trainer)
        wait_until(lambda: forgotten(gateway) == 1)
        named = {"session_id": session["session_id"]}
        for reply in (
            gateway.post("/sessions", named),
            gateway.chat(headers={"x-session-id": session["session_id"]}),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_finished")
            assert "forgotten" in reply.json()["error"]["message"]
        for reply in (
            gateway.post("/groups", {"size": 1, "group_id": "g"}),
            gateway.post("/sessions", {"group_id": "g"}),
        ):
            assert reply.status_code == 409
        theirs = gateway.post("/groups", {"size": 1, "group_id": "g"}, key=OTHER_KEY)
        assert (theirs.status_code, theirs.json()["group_id"]) == (201, "g"), "another key is not told of it"
        assert len(gateway.engine.requests) == 1


def test_nothing_is_forgotten_before_the_trainer_is_done_with_it(
    backends: Backends, trainer: StreamReader
) -> None:
    with backends.gateway(retention_s=0.01) as gateway:
        session = gateway.session()
        gateway.chat(key=session["api_key"])
        gateway.finish(session, status="failed")
        passes(gateway)
        assert gateway.get(path_of(session)).json()["verdict"]["code"] == "failed"
        entries = trainer.read(100, 0.01)
        passes(gateway)
        assert gateway.get(path_of(session)).status_code == 200
        trainer.acknowledge([entry.entry_id for entry in entries], Verdicts({}, {}))
        wait_until(lambda: gateway.get(path_of(session)).status_code == 404)


def test_two_gateways_count_what_they_forget_once(backends: Backends, trainer: StreamReader) -> None:
    with backends.gateway(retention_s=None) as gateway:
        sessions = [ended(gateway) for _ in range(8)]
        learn(trainer)
    with backends.gateway(retention_s=0.01) as one, backends.gateway(retention_s=0.01) as other:
        wait_until(lambda: not one.redis.exists(key_names.SETTLED))
        counts: Any = one.redis.hgetall(key_names.FORGOTTEN)
        assert (int(counts[b"session:trained"]), int(counts[b"turn:trained"])) == (8, 8)

        def told() -> float:
            lines = "\n".join(gateway.get("/metrics").text for gateway in (one, other)).splitlines()
            mine = [line for line in lines if line.startswith('weir_sessions_forgotten_total{why="age"}')]
            return sum(float(line.split()[-1]) for line in mine)

        wait_until(lambda: told() == 8)
        assert other.get(path_of(sessions[0])).status_code == 404


def test_heads_alone_never_keep_newcomers_out(
    backends: Backends, trainer: StreamReader, roomy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway forgets the oldest sessions, no more than needed, and keeps those settled just now."""
    monkeypatch.setattr("gateway.sessions.lifetime.BATCH", 5)
    monkeypatch.setattr("gateway.sessions.lifetime.BATCHES", 1)
    with backends.gateway(retention_s=None) as gateway:
        old = [ended(gateway) for _ in range(20)]
        learn(trainer)
        fresh = ended(gateway)
        learn(trainer)
        for number, session in enumerate(old):
            backends.redis.hset(key_names.session(session["session_id"]), "ballast", bytes(2**21))
            backends.redis.zincrby(key_names.SETTLED, -3600_000 + number, session["session_id"])
    with backends.gateway() as gateway:
        wait_until(lambda: forgotten(gateway) > 0 or _pressed_again(gateway, 1))
        wait_until(lambda: gateway.post("/sessions").status_code == 201)
        assert gateway.get(path_of(old[0])).status_code == 404
        passes(gateway, 10)
        kept = [gateway.get(path_of(session)).status_code for session in old]
        assert kept == sorted(kept, reverse=True)
        assert 404 in kept
        assert 200 in kept
        wait_until(lambda: forgotten(gateway) == len(old) or _pressed_again(gateway, len(old)))
        pressed(gateway, FULL)
        passes(gateway, 10)
        assert gateway.get(path_of(fresh)).status_code == 200


def _pressed_again(gateway: RunningGateway, most: int) -> bool:
    pressed(gateway, FULL)
    return forgotten(gateway) >= most


def test_what_is_kept_for_ever_is_kept_however_full_redis_is(backends: Backends, roomy: None) -> None:
    """This test uses its own database, because the gateways of other tests forget sessions."""
    url = backends.redis_url.removesuffix("1") + "2"
    with redis_at(url) as redis, backends.gateway(redis_url=url, retention_s=None) as gateway:
        redis.flushdb()
        gateway.redis = redis
        session = ended(gateway)
        learn(claimed_reader(redis))
        redis.zincrby(key_names.SETTLED, -(10**12), session["session_id"])
        filled(gateway)
        wait_until(lambda: _turned_away(gateway))
        passes(gateway)
        assert gateway.get(path_of(session)).status_code == 200
        redis.flushdb()


def _turned_away(gateway: RunningGateway) -> bool:
    pressed(gateway, FULL)
    return bool(gateway.post("/sessions").status_code == 429)


def test_a_list_is_read_to_its_end_while_sessions_are_forgotten(
    backends: Backends, trainer: StreamReader
) -> None:
    """Each remaining session is listed once, even if the last listed session is gone."""
    with backends.gateway(retention_s=None) as gateway:
        for _ in range(4):
            ended(gateway)
        stay = [gateway.session()["session_id"] for _ in range(4)]
        learn(trainer)
        page = gateway.get("/sessions?limit=4").json()
        exported = gateway.get("/admin/export?limit=4&empty=true", key=ADMIN_KEY).text.splitlines()
    with backends.gateway(retention_s=0.01) as gateway:
        wait_until(lambda: forgotten(gateway) == 4)
        rest = gateway.get(f"/sessions?cursor={page['next_cursor']}").json()
        assert [each["session_id"] for each in rest["data"]] == stay
        for cursor in ("x", "0.5", "bm9wZQ", "aW5mL3g"):
            assert gateway.get(f"/sessions?cursor={cursor}").status_code == 400, cursor
        assert len(exported) == 4
        cursor = exported[-1].split('"cursor":"')[1].split('"')[0]
        reply = gateway.get(f"/admin/export?cursor={cursor}", key=ADMIN_KEY)
        assert (reply.status_code, "has been removed" in reply.json()["error"]["message"]) == (400, True)


def test_what_comes_in_the_moment_in_which_a_session_goes_is_a_404(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, body in (("reward", {"value": 1.0}), ("finish", {"status": "completed"})):
        session = gateway.session()
        monkeypatch.setattr("gateway.rest.rewards.clock", _Going(gateway.redis, session["session_id"]))
        reply = gateway.post(f"{path_of(session)}/{path}", body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error"), path


class _Going(Clock):
    """A clock that deletes the session when a route reads the time, after it has read the session."""

    def __init__(self, redis: Redis, session_id: str) -> None:
        self._redis, self._session_id = redis, session_id

    def now(self) -> float:
        self._redis.delete(key_names.session(self._session_id))
        return super().now()


def test_a_session_that_nobody_can_read_can_be_deleted(gateway: RunningGateway) -> None:
    for field in ("t:broken", "r:broken", "outcome", "verdict", "spec"):
        session = gateway.session()
        gateway.chat(key=session["api_key"])
        gateway.redis.hset(key_names.session(session["session_id"]), field, b"\xff?")
        path, key = path_of(session), CLIENT_KEY
        assert gateway.call("DELETE", path, key=OTHER_KEY).status_code == 404, field
        if field == "spec":  # the owner cannot be read either
            assert gateway.call("DELETE", path).status_code == 404
            key = ADMIN_KEY
        reply = gateway.call("DELETE", path, key=key)
        assert reply.status_code == 200, (field, reply.text)
        turns = 2 if field == "t:broken" else 1
        assert reply.json()["deleted"] == {"turns": turns, "rewards": int(field == "r:broken")}, field
        assert gateway.get(path, key=ADMIN_KEY).status_code == 410, field
