"""Why was this not trained? The pipeline, the warnings and the verdicts, through the door."""

import json
import re
import time
from collections.abc import Callable
from typing import Any, get_args

import pytest
from redis import Redis

from rollout_queue.contract.episodes import Episode
from rollout_queue.contract.records import SessionSpec, Verdict, VerdictCode
from rollout_queue.redis import keys
from rollout_queue.redis.restore import restore
from tests.gateway.conftest import ADMIN_KEY, Door, Stage, wait_until


def pipeline(door: Door) -> dict[str, Any]:
    reply = door.get("/admin/pipeline", key=ADMIN_KEY)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def warnings(door: Door) -> list[str]:
    found: list[str] = door.get("/admin/status", key=ADMIN_KEY).json()["warnings"]
    return found


def decide(redis: Redis, session_id: str, verdict: Verdict, turn_id: str | None = None) -> None:
    """What the trainer writes when it has decided."""
    field, what = ("verdict", "session") if turn_id is None else (f"v:{turn_id}", "turn")
    body = {"code": verdict.code, "detail": verdict.detail, "step": verdict.step, "version": verdict.version}
    redis.hset(keys.session(session_id), field, json.dumps(body))
    redis.hincrby(keys.VERDICTS, f"{what}:{verdict.code}")
    if turn_id is None:
        redis.zrem(keys.DEADLINES, session_id)


def end(door: Door, session: dict[str, Any], **finish: Any) -> None:
    reply = door.post(f"/sessions/{session['session_id']}/finish", {"status": "completed"} | finish)
    assert reply.status_code == 200, reply.text


# The pipeline


def test_the_pipeline_of_nothing_says_so(stage: Stage) -> None:
    stage.clear(None)
    with stage.door() as door:
        report = pipeline(door)
    assert report["states"] == {"open": 0, "waiting_reward": 0, "finished": 0}
    assert report["groups"] == []
    assert report["sentences"] == ["no trainer has reported yet: nothing is trained before one does"]


def test_the_pipeline_says_what_waits_for_what(stage: Stage) -> None:
    stage.clear(None)
    with stage.door() as door:
        door.session(ttl_s=7200)
        end(door, door.session(ttl_s=3600))
        end(door, door.session(), reward=1.0)
        members = door.post("/groups", {"size": 4, "group_id": "g"}).json()["sessions"]
        end(door, members[0], reward=1.0)
        end(door, members[1])
        end(door, members[2], status="failed")
        end(door, door.session(group_id="h", group_size=2), reward=0.0)
        stage.redis.hset(
            keys.TRAINER,
            mapping={
                "state": "waiting",
                "step": 3,
                "version": 4,
                "waiting_for": "16 rows with an advantage, of which 4 are here",
                "last_seen": time.time(),
            },
        )
        report = pipeline(door)
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
    assert abs(g["since"] - time.time()) < 30
    said = " | ".join(report["sentences"])
    assert "2 sessions go on; without another call, the first expires in 60 min" in said
    assert re.search(r"2 sessions wait for a reward; the oldest since \d+ s, it expires in (59|60) min", said)
    assert "2 sessions have ended with a reward, and wait for the rest of the group" in said
    assert "1 session is finished and rewarded, with the whole group: for the trainer to take" in said
    assert (
        "2 groups wait for members; the oldest is g, since 0 s: 2 of 4 have ended, 1 goes on, 1 waits" in said
    )
    assert "the trainer, at step 3 and version 4, is waiting and waits for 16 rows with an advantage" in said


def test_ended_sessions_that_no_deadline_shows_any_more_are_counted(stage: Stage) -> None:
    stage.clear(None)
    with stage.door() as door:
        session = door.session(group_id="g", group_size=2, ttl_s=0.2)
        end(door, session, reward=1.0)
        wait_until(lambda: stage.redis.zcard(keys.DEADLINES) == 0)
        report = pipeline(door)
    assert report["states"]["finished"] == 1
    assert any(
        sentence.startswith("1 session beyond the time to live, finished and rewarded")
        for sentence in report["sentences"]
    )


