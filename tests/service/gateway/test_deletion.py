"""Deletion over HTTP: a deleted session is 410 for ever, and no copy of its contents is left."""

import gc
import json
from collections import OrderedDict, deque
from functools import cache
from typing import Any

import httpx
import pytest

from gateway.dialects.stored_responses import ResponseStore
from rollout_queue.contract.codec import decode, encode
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import Deletion, Reward
from rollout_queue.redis import key_names
from rollout_queue.redis.session_deletion import StreamDeleter
from tests.support.gateway.calls import Call
from tests.support.gateway.deletion import delete, holding, is_gone, path_of
from tests.support.gateway.gated_engine import asked, let_on
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, OTHER_KEY, Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.waiting import wait_until

MARK = "zebrafinch"
CACHE = type(cache(str))


def delete_user(gateway: RunningGateway, user: str, key: str = ADMIN_KEY) -> httpx.Response:
    reply: httpx.Response = gateway.call("DELETE", f"/admin/users/{user}/data", key=key)
    return reply


def only_deletions(redis: Any) -> bool:
    """Whether the stream holds deletion records and nothing else."""
    return {type(decode(fields[b"r"])) for _, fields in redis.xrange(key_names.STREAM)} == {Deletion}


def test_a_deleted_session_is_gone_for_every_request(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = path_of(session)
    completion = gateway.chat(path=f"{path}/v1/chat/completions").json()
    gateway.post(f"{path}/reward", {"value": 1.0})
    gateway.post(f"{path}/reward", {"value": 0.5, "turn_id": completion["id"]})
    reply = delete(gateway, session)
    assert reply.status_code == 200
    assert reply.json() == {"session_id": session["session_id"], "deleted": {"turns": 1, "rewards": 2}}
    again = delete(gateway, session)
    assert is_gone(again)
    assert again.headers["x-should-retry"] == "false"
    calls = f"{path}/v1/chat/completions"
    for gone in (
        *(gateway.chat(path=calls, key=key) for key in (CLIENT_KEY, session["api_key"])),
        *(gateway.chat(path=calls, key=key, stream=True) for key in (CLIENT_KEY, session["api_key"])),
        gateway.chat(key=session["api_key"]),
        gateway.chat(headers={"x-session-id": session["session_id"]}),
        gateway.get(path),
        gateway.get(path, key=ADMIN_KEY),
        gateway.post(f"{path}/reward", {"value": 1.0}),
        gateway.post(f"{path}/reward", {"value": 1.0, "turn_id": completion["id"]}),
        gateway.post(f"{path}/finish", {"status": "completed"}),
        gateway.post("/sessions", {"session_id": session["session_id"]}),
    ):
        assert is_gone(gone), gone.request
    assert len(gateway.engine.requests) == 1


def test_a_session_is_deleted_by_whom_it_belongs_to(gateway: RunningGateway) -> None:
    session = gateway.session()
    assert delete(gateway, session, key=OTHER_KEY).status_code == 404
    assert delete(gateway, session, key=session["api_key"]).status_code == 403
    assert gateway.get(path_of(session)).json()["state"] == "open"
    assert delete(gateway, session, key=ADMIN_KEY).status_code == 200
    for call in (delete(gateway, session, key=OTHER_KEY), gateway.get(path_of(session), key=OTHER_KEY)):
        assert call.status_code == 404
    assert gateway.call("DELETE", "/sessions/nobody").status_code == 404
    assert gateway.call("DELETE", "/sessions/a%20b").status_code == 404


def test_lists_show_of_a_deleted_session_that_it_was_there(gateway: RunningGateway) -> None:
    sessions = [gateway.session(group_id="g", user="ann", task_id="t") for _ in range(3)]
    before = gateway.get("/sessions").json()["data"]
    delete(gateway, sessions[1])
    first, row, last = gateway.get("/sessions").json()["data"]
    assert set(row) == {"session_id", "created_at", "deleted_at", "verdict"}
    assert (row["session_id"], row["created_at"]) == (sessions[1]["session_id"], before[1]["created_at"])
    assert row["deleted_at"] > row["created_at"]
    assert row["verdict"]["code"] == "deleted"
    assert gateway.get("/sessions?verdict=deleted").json()["data"] == [row]
    others = [first["session_id"], last["session_id"]]
    for asked_for in ("state=open", "group_id=g", "user=ann", "verdict=open", "user=ann&verdict=open"):
        found = gateway.get(f"/sessions?{asked_for}").json()["data"]
        assert [each["session_id"] for each in found] == others, asked_for
    assert gateway.get("/sessions", key=OTHER_KEY).json()["data"] == []
    pages, cursor = [], "0"
    while cursor is not None:
        page = gateway.get(f"/sessions?limit=1&cursor={cursor}").json()
        assert len(page["data"]) <= 1
        pages += [each["session_id"] for each in page["data"]]
        cursor = page["next_cursor"]
    assert pages == [each["session_id"] for each in sessions]


def test_an_answer_for_a_session_that_was_deleted_meanwhile_is_refused(gated: RunningGateway) -> None:
    session = gated.session()
    call = Call(gated, session)
    asked(gated, 1)
    assert delete(gated, session).status_code == 200
    let_on(gated)
    status, body = call.answer()
    assert (status, json.loads(body)["error"]["type"]) == (410, "gone_error")
    assert only_deletions(gated.redis)


def test_a_stream_for_a_session_that_was_deleted_meanwhile_ends_in_an_error(
    gated: RunningGateway, retry_counts: Any
) -> None:
    session = gated.session()
    first = Call(gated, session, stream=True)
    asked(gated, 1)
    retry = Call(gated, session, attempt=1, stream=True)
    wait_until(lambda: retry_counts.joined == 1)
    assert delete(gated, session).status_code == 200
    let_on(gated)
    for status, body in (first.answer(), retry.answer()):
        assert status == 200
        assert b"gone_error" in body
        assert b"[DONE]" not in body
    assert only_deletions(gated.redis)


def test_a_client_that_left_a_deleted_session_leaves_nothing_behind(
    gated: RunningGateway, retry_counts: Any
) -> None:
    session = gated.session()
    call = Call(gated, session)
    asked(gated, 1)
    assert delete(gated, session).status_code == 200
    call.hang_up()
    wait_until(lambda: retry_counts.left == 1)
    wait_until(lambda: gated.engine.aborted)
    assert only_deletions(gated.redis)


def test_a_deleted_conversation_is_no_beginning_for_another_gateway(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    """Neither the other gateway's memory nor the index in Redis finds the deleted conversation."""
    history = [{"role": "user", "content": "hi"}]
    answer = other.post("/v1/chat/completions", {"messages": history})
    name = answer.headers["x-weir-session-id"]
    history.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    history.append({"role": "user", "content": "more"})
    second = other.post("/v1/chat/completions", {"messages": history})
    assert second.headers["x-weir-session-id"] == name
    assert gateway.call("DELETE", f"/sessions/{name}").json()["deleted"] == {"turns": 2, "rewards": 0}
    third = other.post("/v1/chat/completions", {"messages": history})
    assert third.status_code == 200
    assert third.headers["x-weir-session-id"] != name
    (turn,) = other.turns({"session_id": third.headers["x-weir-session-id"]})
    assert turn["relation"] == "root"
    retry = other.post(
        "/v1/chat/completions", {"messages": history[:1]}, headers={"x-stainless-retry-count": "1"}
    )
    assert retry.headers["x-weir-session-id"] != name
    assert is_gone(other.chat(path=f"/sessions/{name}/v1/chat/completions"))
    assert is_gone(other.get(f"/sessions/{name}"))


def test_a_deleted_response_is_continued_at_no_gateway(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    first = other.post("/v1/responses", {"input": "hi"})
    name, response = first.headers["x-weir-session-id"], first.json()
    asked_for = {"input": "more", "previous_response_id": response["id"]}
    referred = {"input": [{"type": "item_reference", "id": response["output"][-1]["id"]}]}
    assert other.post("/v1/responses", asked_for).headers["x-weir-session-id"] == name
    assert other.post("/v1/responses", referred).status_code == 200
    assert gateway.call("DELETE", f"/sessions/{name}").status_code == 200
    for each in (gateway, other):
        reply = each.post("/v1/responses", asked_for)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert each.post("/v1/responses", referred).status_code == 400
        assert each.get(f"/v1/responses/{response['id']}").status_code == 404


def test_a_response_leaves_no_words_in_a_session_that_was_deleted_as_they_came(
    gateway: RunningGateway, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = ResponseStore.keep

    async def too_late(store: ResponseStore, *given: Any) -> None:
        session_id = given[2].head.spec.session_id
        async with async_redis_at(backends.redis_url) as redis:
            assert await StreamDeleter(redis).delete_session(session_id) is not None
        await keep(store, *given)

    monkeypatch.setattr(ResponseStore, "keep", too_late)
    for stream in (False, True):
        reply = gateway.post("/v1/responses", {"input": MARK, "stream": stream})
        assert reply.status_code == (200 if stream else 410), reply.text
        assert "gone_error" in reply.text
        assert "response.completed" not in reply.text
        assert holding(gateway.redis, MARK.encode()) == []


def test_all_of_a_user_is_deleted_and_no_later_call_may_name_it(gateway: RunningGateway) -> None:
    opened = gateway.session(user="ann")
    gateway.chat(path=f"{path_of(opened)}/v1/chat/completions")
    gateway.post(f"{path_of(opened)}/reward", {"value": 1.0})
    gateway.post("/groups", {"size": 2, "user": "ann"})
    messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    calls: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**messages, "user": "ann"},
        "/v1/completions": {"prompt": "hi", "user": "ann"},
        "/v1/responses": {"input": "hi", "user": "ann"},
        "/v1/messages": {**messages, "metadata": {"user_id": "ann"}},
    }
    for path, body in calls.items():
        assert gateway.post(path, body).status_code == 200, path
    bobs = gateway.session(user="bob")
    asked_before = len(gateway.engine.requests)
    assert delete_user(gateway, "ann", CLIENT_KEY).status_code == 403
    reply = delete_user(gateway, "ann")
    assert reply.status_code == 200
    counts = {"sessions": 7, "turns": 5, "rewards": 1, "client_sessions": 0}
    assert reply.json() == {"user": "ann", "deleted": counts}
    nothing = {"user": "ann", "deleted": dict.fromkeys(counts, 0)}
    assert delete_user(gateway, "ann").json() == nothing
    for path, body in calls.items():
        assert is_gone(gateway.post(path, body)), path
        assert is_gone(gateway.post(path, {**body, "stream": True})), path
        assert is_gone(gateway.post(path_of(bobs) + path, body, key=bobs["api_key"])), path
    assert is_gone(gateway.post("/sessions", {"user": "ann"}))
    assert is_gone(gateway.post("/groups", {"size": 2, "user": "ann"}))
    assert len(gateway.engine.requests) == asked_before
    others = gateway.get("/sessions?verdict=open").json()["data"]
    assert [each["session_id"] for each in others] == [bobs["session_id"]]
    assert gateway.chat(user="bob").status_code == 200
    assert holding(gateway.redis, b"ann") == []
    assert gateway.get("/admin/status", key=ADMIN_KEY).json()["queue"]["verdicts"] == {"session:deleted": 7}


def test_a_call_that_named_a_user_while_it_was_deleted_is_refused(gated: RunningGateway) -> None:
    session = gated.session()
    call = Call(gated, session, user="ann")
    asked(gated, 1)
    assert delete_user(gated, "ann").json()["deleted"]["sessions"] == 0
    let_on(gated)
    assert call.answer()[0] == 410
    assert gated.turns(session) == []


def test_what_is_no_user_name_is_no_user(gateway: RunningGateway) -> None:
    stamp = f"user_ann_account__session_{'0' * 8}-0000-4000-8000-{'0' * 12}"
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    users: list[Any] = [stamp, json.dumps({"user": "ann"}), ["ann"], None]
    for name in users:
        metadata = {"user_id": name} if name else {}
        assert gateway.post("/v1/messages", body | {"metadata": metadata}).status_code == 200, metadata
        assert not gateway.redis.keys(key_names.user_sessions("*")), metadata
        if isinstance(name, str):
            delete_user(gateway, name)
            assert gateway.post("/v1/messages", body | {"metadata": metadata}).status_code == 200, metadata
    assert delete_user(gateway, "a%20b").status_code == 400
    assert delete_user(gateway, "nobody").json()["deleted"]["sessions"] == 0
    assert gateway.chat(user="no id / at all").status_code == 200


def test_no_byte_of_a_deleted_session_is_left_in_redis(gateway: RunningGateway) -> None:
    said = {"metadata": {MARK: [MARK]}, "lineage": MARK, "user": f"user-{MARK}", "task_id": MARK}
    session = gateway.session(**said)
    path = path_of(session)
    gateway.engine.script.extend([f"{MARK} {number}" for number in range(4)])
    said_in = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 50}
    for where in ("/v1/chat/completions", "/v1/messages"):
        assert gateway.post(path + where, said_in).status_code == 200
    first = gateway.post(f"{path}/v1/responses", {"input": MARK}).json()
    continued = {"input": MARK, "previous_response_id": first["id"]}
    assert gateway.post(f"{path}/v1/responses", continued).status_code == 200
    for turn_id in (None, first["id"]):
        gateway.post(f"{path}/reward", {"value": 1.0, "source": MARK, "turn_id": turn_id})
    unread = b"\x09" + encode(Reward(session_id=session["session_id"], value=1, key=MARK, created_at=1.0))[1:]
    gateway.redis.xadd(key_names.DEAD_LETTERS, {key_names.STREAM_FIELD: unread, "error": MARK})
    gateway.post(f"{path}/finish", {"status": "failed", "reason": MARK})
    turns = gateway.turns(session)
    assert len(turns) == 4
    marks = [MARK.encode(), *(turn["turn_id"].encode() for turn in turns)]
    for turn in turns:
        marks += [TokenIds(turn[name]).tobytes() for name in ("context_ids", "output_ids")]
    assert all(holding(gateway.redis, mark) for mark in marks)
    assert delete(gateway, session).json()["deleted"] == {"turns": 4, "rewards": 2}
    assert [holding(gateway.redis, mark) for mark in marks] == [[]] * len(marks)
    told = {key_names.SESSIONS, key_names.DELETED, key_names.STREAM}
    assert set(holding(gateway.redis, session["session_id"].encode())) == told
    assert only_deletions(gateway.redis)


def test_no_word_of_a_deleted_session_stays_in_a_gateways_memory(
    backends: Backends, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's caches of openings, tools and token ids drop their entries by themselves."""
    monkeypatch.setattr("gateway.periodic_tasks.TEXT_CACHES_S", 0.05)
    word = "wryneck"  # no other test sends this word to gateways in this process
    with backends.gateway() as forgetful:
        wait_until(lambda: forgetful.get("/ready").status_code == 200)
        session = forgetful.session()
        tool = {"type": "function", "function": {"name": "look", "description": f"Looks for a {word}."}}
        messages = [{"role": role, "content": f"The {role} sees a {word}."} for role in ("system", "user")]
        for _ in range(2):
            body = {"messages": messages, "tools": [tool]}
            reply = forgetful.post(f"{path_of(session)}/v1/chat/completions", body)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"{word}?"}]
        assert delete(forgetful, session).status_code == 200
        wait_until(lambda: not remembered(word))


def remembered(mark: str) -> list[str]:
    """Every text that contains the mark, in the caches and objects of the gateways in this process."""
    ours = ("gateway.", "rollout_queue.")
    kinds = (dict, list, tuple, set, deque, OrderedDict)
    gc.collect()
    objects = gc.get_objects()
    holding = {each for each in set(map(type, objects)) if str(each.__module__).startswith(ours)} | {CACHE}
    holders = [each for each in objects if type(each) in holding]
    seen, found = set(map(id, holders)), []
    while holders:
        for each in gc.get_referents(holders.pop()):
            if type(each) in (str, bytes) and mark in (each if type(each) is str else repr(each)):
                found.append(str(each))
            elif type(each) in kinds and id(each) not in seen:
                seen.add(id(each))
                holders.append(each)
    return found
