"""How long settled sessions are kept, through the door: by age, by what Redis holds, and never too short."""

import logging
from typing import Any

import pytest
from redis import Redis

from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import keys
from rollout_queue.redis.reader import RedisReader
from tests.gateway.conftest import ADMIN_KEY, OTHER_KEY, Door, Stage, wait_until
from tests.support.claimed import claimed_reader

TRAINED = Verdict(code="trained", step=1, version=1)
FULL = 0.95
"""Of maxmemory: beyond the 0.9 at which newcomers are turned away."""


def path_of(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}"


def ended(door: Door, **terms: Any) -> dict[str, Any]:
    """A session with one call, finished and rewarded: for the trainer to decide on."""
    session = door.session(**terms)
    assert door.chat(key=session["api_key"]).status_code == 200
    reply = door.post(f"{path_of(session)}/finish", {"status": "completed", "reward": 1.0})
    assert reply.status_code == 200
    return session


@pytest.fixture
def trainer(stage: Stage) -> RedisReader:
    stage.clear(None)
    return claimed_reader(stage.redis)


def learn(trainer: RedisReader) -> None:
    """The trainer takes all there is, and is done with it."""
    entries = trainer.read(1000, 0.01)
    records = [entry.record for entry in entries]
    turns = {(each.session_id, each.turn_id): TRAINED for each in records if isinstance(each, Turn)}
    sessions = {each.session_id: TRAINED for each in records}
    trainer.acknowledge([entry.entry_id for entry in entries], Verdicts(sessions, turns))


def forgotten(door: Door) -> int:
    counts: Any = door.redis.hgetall(keys.FORGOTTEN)
    return sum(int(number) for name, number in counts.items() if name.startswith(b"session:"))


def passes(door: Door, number: int = 5) -> None:
    """The gateway has looked at the settled ones so many times since."""

    def looked() -> int:
        stats: Any = door.redis.info("commandstats")
        return int(stats.get("cmdstat_zscan", {}).get("calls", 0) + stats["cmdstat_hgetall"]["calls"])

    began = looked()
    wait_until(lambda: looked() > began + 3 * number)


def filled(door: Door) -> None:
    """With so much that what connections take comes to nothing beside it."""
    door.redis.set("ballast", bytes(40 * 2**20))


def pressed(door: Door, share: float) -> None:
    """Redis uses this share of its `maxmemory`."""
    used: Any = door.redis.info("memory")
    door.redis.config_set("maxmemory", int(used["used_memory"] / share))


@pytest.fixture
def roomy(stage: Stage) -> Any:
    """Puts the limit of memory back."""
    yield
    stage.redis.config_set("maxmemory", 0)
    stage.redis.delete("ballast")


def test_what_is_settled_for_long_enough_is_as_if_it_had_never_been(
    stage: Stage, trainer: RedisReader, caplog: pytest.LogCaptureFixture
) -> None:
    with stage.door(retention_s=0.01) as door, caplog.at_level(logging.INFO, "gateway"):
        session, going = ended(door, user="ann"), door.session()
        learn(trainer)
        wait_until(lambda: forgotten(door) == 1)
        path = path_of(session)
        for reply in (
            door.get(path),
            door.get(path, key=ADMIN_KEY),
            door.get(path, key=OTHER_KEY),
            door.post(f"{path}/reward", {"value": 1.0}),
            door.post(f"{path}/finish", {"status": "completed"}),
            door.post(f"{path}/heartbeat"),
            door.call("DELETE", path),
            door.chat(path=f"{path}/v1/chat/completions", key=session["api_key"]),
        ):
            assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
        assert door.get(path_of(going)).status_code == 200
        assert [each["session_id"] for each in door.get("/sessions").json()["data"]] == [going["session_id"]]
        exported = door.get("/admin/export?empty=true", key=ADMIN_KEY).text
        assert session["session_id"] not in exported
        assert going["session_id"] in exported
        report = door.get("/admin/pipeline", key=ADMIN_KEY).json()
        assert report["forgotten"] == 1
        assert report["states"] == {"open": 1, "waiting_reward": 0, "finished": 1}
        assert report["verdicts"]["session:trained"] == 1
        assert any(said.startswith("1 session was settled and is forgotten") for said in report["sentences"])
        wait_until(lambda: 'weir_sessions_forgotten_total{why="age"} 1.0' in door.get("/metrics").text)
    assert "forgot 1 settled sessions, 0 of them early because Redis fills up: 1 trained" in caplog.messages


