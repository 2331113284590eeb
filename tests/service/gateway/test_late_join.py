"""A call may come before the POST /sessions that describes its session."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from gateway.sessions.lifetime import CallsInFlight
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import key_names
from tests.support.claimed import claimed_reader
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.polls import polled
from tests.support.gateway.running import ADMIN_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.queue.memory_stream import MemoryStream
from tests.support.waiting import wait_until
from trainer_service.groups.assemble import Assembler, Group, Rules

BODY: dict[str, Any] = {
    "session_id": "run-1",
    "group_id": "g",
    "group_size": 2,
    "task_id": "sums",
    "user": "ann",
    "ttl_s": 7200.0,
    "metadata": {"env": "sums"},
}
SAMPLED: list[dict[str, Any]] = [
    {"sampling": {"temperature": 0.5}},
    {"sampling": {"max_tokens": 5}},
    {"policy": "policy@3"},
    {"reasoning_effort": "low"},
    {"thinking": "all"},
    {"lineage": "planner"},
    {"train_side_calls": False},
]
"""What decides how calls are sampled, rendered and labelled."""


def call(gateway: RunningGateway, session_id: str = "run-1", **more: Any) -> Any:
    reply = gateway.chat(headers={"x-session-id": session_id}, **more)
    assert reply.status_code == 200, reply.text
    return reply


def conflict(reply: Any) -> tuple[str | None, str]:
    """Checks that a 409 has the contract's shape; returns its `param` and its message."""
    assert reply.status_code == 409, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["param"], error["message"]


def trainers_groups(gateway: RunningGateway) -> list[Group]:
    """The complete groups that a trainer finds in the stream."""
    assembler = Assembler(Rules(vocab_size=1_000_000, train_truncated=False, group_wait_s=1e12))
    assembler.add(claimed_reader(gateway.redis).read(100, 0.01))
    return assembler.complete(caught_up=True)


def test_a_session_that_a_call_opened_is_described_once(gateway: RunningGateway) -> None:
    call(gateway)
    reply = gateway.post("/sessions", BODY)
    assert reply.status_code == 200, reply.text
    session = reply.json()
    assert session["base_url"] == f"{gateway.url}/sessions/run-1/v1"
    assert gateway.chat(key=session["api_key"]).headers["x-weir-session-id"] == "run-1"
    view = gateway.get("/sessions/run-1").json()
    assert {name: view[name] for name in ("group_id", "task_id", "user")} == {
        "group_id": "g", "task_id": "sums", "user": "ann",
    }  # fmt: skip
    assert len(view["turns"]) == 2
    (row, _) = gateway.get("/admin/export", key=ADMIN_KEY).text.splitlines()
    told = json.loads(row)
    assert (told["group_id"], told["task_id"], told["session"]["metadata"]) == ("g", "sums", {"env": "sums"})
    assert session["expires_at"] >= view["created_at"] + 7200.0
    again = gateway.post("/sessions", BODY)
    assert (again.status_code, again.json()["api_key"]) == (200, session["api_key"])
    assert conflict(gateway.post("/sessions", BODY | {"task_id": "others"}))[0] == "session_id"


def test_a_session_is_described_once_also_by_a_body_without_terms(gateway: RunningGateway) -> None:
    call(gateway)
    assert [gateway.post("/sessions", {"session_id": "run-1"}).status_code for _ in range(2)] == [200, 200]
    assert conflict(gateway.post("/sessions", BODY))[0] == "session_id"
    gateway.session(session_id="run-2")
    call(gateway, "run-2")
    assert conflict(gateway.post("/sessions", BODY | {"session_id": "run-2"}))[0] == "session_id"


def test_the_session_of_a_call_without_a_name_is_described_by_the_id_in_the_reply(
    gateway: RunningGateway,
) -> None:
    name = gateway.chat().headers["x-weir-session-id"]
    assert gateway.post("/sessions", BODY | {"session_id": name}).status_code == 200
    view = gateway.get(f"/sessions/{name}").json()
    assert (view["group_id"], view["inferred"]) == ("g", True)