MANY = """
local spec = redis.call('HGET', KEYS[1], 'spec')
for number = 0, 99999 do
    local id = 's-' .. number
    redis.call('HSET', ARGV[3] .. id, 'spec', spec)
    redis.call('ZADD', ARGV[1], ARGV[4], id)
    redis.call('ZADD', ARGV[2], ARGV[4] + 3600 + number, id)
end
"""


def test_a_look_at_a_hundred_thousand_sessions_is_a_look_at_two_thousand(stage: Stage) -> None:
    stage.clear(None)
    with stage.door() as door:
        now = time.time()
        spec = SessionSpec(session_id="s-0", created_at=now)
        restore(stage.redis, Episode(spec=spec))
        stage.redis.eval(MANY, 1, keys.session("s-0"), keys.SESSIONS, keys.DEADLINES, keys.session(""), now)
        asked = _commands(stage.redis)
        started = time.monotonic()
        report = pipeline(door)
        took_s = time.monotonic() - started
        first = _commands(stage.redis) - asked
        again = [pipeline(door) for _ in range(5)]
        assert all(each == report for each in again)
        assert _commands(stage.redis) - asked == first
    assert (report["looked_at"], report["may_expire"]) == (2000, 100_000)
    assert report["sentences"][0].startswith("100000 sessions may still expire; what follows")
    assert first <= 2000 // 100 + 2
    assert took_s < 2


def _commands(redis: Redis) -> int:
    """How many scripts Redis has run: each looks at a hundred sessions, and nobody else runs any."""
    stats: Any = redis.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


# Warnings


@pytest.fixture
def warned(stage: Stage) -> Callable[..., Any]:
    """A gateway of one's own, with its thresholds; its trainer is well unless a test says otherwise."""
    stage.clear(None)

    def start(**settings: Any) -> Any:
        stage.redis.hset(keys.TRAINER, mapping={"step": 1, "version": 1, "last_seen": time.time()})
        return stage.door(**settings)

    return start


def heard(door: Door, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in warnings(door))


def test_a_system_that_is_well_warns_of_nothing(warned: Callable[..., Any]) -> None:
    with warned() as door:
        wait_until(lambda: door.get("/ready").status_code == 200)
        for number in range(3):
            session = door.session()
            end(door, session, reward=number)
            decide(door.redis, session["session_id"], Verdict(code="trained", step=1, version=2))
        time.sleep(0.2)
        assert warnings(door) == []


def test_a_trainer_that_is_silent_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned(warnings={"trainer_silent_s": 5}) as door:
        assert not heard(door, "the trainer has been silent")
        door.redis.hset(keys.TRAINER, "last_seen", time.time() - 8)
        assert heard(door, "the trainer has been silent for 8 s")
        door.redis.delete(keys.TRAINER)
        assert heard(door, "no trainer has reported yet")


def test_a_trainer_that_is_paused_is_a_warning_with_the_reason(warned: Callable[..., Any]) -> None:
    with warned() as door:
        said = {"state": "paused", "waiting_for": "POST /resume, since the mean reward fell"}
        door.redis.hset(keys.TRAINER, mapping=said)
        assert heard(door, "the trainer is paused and waits for POST /resume, since the mean reward fell")
        door.redis.hset(keys.TRAINER, "state", "waiting")
        assert not heard(door, "paused")


def test_nothing_trained_though_sessions_ended_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned(warnings={"nothing_trained_s": 0.4}) as door:
        time.sleep(0.6)
        assert not heard(door, "nothing was trained")  # nothing ended either
        end(door, door.session(), status="failed")
        wait_until(lambda: heard(door, "nothing was trained for", "though 1 session ended: 1 failed"))
        door.redis.hset(keys.TRAINER, "step", 2)
        wait_until(lambda: not heard(door, "nothing was trained"))


