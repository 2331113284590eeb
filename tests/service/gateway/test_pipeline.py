"""Why a session was not trained: the pipeline, the warnings and the verdicts, over HTTP."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from redis import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import decode_spec
from rollout_queue.contract.export_rows import Episode
from rollout_queue.contract.records import SessionSpec, Verdict, VerdictCode
from rollout_queue.redis import key_names, session_scripts
from rollout_queue.redis.lua import Script
from rollout_queue.redis.record_restore import restore
from rollout_queue.redis.session_lists import SESSIONS_PER_SCRIPT
from rollout_queue.redis.session_store import SCAN_EVERY_S
from tests.support.gateway.polls import polled
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

REDIS_BYTES = 8 * 2**30


def pipeline(gateway: RunningGateway) -> dict[str, Any]:
    reply = gateway.admin("GET", "/pipeline")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def warnings(gateway: RunningGateway) -> list[str]:
    found: list[str] = gateway.admin("GET", "/status").json()["warnings"]
    return found


def decide(redis: Redis, session_id: str, verdict: Verdict, turn_id: str | None = None) -> None:
    """Write a verdict to Redis, as the trainer does."""
    field, what = ("verdict", "session") if turn_id is None else (f"v:{turn_id}", "turn")
    body = {"code": verdict.code, "detail": verdict.detail, "step": verdict.step, "version": verdict.version}
    redis.hset(key_names.session(session_id), field, json.dumps(body))
    redis.hincrby(key_names.VERDICTS, f"{what}:{verdict.code}")
    if turn_id is None:
        redis.zrem(key_names.DEADLINES, session_id)


# The pipeline


def test_the_pipeline_says_what_waits_for_what(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.operators.pipeline.SHARED_S", 0.0)
    backends.clear(None)
    with backends.gateway() as gateway:
        nothing = pipeline(gateway)
        assert nothing["states"] == {"open": 0, "waiting_reward": 0, "finished": 0}
        assert nothing["groups"] == []
        assert nothing["sentences"] == ["no trainer has reported yet: nothing is trained before one does"]
        gateway.session(ttl_s=7200)
        gateway.finish(gateway.session(ttl_s=3600))
        gateway.finish(gateway.session(), reward=1.0)
        members = gateway.post("/groups", {"size": 4, "group_id": "g"}).json()["sessions"]
        gateway.finish(members[0], reward=1.0)
        gateway.finish(members[1])
        gateway.finish(members[2], status="failed")
        gateway.finish(gateway.session(group_id="h", group_size=2), reward=0.0)
        waiting_for = "16 rows with an advantage, of which 4 are here"
        said: Any = {"state": "waiting", "step": 3, "version": 4, "last_seen": time.time()}
        backends.redis.hset(key_names.TRAINER, mapping=said | {"waiting_for": waiting_for})
        report = pipeline(gateway)
    assert report["states"] == {"open": 2, "waiting_reward": 2, "finished": 4}
    assert report["verdicts"] == {
        "session:open": 2,
        "session:waiting_reward": 2,
        "session:group_incomplete": 2,
        "session:ready": 1,
        "session:failed": 1,
    }
    assert (report["looked_at"], report["may_expire"], report["groups_waiting"]) == (7, 7, 2)
    g, h = report["groups"]
    assert (g["group_id"], g["size"], g["ended"], g["open"], g["waiting_reward"]) == ("g", 4, 2, 1, 1)
    assert g["waiting_for"] == "1 goes on, 1 waits for a reward"
    assert (h["group_id"], h["waiting_for"]) == ("h", "1 is not opened yet")
    assert abs(g["since"] - time.time()) < 600
    sentences = " | ".join(report["sentences"])
    assert "2 sessions go on; without another call, the first expires in 60 min" in sentences
    oldest = r"2 sessions wait .*; the oldest has waited for \d+ s, and expires in (59|60) min"
    assert re.search(oldest, sentences)
    assert "2 sessions have ended with a reward, and wait for the rest of the group" in sentences
    alone = "1 session is finished and rewarded, and in no group: by default no step trains it"
    assert alone in sentences
    longest = r"the longest wait is that of g, since \d+ s: 2 of 4 have ended, 1 goes on, 1 waits"
    assert re.search(longest, sentences)
    trainer = "the trainer, at step 3 and version 4, is waiting and waits for 16 rows with an advantage"
    assert trainer in sentences


def test_ended_sessions_that_no_deadline_shows_any_more_are_counted(
    timed: RunningGateway, turned: TurnedClock
) -> None:
    timed.finish(timed.session(group_id="g", group_size=2, ttl_s=60), reward=1.0)
    turned.turn(60)
    wait_until(lambda: timed.redis.zcard(key_names.DEADLINES) == 0)
    report = pipeline(timed)
    assert report["states"]["finished"] == 1
    ended = "1 session has ended and can no longer expire"
    assert any(sentence.startswith(ended) for sentence in report["sentences"])
    turned.turn(SCAN_EVERY_S + 1)  # the gateway looks for sessions that have lost their deadline
    polled()
    assert timed.redis.zcard(key_names.DEADLINES) == timed.redis.exists(key_names.LOSSES) == 0


def test_a_session_that_gets_its_verdict_while_deadlines_are_looked_for_is_not_taken_for_lost(
    timed: RunningGateway, turned: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = timed.session()["session_id"]

    def verdict_comes(spec: bytes) -> SessionSpec:
        decide(timed.redis, session, Verdict(code="not_for_training"))
        return decode_spec(spec)

    monkeypatch.setattr("rollout_queue.redis.session_store.decode_spec", verdict_comes)
    timed.redis.zrem(key_names.DEADLINES, session)  # as the trainer does with the verdict
    turned.turn(SCAN_EVERY_S + 1)
    wait_until(lambda: timed.redis.hexists(key_names.session(session), "verdict"))
    polled()
    assert timed.redis.zcard(key_names.DEADLINES) == timed.redis.exists(key_names.LOSSES) == 0


A_THOUSAND = """
local spec = redis.call('HGET', KEYS[1], 'spec')
for number = ARGV[5], ARGV[5] + 999 do
    local id = 's-' .. number
    redis.call('HSET', ARGV[3] .. id, 'spec', spec)
    redis.call('ZADD', ARGV[1], ARGV[4], id)
    redis.call('ZADD', ARGV[2], ARGV[4] + 3600 + number, id)