def test_an_id_that_is_forgotten_is_not_given_again(stage: Stage, trainer: RedisReader) -> None:
    """A trainer knows it, and would train nothing that comes under it."""
    with stage.door(retention_s=0.01) as door:
        session = ended(door, group_id="g", group_size=1)
        learn(trainer)
        wait_until(lambda: forgotten(door) == 1)
        named = {"session_id": session["session_id"]}
        for reply in (
            door.post("/sessions", named),
            door.chat(headers={"x-session-id": session["session_id"]}),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_finished")
            assert "forgotten" in reply.json()["error"]["message"]
        for reply in (
            door.post("/groups", {"size": 1, "group_id": "g"}),
            door.post("/sessions", {"group_id": "g"}),
        ):
            assert reply.status_code == 409
        assert len(door.engine.requests) == 1


def test_nothing_is_forgotten_before_the_trainer_is_done_with_it(stage: Stage, trainer: RedisReader) -> None:
    with stage.door(retention_s=0.01) as door:
        session = door.session()
        door.chat(key=session["api_key"])
        door.post(f"{path_of(session)}/finish", {"status": "failed"})
        passes(door)
        assert door.get(path_of(session)).json()["verdict"]["code"] == "failed"
        entries = trainer.read(100, 0.01)
        passes(door)
        assert door.get(path_of(session)).status_code == 200
        trainer.acknowledge([entry.entry_id for entry in entries], Verdicts({}, {}))
        wait_until(lambda: door.get(path_of(session)).status_code == 404)


def test_two_gateways_count_what_they_forget_once(stage: Stage, trainer: RedisReader) -> None:
    with stage.door(retention_s=None) as door:
        sessions = [ended(door) for _ in range(8)]
        learn(trainer)
    with stage.door(retention_s=0.01) as one, stage.door(retention_s=0.01) as other:
        wait_until(lambda: not one.redis.exists(keys.SETTLED))
        counts: Any = one.redis.hgetall(keys.FORGOTTEN)
        assert (int(counts[b"session:trained"]), int(counts[b"turn:trained"])) == (8, 8)

        def told() -> float:
            lines = "\n".join(door.get("/metrics").text for door in (one, other)).splitlines()
            mine = [line for line in lines if line.startswith('weir_sessions_forgotten_total{why="age"}')]
            return sum(float(line.split()[-1]) for line in mine)

        wait_until(lambda: told() == 8)
        assert other.get(path_of(sessions[0])).status_code == 404


def test_heads_alone_never_keep_newcomers_out(
    stage: Stage, trainer: RedisReader, roomy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go, and no more of them than it takes; those that were settled just now stay."""
    monkeypatch.setattr("gateway.sessions.retention.BATCH", 5)
    monkeypatch.setattr("gateway.sessions.retention.BATCHES", 1)
    with stage.door(retention_s=None) as door:
        old = [ended(door) for _ in range(40)]
        learn(trainer)
        fresh = ended(door)
        learn(trainer)
        for number, session in enumerate(old):
            stage.redis.hset(keys.session(session["session_id"]), "ballast", bytes(2**20))
            stage.redis.zincrby(keys.SETTLED, -3600_000 + number, session["session_id"])
    with stage.door() as door:
        wait_until(lambda: forgotten(door) > 0 or _pressed_again(door, 1))
        wait_until(lambda: door.post("/sessions").status_code == 201)
        assert door.get(path_of(old[0])).status_code == 404
        passes(door, 50)
        kept = [door.get(path_of(session)).status_code for session in old]
        assert kept == sorted(kept, reverse=True)
        assert 404 in kept
        assert 200 in kept
        wait_until(lambda: forgotten(door) == len(old) or _pressed_again(door, len(old)))
        pressed(door, FULL)
        passes(door, 20)
        assert door.get(path_of(fresh)).status_code == 200


def _pressed_again(door: Door, most: int) -> bool:
    pressed(door, FULL)
    return forgotten(door) >= most


def test_what_is_kept_for_ever_is_kept_however_full_redis_is(stage: Stage, roomy: None) -> None:
    """In a database of its own: other tests' gateways, which forget, are on the stage's."""
    url = stage.redis_url.removesuffix("1") + "2"
    with Redis.from_url(url) as redis, stage.door(redis_url=url, retention_s=None) as door:
        redis.flushdb()
        door.redis = redis
        session = ended(door)
        learn(claimed_reader(redis))
        redis.zincrby(keys.SETTLED, -(10**12), session["session_id"])
        filled(door)
        wait_until(lambda: _turned_away(door))
        passes(door)
        assert door.get(path_of(session)).status_code == 200
        redis.flushdb()


def _turned_away(door: Door) -> bool:
    pressed(door, FULL)
    return bool(door.post("/sessions").status_code == 429)


def test_a_list_is_read_to_its_end_while_sessions_are_forgotten(stage: Stage, trainer: RedisReader) -> None:
    """Those that stay are each told once, also where the last one that was told of is gone."""
    with stage.door(retention_s=None) as door:
        for _ in range(4):
            ended(door)
        stay = [door.session()["session_id"] for _ in range(4)]
        learn(trainer)
        page = door.get("/sessions?limit=4").json()
        exported = door.get("/admin/export?limit=4&empty=true", key=ADMIN_KEY).text.splitlines()
    with stage.door(retention_s=0.01) as door:
        wait_until(lambda: forgotten(door) == 4)
        rest = door.get(f"/sessions?cursor={page['next_cursor']}").json()
        assert [each["session_id"] for each in rest["data"]] == stay
        for cursor in ("x", "0.5", "bm9wZQ", "aW5mL3g"):
            assert door.get(f"/sessions?cursor={cursor}").status_code == 400, cursor
        assert len(exported) == 4
        cursor = exported[-1].split('"cursor":"')[1].split('"')[0]
        reply = door.get(f"/admin/export?cursor={cursor}", key=ADMIN_KEY)
        assert (reply.status_code, "forgotten" in reply.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["reward", "finish"])
def test_what_comes_in_the_moment_in_which_a_session_goes_is_a_404(
    door: Door, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = door.session()
    body = {"value": 1.0} if path == "reward" else {"status": "completed"}
    monkeypatch.setattr("gateway.rest.rewards.time.time", _going(door, session))
    reply = door.post(f"{path_of(session)}/{path}", body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def _going(door: Door, session: dict[str, Any]) -> Any:
    """A clock that takes the session away when a route asks for the time: after it was read."""
    import time

    now = time.time()

    def gone() -> float:
        door.redis.delete(keys.session(session["session_id"]))
        return now

    return gone


@pytest.mark.parametrize("field", ["t:broken", "r:broken", "outcome", "verdict", "spec"])
def test_a_session_that_nobody_can_read_can_be_deleted(door: Door, field: str) -> None:
    session = door.session()
    door.chat(key=session["api_key"])
    door.redis.hset(keys.session(session["session_id"]), field, b"\xff?")
    path = path_of(session)
    assert door.call("DELETE", path, key=OTHER_KEY).status_code == 404
    if field == "spec":  # whose it is nobody can read either
        assert door.call("DELETE", path).status_code == 404
    reply = door.call("DELETE", path, key=ADMIN_KEY if field == "spec" else "client-key")
    assert reply.status_code == 200, reply.text
    turns = 2 if field == "t:broken" else 1
    assert reply.json()["deleted"] == {"turns": turns, "rewards": int(field == "r:broken")}
    assert door.get(path, key=ADMIN_KEY).status_code == 410