def test_the_trainer_sees_the_group_and_every_turn(gateway: RunningGateway, other: RunningGateway) -> None:
    """Turns before the late join and after it, recorded by two gateways."""
    call(gateway)
    gateway.session(session_id="run-2", group_id="g", group_size=2, task_id="sums")
    call(other, "run-2")
    assert other.post("/sessions", BODY).status_code == 200
    call(gateway)
    gateway.finish({"session_id": "run-1"}, reward=1.0)
    assert not trainers_groups(gateway)
    other.finish({"session_id": "run-2"}, reward=0.0)
    gateway.redis.xgroup_setid(key_names.STREAM, key_names.GROUP, "0")
    (group,) = trainers_groups(gateway)
    found = [(each.session_id, len(each.turns), each.reward) for each in group.members]
    assert (group.group_id, group.size, group.task_id) == ("g", 2, "sums")
    assert found == [("run-1", 2, 1.0), ("run-2", 1, 0.0)]


def test_a_call_in_flight_is_recorded_in_the_group(gated: RunningGateway) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(call, gated)
        asked(gated, 1)
        assert gated.post("/sessions", BODY | {"group_size": 1, "ttl_s": 60.0}).status_code == 200
        let_on(gated)
        assert pending.result().status_code == 200
    gated.finish({"session_id": "run-1"}, reward=1.0)
    (group,) = trainers_groups(gated)
    assert (group.group_id, group.size, len(group.members[0].turns)) == ("g", 1, 1)


def test_what_a_call_was_sampled_with_is_not_changed(gateway: RunningGateway) -> None:
    call(gateway)
    for fields in SAMPLED:
        param, message = conflict(gateway.post("/sessions", BODY | fields))
        assert [param] == list(fields)
        assert f"its {param} can no longer be changed" in message, fields
    both = BODY | {"sampling": {"top_p": 0.5}, "lineage": "planner"}
    assert "its sampling and lineage can" in conflict(gateway.post("/sessions", both))[1]
    assert gateway.get("/sessions/run-1").json()["group_id"] is None
    assert gateway.get("/sessions?group_id=g").json()["data"] == []
    said = {"policy": "policy", "sampling": {"mode": "exact", "temperature": 1.0, "top_p": 1.0}}
    for _ in range(2):
        assert gateway.post("/sessions", BODY | said).status_code == 200, "it may be said"


async def test_a_long_call_keeps_a_session_open_whose_time_to_live_became_shorter() -> None:
    stream, now = MemoryStream(), time.time()
    opened = SessionSpec(session_id="run-1", created_at=now - 3590.0, implicit=True)
    await stream.open_session(opened)
    calls = CallsInFlight(stream)
    session = await calls.enter(SessionHead(spec=opened))
    await stream.describe_session(msgspec.structs.replace(opened, ttl_s=60.0, implicit=False), now)
    await calls.put_off_expiry()
    assert session.expires_at == stream.deadlines["run-1"] < now + 3600.0
    assert session.due


def test_a_session_that_turns_out_to_be_an_evaluation_is_not_trained(gateway: RunningGateway) -> None:
    call(gateway)
    assert gateway.post("/sessions", BODY | {"train": False, "group_size": 1}).status_code == 200
    gateway.finish({"session_id": "run-1"}, reward=1.0)
    view = gateway.get("/sessions/run-1").json()
    assert {view["verdict"]["code"], view["turns"][0]["verdict"]["code"]} == {"not_for_training"}
    (group,) = trainers_groups(gateway)
    assert not group.rollouts
    assert group.members[0].evaluation is not None


def test_a_session_that_has_ended_is_not_described(gateway: RunningGateway) -> None:
    for name in ("finished", "expired", "deleted"):
        call(gateway, name)
    gateway.finish({"session_id": "finished"}, reward=1.0)
    gateway.redis.zadd(key_names.DEADLINES, {"expired": 1.0})
    assert gateway.call("DELETE", "/sessions/deleted").status_code == 200
    for name, status in (("finished", 409), ("expired", 409), ("deleted", 410)):
        assert gateway.post("/sessions", BODY | {"session_id": name}).status_code == status, name
    assert gateway.get("/sessions?group_id=g").json()["data"] == []