end
"""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sessions each script looks at, in the order of the scripts."""
    run, seen = Script.run, list[int]()

    async def noted(script: Script[Any], redis: Any, keys: Any, arguments: Any = ()) -> Any:
        if script is session_scripts.PROGRESS:
            seen.append(len(keys))
        return await run(script, redis, keys, arguments)

    monkeypatch.setattr(Script, "run", noted)
    return seen


def test_a_look_at_a_hundred_thousand_sessions_is_a_look_at_two_thousand(
    backends: Backends, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.operators.pipeline.SHARED_S", 600.0)
    backends.clear(None)
    with backends.gateway() as gateway:
        now = time.time()
        spec = SessionSpec(session_id="s-0", created_at=now)
        restore(backends.redis, Episode(spec=spec))
        spec_of, others = (
            key_names.session("s-0"),
            (key_names.SESSIONS, key_names.DEADLINES, key_names.session(""), now),
        )
        for number in range(0, 100_000, 1000):  # a script of all would block Redis for seconds
            backends.redis.eval(A_THOUSAND, 1, spec_of, *others, number)
        report = pipeline(gateway)
        first = list(looks)
        again = [pipeline(gateway) for _ in range(5)]
        assert all(each == report for each in again)
        assert looks == first, "the answer is kept for a while"
    assert (report["looked_at"], report["may_expire"]) == (2000, 100_000)
    assert report["sentences"][0].startswith("100000 sessions may still expire; of these")
    assert first == [SESSIONS_PER_SCRIPT] * (2000 // SESSIONS_PER_SCRIPT)


# Warnings


@pytest.fixture
def warned(backends: Backends) -> Iterator[Callable[..., Any]]:
    """Starts a gateway with low thresholds for warnings. Its trainer is well unless a test says otherwise."""
    backends.clear(None)
    backends.redis.config_set("maxmemory", REDIS_BYTES)

    def start(**settings: Any) -> Any:
        backends.redis.hset(key_names.TRAINER, mapping={"step": 1, "version": 1, "last_seen": clock.now()})
        return backends.gateway(**settings)

    yield start
    backends.redis.config_set("maxmemory", 0)


def heard(gateway: RunningGateway, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in warnings(gateway))


def test_a_system_that_is_well_warns_of_nothing(warned: Callable[..., Any]) -> None:
    with warned() as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        for number in range(3):
            session = gateway.session()
            gateway.finish(session, reward=number)
            decide(gateway.redis, session["session_id"], Verdict(code="trained", step=1, version=2))
        polled()
        assert warnings(gateway) == []


def test_a_trainer_that_is_silent_paused_or_unable_to_read_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned(warnings={"trainer_silent_s": 300}) as gateway:
        assert not heard(gateway, "the trainer has been silent")
        gateway.redis.hset(key_names.TRAINER, "last_seen", time.time() - 100_000)
        assert heard(gateway, "the trainer has been silent for 100")  # and a few seconds more
        said: Any = {"state": "paused", "waiting_for": "POST /resume, since the mean reward fell"}
        gateway.redis.hset(key_names.TRAINER, mapping=said | {"last_seen": time.time()})
        assert heard(gateway, "the trainer is paused and waits for POST /resume, since the mean reward fell")
        gateway.redis.hset(key_names.TRAINER, "state", "waiting")
        assert not heard(gateway, "paused")
        gateway.redis.delete(key_names.TRAINER)
        assert heard(gateway, "no trainer has reported yet")
        assert not heard(gateway, "could not read")
        letter: Any = {"r": b"\x07", "error": "record schema 7; this build reads schema 1"}
        gateway.redis.xadd(key_names.DEAD_LETTERS, letter)
        assert heard(gateway, "the trainer could not read 1 record, now in weir:dead", "record schema 7")


def test_nothing_trained_though_sessions_ended_is_a_warning(
    warned: Callable[..., Any], turned: TurnedClock
) -> None:
    with warned(warnings={"nothing_trained_s": 600}) as gateway:
        polled()
        turned.turn(900)
        polled()
        assert not heard(gateway, "nothing was trained")  # because no session has ended either
        gateway.finish(gateway.session(), status="failed")
        polled()
        turned.turn(900)
        wait_until(lambda: heard(gateway, "nothing was trained for", "though 1 session ended: 1 failed"))
        gateway.redis.hset(key_names.TRAINER, "step", 2)
        wait_until(lambda: not heard(gateway, "nothing was trained"))


def test_groups_that_keep_dying_are_a_warning_with_the_reason(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10}) as gateway:
        polled()
        for _ in range(30):  # earlier successes must not hide the failures
            decide(gateway.redis, gateway.session()["session_id"], Verdict(code="trained", step=1, version=1))
        polled()
        for number in range(10):
            session = gateway.session()
            gateway.finish(session, reward=1.0)
            code: VerdictCode = "zero_advantage" if number else "trained"
            decide(gateway.redis, session["session_id"], Verdict(code=code))
        words = ("of the last 10 sessions to end", "9 were not trained", "9 of them zero_advantage", "equal")
        wait_until(lambda: heard(gateway, *words))
        for _ in range(10):
            session = gateway.session()
            decide(gateway.redis, session["session_id"], Verdict(code="trained", step=1, version=1))
        wait_until(lambda: not heard(gateway, "were not trained"))


def test_evaluation_is_no_reason_to_worry(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10, "nothing_trained_s": 0.1}) as gateway:
        polled()
        for _ in range(10):
            session = gateway.session(train=False)
            decide(gateway.redis, session["session_id"], Verdict(code="not_for_training"))
        polled()
        assert warnings(gateway) == []