def test_groups_that_keep_dying_are_a_warning_with_the_reason(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10}) as door:
        time.sleep(0.2)
        for _ in range(30):  # what was well before does not hide what is not any more
            decide(door.redis, door.session()["session_id"], Verdict(code="trained", step=1, version=1))
        time.sleep(0.3)
        for number in range(10):
            session = door.session()
            end(door, session, reward=1.0)
            code: VerdictCode = "zero_advantage" if number else "trained"
            decide(door.redis, session["session_id"], Verdict(code=code))
        words = ("of the last 10 sessions to end", "9 were not trained", "9 of them zero_advantage", "equal")
        wait_until(lambda: heard(door, *words))
        for _ in range(10):
            session = door.session()
            decide(door.redis, session["session_id"], Verdict(code="trained", step=1, version=1))
        wait_until(lambda: not heard(door, "were not trained"))


def test_evaluation_is_no_reason_to_worry(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10, "nothing_trained_s": 0.1}) as door:
        time.sleep(0.2)
        for _ in range(10):
            decide(door.redis, door.session(train=False)["session_id"], Verdict(code="not_for_training"))
        time.sleep(0.3)
        assert warnings(door) == []


def test_sessions_that_expire_without_a_reward_are_a_warning(warned: Callable[..., Any]) -> None:
    with warned(warnings={"recent_sessions": 10, "expired_share": 0.2}) as door:
        time.sleep(0.2)
        for _ in range(8):
            decide(door.redis, door.session()["session_id"], Verdict(code="trained", step=1, version=1))
        for _ in range(2):
            door.session(ttl_s=0.1)
        wait_until(lambda: heard(door, "of the last 10 sessions to end, 2 expired", "in time"))


def test_a_queue_near_its_bound_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned(limits={"queue_entries": 10}) as door:
        for number in range(8):
            assert not heard(door, "records in the stream"), number
            door.chat(path=f"/sessions/{door.session()['session_id']}/v1/chat/completions")
        assert heard(door, "8 records in the stream; from 10 on", "gateway.limits.queue_entries")


def test_a_redis_near_its_bound_is_a_warning(warned: Callable[..., Any]) -> None:
    with warned() as door:
        used: Any = door.redis.info("memory")["used_memory"]
        try:
            assert not heard(door, "maxmemory")
            door.redis.config_set("maxmemory", int(used / 0.8))
            assert heard(door, "Redis has used", "from 90% on", "gateway.limits.queue_memory")
        finally:
            door.redis.config_set("maxmemory", 0)


def test_dead_letters_are_a_warning_with_the_last_reason(warned: Callable[..., Any]) -> None:
    with warned() as door:
        assert not heard(door, "cannot read")
        door.redis.xadd(
            keys.DEAD_LETTERS, {"r": b"\x07", "error": "record schema 7; this build reads schema 1"}
        )
        assert heard(door, "1 record that this build cannot read, in weir:dead", "record schema 7")


# Verdicts


def _opened(door: Door) -> tuple[str, str]:
    session = door.session()
    door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions")
    return session["session_id"], door.turns(session)[0]["turn_id"]


def reached(door: Door, code: VerdictCode) -> str:
    """A session with this verdict, or with a turn of it: by what a client does, or the trainer writes."""
    name, turn = _opened(door)
    match code:
        case "waiting_reward":
            end(door, {"session_id": name})
        case "group_incomplete":
            name = door.post("/groups", {"size": 2}).json()["sessions"][0]["session_id"]
            end(door, {"session_id": name}, reward=1.0)
        case "ready":
            end(door, {"session_id": name}, reward=1.0)
        case "trained" | "stale" | "zero_advantage" | "truncated" | "invalid":
            end(door, {"session_id": name}, reward=1.0)
            decide(door.redis, name, Verdict(code=code, step=3, version=4))
        case "failed" | "abandoned":
            end(door, {"session_id": name}, status=code)
        case "expired":
            name = door.session(ttl_s=0.05)["session_id"]
            wait_until(lambda: door.redis.hexists(keys.session(name), "verdict"))
        case "orphan_retry":
            door.chat(path=f"/sessions/{name}/v1/chat/completions", headers={"x-stainless-retry-count": "1"})
        case "aborted":
            decide(door.redis, name, Verdict(code=code), turn)
        case "not_for_training":
            name = door.session(train=False)["session_id"]
            end(door, {"session_id": name})
        case "deleted":
            assert door.call("DELETE", f"/sessions/{name}").status_code == 200
    return name