def test_a_full_group_takes_no_session_of_a_call(gateway: RunningGateway) -> None:
    gateway.post("/groups", {"size": 2, "group_id": "g"})
    call(gateway)
    assert conflict(gateway.post("/sessions", BODY)) == ("group_id", "group g has its 2 sessions already")
    view = gateway.get("/sessions/run-1").json()
    assert (view["group_id"], view["task_id"], view["user"]) == (None, None, None)
    assert gateway.post("/sessions", BODY | {"group_id": "h"}).status_code == 200


def test_the_data_of_a_user_is_deleted_with_the_session(gateway: RunningGateway) -> None:
    call(gateway)
    assert gateway.post("/sessions", BODY).status_code == 200
    assert gateway.call("DELETE", "/admin/users/ann/data", key=ADMIN_KEY).status_code == 200
    assert gateway.get("/sessions/run-1").status_code == 410
    call(gateway, "run-2")
    later = BODY | {"session_id": "run-2"}
    assert gateway.post("/sessions", later).status_code == 410, "a deleted user"
    assert gateway.post("/sessions", later | {"user": "bob"}).status_code == 200


def test_each_key_describes_its_own_session(gateway: RunningGateway) -> None:
    call(gateway)
    call(gateway, key=OTHER_KEY)
    mine = gateway.post("/sessions", BODY)
    theirs = gateway.post("/sessions", BODY | {"group_id": "theirs"}, key=OTHER_KEY)
    assert (mine.status_code, theirs.status_code) == (200, 200)
    assert mine.json()["api_key"] != theirs.json()["api_key"]
    assert gateway.get("/sessions/run-1").json()["group_id"] == "g"
    assert gateway.get("/sessions/run-1", key=OTHER_KEY).json()["group_id"] == "theirs"


def test_of_descriptions_at_once_one_is_taken(gateway: RunningGateway, other: RunningGateway) -> None:
    for name in ("run-1", "run-2"):
        call(gateway, name)
        bodies = [BODY | {"session_id": name, "group_id": f"{name}-{index}"} for index in range(8)]
        with ThreadPoolExecutor(8) as many:
            replies = list(many.map(lambda i: (gateway, other)[i % 2].post("/sessions", bodies[i]), range(8)))  # noqa: B023
        assert sorted(each.status_code for each in replies) == [200] + [409] * 7
        (taken,) = (reply.json() for reply in replies if reply.status_code == 200)
        assert gateway.get(f"/sessions/{name}").json()["group_id"] == taken["group_id"]
        assert len(gateway.redis.keys(f"weir:g:{name}-*:members")) == 1


def test_a_call_and_a_description_at_once_both_succeed(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    with ThreadPoolExecutor(4) as many:
        for index in range(10):
            name = f"run-{index}"
            calls = [many.submit(call, each, name) for each in (gateway, other)]
            described = many.submit(
                other.post, "/sessions", BODY | {"session_id": name, "group_id": f"g-{index}"}
            )
            assert described.result().status_code in (200, 201)
            assert [each.result().status_code for each in calls] == [200, 200]
            view = gateway.get(f"/sessions/{name}").json()
            assert (view["group_id"], len(view["turns"])) == (f"g-{index}", 2)


def test_the_staleness_budget_counts_what_the_description_says(backends: Backends) -> None:
    backends.clear(None)
    with backends.gateway(limits={"staleness_versions": 0}) as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        said: Any = {"version": 0, "rollouts_waiting": 0, "rollouts_owed": 0, "rollouts_per_step": 4.0}
        gateway.redis.hset(key_names.TRAINER, mapping=said | {"last_seen": 1e12})
        polled()

        def counted() -> set[bytes]:
            return set(gateway.redis.zrange(key_names.UNTRAINED, 0, -1))  # type: ignore[arg-type]

        call(gateway, "named")
        unnamed = gateway.chat().headers["x-weir-session-id"]
        assert counted() == {b"named"}
        assert gateway.post("/sessions", {"session_id": "named", "train": False}).status_code == 200
        assert counted() == set()
        assert gateway.post("/sessions", {"session_id": unnamed}).status_code == 200
        assert counted() == {unnamed.encode()}