def test_sessions_that_expire_without_a_reward_are_a_warning(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10, "expired_share": 0.2}) as gateway:
        polled()
        for _ in range(8):
            decide(gateway.redis, gateway.session()["session_id"], Verdict(code="trained", step=1, version=1))
        for _ in range(2):
            gateway.session(ttl_s=0.1)
        wait_until(lambda: heard(gateway, "of the last 10 sessions to end, 2 expired", "in time"))


def test_a_queue_near_its_bound_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned(limits={"queue_entries": 10}) as gateway:
        for number in range(8):
            assert not heard(gateway, "records are in the stream"), number
            gateway.chat(session=gateway.session())
        assert heard(gateway, "8 records are in the stream; from 10 on", "gateway.limits.queue_entries")


def test_a_redis_near_its_bound_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned() as gateway:
        # So large that the buffers of clients, which grow and shrink meanwhile, do not matter. Redis makes
        # the value itself, because a value that a client sent stays in that client's buffer for a while.
        gateway.redis.setrange("ballast", 64 * 2**20 - 1, b"\0")
        used: Any = gateway.redis.info("memory")["used_memory"]
        try:
            assert not heard(gateway, "Redis has")
            gateway.redis.config_set("maxmemory", int(used / 0.8))
            assert heard(gateway, "Redis has used", "from 90% on", "gateway.limits.queue_memory")
        finally:
            gateway.redis.config_set("maxmemory", REDIS_BYTES)
            gateway.redis.delete("ballast")