@pytest.mark.parametrize("code", get_args(VerdictCode))
def test_every_verdict_can_be_reached_and_has_a_sentence(door: Door, code: VerdictCode) -> None:
    name = reached(door, code)
    if code == "deleted":
        assert door.get(f"/sessions/{name}").status_code == 410
        (view,) = door.get("/sessions").json()["data"]
    else:
        view = door.get(f"/sessions/{name}").json()
    said = [view["verdict"], *(turn["verdict"] for turn in view.get("turns", []))]
    found = [verdict for verdict in said if verdict["code"] == code]
    assert found, said
    assert all(len(verdict["detail"].split()) >= 3 for verdict in said), said


def test_what_is_still_missing_is_said(door: Door) -> None:
    members = door.post("/groups", {"size": 3, "group_id": "g"}).json()["sessions"]

    def verdict(member: dict[str, Any]) -> tuple[str, str]:
        said = door.get(f"/sessions/{member['session_id']}").json()["verdict"]
        return said["code"], said["detail"]

    end(door, members[0], reward=1.0)
    assert verdict(members[0]) == (
        "group_incomplete",
        "1 of 3 sessions of group g have ended; 2 go on",
    )
    end(door, members[1])
    code, detail = verdict(members[1])
    assert code == "waiting_reward"
    assert f"POST /sessions/{members[1]['session_id']}/reward, before it expires at 20" in detail
    assert verdict(members[0])[1].endswith("1 goes on, 1 waits for a reward")
    end(door, members[2], status="failed")
    door.post(f"/sessions/{members[1]['session_id']}/reward", {"value": 0.0})
    assert verdict(members[0]) == (
        "ready",
        "finished and rewarded, and so are all 3 of its group: waits for a step of the trainer",
    )


# Heartbeats


def beat(door: Door, session: dict[str, Any], **more: Any) -> Any:
    return door.post(f"/sessions/{session['session_id']}/heartbeat", **more)


def test_a_heartbeat_prolongs_a_session_as_a_call_does(door: Door) -> None:
    session = door.session(ttl_s=1.0)
    for _ in range(4):
        time.sleep(0.5)
        reply = beat(door, session, key=session["api_key"])
        assert reply.status_code == 200, reply.text
        assert abs(reply.json()["expires_at"] - (time.time() + 1.0)) < 0.3
    view = door.get(f"/sessions/{session['session_id']}").json()
    assert (view["state"], view["expires_at"]) == ("open", reply.json()["expires_at"])
    assert door.chat(path=f"/sessions/{session['session_id']}/v1/chat/completions").status_code == 200
    wait_until(lambda: door.get(f"/sessions/{session['session_id']}").json()["verdict"]["code"] == "expired")


def test_a_gateway_that_has_not_heard_the_heartbeat_serves_the_call(stage: Stage) -> None:
    stage.clear(None)
    with stage.door() as one, stage.door() as other:
        session = one.session(ttl_s=1.0)
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        assert beat(other, session).status_code == 200
        assert one.chat(path=path).status_code == 200
        for _ in range(3):
            time.sleep(0.5)
            assert beat(other, session).status_code == 200
        assert one.chat(path=path).status_code == 200


def test_a_heartbeat_of_what_has_ended_or_is_not_ones_own_is_refused(door: Door) -> None:
    session, other = door.session(), door.session()
    assert beat(door, session, key="other-key").status_code == 404
    assert beat(door, session, key=other["api_key"]).status_code == 404
    assert beat(door, session, key=None).status_code == 401
    assert beat(door, {"session_id": "nobody"}).status_code == 404
    end(door, session)
    reply = beat(door, session)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "session_finished")
    late = door.session(ttl_s=0.05)
    wait_until(lambda: door.redis.hexists(keys.session(late["session_id"]), "verdict"))
    assert beat(door, late).json()["error"]["code"] == "session_expired"
    door.call("DELETE", f"/sessions/{other['session_id']}")
    assert beat(door, other).status_code == 410