def test_a_redis_without_a_bound_is_a_warning(
    warned: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    with warned() as gateway:
        assert "of 8192 MiB (maxmemory)" in caplog.text
        assert not heard(gateway, "Redis has no maxmemory")
        queue = gateway.admin("GET", "/status").json()["queue"]
        assert 0 < queue["used_bytes"] < queue["max_bytes"] == REDIS_BYTES
        gateway.redis.config_set("maxmemory", 0)
        assert heard(gateway, "Redis has no maxmemory", "gateway.limits.queue_memory has no effect")
        with warned():
            assert "Redis has no maxmemory" in caplog.text


# Verdicts


def _opened(gateway: RunningGateway) -> tuple[str, str]:
    session = gateway.session()
    gateway.chat(session=session)
    return session["session_id"], gateway.turns(session)[0]["turn_id"]


def reached(gateway: RunningGateway, code: VerdictCode) -> str:
    """Make a session that has this verdict, or whose turn has it, by client calls or the trainer's writes."""
    name, turn = _opened(gateway)
    match code:
        case "waiting_reward":
            gateway.finish({"session_id": name})
        case "group_incomplete":
            name = gateway.post("/groups", {"size": 2}).json()["sessions"][0]["session_id"]
            gateway.finish({"session_id": name}, reward=1.0)
        case "ready":
            gateway.finish({"session_id": name}, reward=1.0)
        case (
            "trained"
            | "stale"
            | "skipped_for_newer"
            | "too_long"
            | "zero_advantage"
            | "truncated"
            | "invalid"
        ):
            gateway.finish({"session_id": name}, reward=1.0)
            decide(gateway.redis, name, Verdict(code=code, step=3, version=4))
        case "failed" | "abandoned":
            gateway.finish({"session_id": name}, status=code)
        case "expired":
            name = gateway.session(ttl_s=0.05)["session_id"]
            wait_until(lambda: gateway.redis.hexists(key_names.session(name), "verdict"))
        case "orphan_retry":
            gateway.chat(session={"session_id": name}, headers={"x-stainless-retry-count": "1"})
        case "aborted":
            decide(gateway.redis, name, Verdict(code=code), turn)
        case "not_for_training":
            name = gateway.session(train=False)["session_id"]
            gateway.finish({"session_id": name})
        case "deleted":
            assert gateway.call("DELETE", f"/sessions/{name}").status_code == 200
    return name


@pytest.mark.parametrize("code", get_args(VerdictCode))
def test_every_verdict_can_be_reached_and_has_a_sentence(gateway: RunningGateway, code: VerdictCode) -> None:
    name = reached(gateway, code)
    if code == "deleted":
        assert gateway.get(f"/sessions/{name}").status_code == 410
        (view,) = gateway.get("/sessions").json()["data"]
    else:
        view = gateway.get(f"/sessions/{name}").json()
    said = [view["verdict"], *(turn["verdict"] for turn in view.get("turns", []))]
    found = [verdict for verdict in said if verdict["code"] == code]
    assert found, said
    assert all(len(verdict["detail"].split()) >= 3 for verdict in said), said


def test_what_is_still_missing_is_said(gateway: RunningGateway) -> None:
    members = gateway.post("/groups", {"size": 3, "group_id": "g"}).json()["sessions"]

    def verdict(member: dict[str, Any]) -> tuple[str, str]:
        said = gateway.get(f"/sessions/{member['session_id']}").json()["verdict"]
        return said["code"], said["detail"]

    gateway.chat(session=members[0])
    gateway.finish(members[0], reward=1.0)
    waits = "1 of 3 sessions of group g have ended; 2 go on"
    assert verdict(members[0]) == ("group_incomplete", waits)
    gateway.finish(members[1])
    code, detail = verdict(members[1])
    assert code == "waiting_reward"
    assert f"POST /sessions/{members[1]['session_id']}/reward, before it expires at 20" in detail
    assert verdict(members[0])[1].endswith("1 goes on, 1 waits for a reward")
    gateway.finish(members[2], status="failed")
    gateway.post(f"/sessions/{members[1]['session_id']}/reward", {"value": 0.0})
    ready = "finished and rewarded, and so are all 3 of its group: waits for a step of the trainer"
    assert verdict(members[0]) == ("ready", ready)


# Heartbeats

TTL_S = 60.0
"""How late a heartbeat may come on a busy machine."""


def beat(gateway: RunningGateway, session: dict[str, Any], **more: Any) -> Any:
    return gateway.post(f"/sessions/{session['session_id']}/heartbeat", **more)


def test_a_heartbeat_prolongs_a_session_as_a_call_does(timed: RunningGateway, turned: TurnedClock) -> None:
    session = timed.session(ttl_s=TTL_S)
    path = f"/sessions/{session['session_id']}"
    for _ in range(3):
        turned.turn(TTL_S / 2)  # the agent's tool runs; without heartbeats the session would expire
        before = clock.now()
        reply = beat(timed, session, key=session["api_key"])
        assert reply.status_code == 200, reply.text
        assert before + TTL_S <= reply.json()["expires_at"] <= clock.now() + TTL_S
    view = timed.get(path).json()
    assert (view["state"], view["expires_at"]) == ("open", reply.json()["expires_at"])
    assert timed.chat(path=f"{path}/v1/chat/completions").status_code == 200
    turned.turn(TTL_S)
    wait_until(lambda: timed.get(path).json()["verdict"]["code"] == "expired")


def test_a_gateway_serves_a_call_after_a_heartbeat_at_another_gateway(
    backends: Backends, turned: TurnedClock
) -> None:
    backends.clear(None)
    with backends.gateway() as one, backends.gateway() as other:
        session = one.session(ttl_s=TTL_S)
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        assert beat(other, session).status_code == 200
        assert one.chat(path=path).status_code == 200
        for _ in range(3):
            turned.turn(TTL_S / 2)  # the agent's tool runs; without heartbeats the session would expire
            assert beat(other, session).status_code == 200
        assert one.chat(path=path).status_code == 200


def test_a_heartbeat_for_an_ended_or_a_strangers_session_is_refused(gateway: RunningGateway) -> None:
    session, other = gateway.session(), gateway.session()
    assert beat(gateway, session, key="other-key").status_code == 404
    assert beat(gateway, session, key=other["api_key"]).status_code == 404
    assert beat(gateway, session, key=None).status_code == 401
    assert beat(gateway, {"session_id": "nobody"}).status_code == 404
    gateway.finish(session)
    reply = beat(gateway, session)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_finished")
    late = gateway.session(ttl_s=0.05)
    wait_until(lambda: gateway.redis.hexists(key_names.session(late["session_id"]), "verdict"))
    assert beat(gateway, late).json()["error"]["code"] == "session_expired"
    gateway.call("DELETE", f"/sessions/{other['session_id']}")
    assert beat(gateway, other).status_code == 410
