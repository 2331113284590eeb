"""The export has everything that was recorded, as JSON lines or Parquet, from the start or a cursor."""

import io
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyarrow.parquet import ParquetFile

from rollout_queue.contract.codec import encode
from rollout_queue.contract.export_rows import Episode
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Reward, SessionSpec, Span, Turn
from rollout_queue.redis import key_names
from rollout_queue.redis.record_restore import restore
from rollout_queue.redis.session_heads import batches
from tests.support.gateway.exports import episode, export
from tests.support.gateway.running import ADMIN_KEY, Backends, RunningGateway


def parquet(gateway: RunningGateway, **asked: Any) -> list[dict[str, Any]]:
    reply = gateway.get("/admin/export", key=ADMIN_KEY, params={"format": "parquet", **asked})
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = ParquetFile(io.BytesIO(reply.content)).read().to_pylist()
    return rows


def fill(gateway: RunningGateway, sessions: int, turns: int, tokens: int) -> None:
    """Write sessions straight to Redis, without the engine, in any number."""
    for number in range(sessions):
        name = f"bulk-{number:06d}"
        given = {"session_id": name, "finish": "stop", "started_at": 100.0, "finished_at": 101.0}
        each = tuple(
            Turn(
                turn_id=f"{name}-{index}",
                context_ids=TokenIds([1]),
                output_ids=TokenIds([5] * tokens),
                logprobs=Logprobs([-0.5] * tokens),
                versions=(Span(0, 0, tokens),),
                **given,  # type: ignore[arg-type]
            )
            for index in range(turns)
        )
        restore(
            gateway.redis, Episode(spec=SessionSpec(session_id=name, created_at=100.0 + number), turns=each)
        )


def test_a_row_holds_a_turn_and_what_became_of_it(gateway: RunningGateway) -> None:
    session = episode(
        gateway, task_id="sums", user="ann", group_id="g", group_size=2, metadata={"a": [1, None]}
    )
    name = session["session_id"]
    gateway.post(f"/sessions/{name}/reward", {"value": 0.5, "key": "style"})
    gateway.post(f"/sessions/{name}/finish", {"status": "completed", "reward": 1.0})
    view = gateway.get(f"/sessions/{name}?tokens=true").json()
    rows = export(gateway)
    assert [row["turn_id"] for row in rows] == [turn["turn_id"] for turn in view["turns"]]
    for row, turn in zip(rows, view["turns"], strict=True):
        told = {"session_id": name, "group_id": "g", "task_id": "sums", "user": "ann", "schema": 1}
        assert {field: row[field] for field in told} == told
        same = set(turn) & set(row) - {"verdict", "versions"}
        assert {"context_ids", "output_ids", "logprobs", "created_at", "relation", "engine"} <= same
        assert {field: row[field] for field in same} == {field: turn[field] for field in same}
        assert row["rewards"] == view["rewards"]
        assert row["verdict"]["code"] == row["session"]["verdict"]["code"] == "group_incomplete"
        assert row["session"]["metadata"] == {"a": [1, None]}


def test_parquet_says_the_same_as_the_lines(gateway: RunningGateway) -> None:
    for name in ("one", "two"):
        session = episode(gateway, session_id=name, metadata={"a": [1, None]})
        gateway.post(f"/sessions/{session['session_id']}/reward", {"value": 0.5})
    lines, table = export(gateway), parquet(gateway)
    assert len(table) == 4
    for line, row in zip(lines, table, strict=True):
        assert row.pop("deleted_at") is None
        row["sampling"] = json.loads(row["sampling"])
        row["session"]["metadata"] = json.loads(row["session"]["metadata"])
        for span in row["versions"]:
            assert span.pop("engine") is None
        assert row == line


def test_a_row_says_for_whom_its_call_was_made_and_whose_its_session_is(gateway: RunningGateway) -> None:
    session = gateway.session(user="ann")
    for named in ({"user": "bob"}, {}):
        gateway.chat(session=session, **named)
    for rows in (export(gateway), parquet(gateway)):
        assert [(row["user"], row["turn_user"]) for row in rows] == [("ann", "bob"), ("ann", None)]


def test_the_window_takes_its_first_moment_and_not_its_last(gateway: RunningGateway) -> None:
    episode(gateway, turns=3)
    first, second, third = (row["created_at"] for row in export(gateway))
    assert [row["created_at"] for row in export(gateway, since=second, until=third)] == [second]
    assert [row["created_at"] for row in parquet(gateway, until=second)] == [first]
    assert export(gateway, since=third + 60) == []
    assert parquet(gateway, since=third + 60) == []


def test_an_export_goes_on_behind_any_row(gateway: RunningGateway) -> None:
    for name in ("b", "a", "c"):
        episode(gateway, session_id=name)
    whole = export(gateway)
    assert [row["session_id"] for row in whole] == ["b", "b", "a", "a", "c", "c"]
    for number, row in enumerate(whole, start=1):
        assert export(gateway, cursor=row["cursor"]) == whole[number:]
    taken: list[dict[str, Any]] = []
    while page := parquet(gateway, limit=4, **({"cursor": taken[-1]["cursor"]} if taken else {})):
        taken += page
    assert [row["cursor"] for row in taken] == [row["cursor"] for row in whole]


def test_a_cursor_holds_its_place_when_sessions_come_and_go_before_it(gateway: RunningGateway) -> None:
    for name in ("a", "b", "c"):
        episode(gateway, session_id=name)
    whole = export(gateway)
    restore(gateway.redis, Episode(spec=SessionSpec(session_id="early", created_at=1.0)))
    assert gateway.call("DELETE", "/sessions/a").status_code == 200
    assert export(gateway, cursor=whole[3]["cursor"]) == whole[4:]


def test_of_a_deleted_session_its_id_times_and_verdict_are_left(gateway: RunningGateway) -> None:
    episode(gateway, session_id="gone")
    episode(gateway, session_id="here", turns=1)
    cursor = export(gateway)[0]["cursor"]
    gateway.call("DELETE", "/sessions/gone")
    gone, here = export(gateway)
    assert set(gone) == {"schema", "cursor", "session_id", "created_at", "deleted_at", "verdict"}
    assert (gone["session_id"], gone["verdict"]["code"]) == ("gone", "deleted")
    assert here["session_id"] == "here"
    assert [row["session_id"] for row in export(gateway, cursor=cursor)] == ["gone", "here"]
    assert export(gateway, cursor=gone["cursor"]) == [here]
    row = parquet(gateway)[0]
    told = {name for name, value in row.items() if value not in (None, [])}
    assert told == {"schema", "cursor", "session_id", "created_at", "deleted_at", "verdict"}


def test_sessions_without_a_turn_come_when_they_are_asked_for(gateway: RunningGateway) -> None:
    session = gateway.session(group_id="g", group_size=2)
    gateway.post(f"/sessions/{session['session_id']}/finish", {"status": "failed", "reason": "no sandbox"})
    assert export(gateway) == []
    (row,) = export(gateway, empty=True)
    assert (row["turn_id"], row["output_ids"]) == (None, [])
    assert row["session"]["outcome"]["reason"] == "no sandbox"
    assert export(gateway, empty=True, cursor=row["cursor"]) == []


SENSELESS = (
    "format=csv",
    "since=yesterday",
    "until=nan",
    "since=2&until=1",
    "limit=0",
    "cursor=",
    "cursor=nobody/t",
    "cursor=there/no-such-turn",
    "format=verl&empty=true",
    "format=jsonl&partial_groups=true",
    "format=parquet&partial_groups=true",
    "format=TRL",
)


def test_what_makes_no_sense_is_a_400(gateway: RunningGateway) -> None:
    session = episode(gateway, session_id="there")
    gateway.finish(session, reward=1.0)
    for query in (*SENSELESS, f"format=trl&cursor={export(gateway)[0]['cursor']}"):
        reply = gateway.get(f"/admin/export?{query}", key=ADMIN_KEY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), query


def test_an_export_is_for_operators(gateway: RunningGateway) -> None:
    for key, status in ((None, 401), ("client-key", 403)):
        assert gateway.get("/admin/export", key=key).status_code == status


def test_a_redis_that_is_away_is_a_503_and_in_the_middle_the_last_line(backends: Backends) -> None:
    with backends.gateway() as gateway:
        fill(gateway, 300, 1, 4)
        gateway.redis.delete(key_names.session("bulk-000250"))
        gateway.redis.set(key_names.session("bulk-000250"), "a string, where a session should be")
        *rows, last = export(gateway)
        assert last["error"]["type"] == "storage_unavailable"
        assert 100 <= len(rows) <= 250
        assert [row["session_id"] for row in rows] == [f"bulk-{number:06d}" for number in range(len(rows))]
        gateway.redis.delete(key_names.session("bulk-000000"))
        gateway.redis.set(key_names.session("bulk-000000"), "a string")
        reply = gateway.get("/admin/export", key=ADMIN_KEY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "storage_unavailable")


def test_a_session_that_cannot_be_read_does_not_stop_the_others(gateway: RunningGateway) -> None:
    for name in ("a", "b", "c"):
        episode(gateway, session_id=name, turns=1)
    reward = Reward(session_id="b", key="k", value=1.0, created_at=1.0)
    gateway.redis.hset(key_names.session("b"), "t:broken", b"\x07" + encode(reward)[1:])
    assert [row["session_id"] for row in export(gateway)] == ["a", "c"]


# Slow clients, and clients that leave

PAGE, HELD = 10, 12
"""Sessions of a page, and the pages of which the buffers between Redis and the client hold fewer."""


@pytest.fixture
def much(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> RunningGateway:
    """A gateway with thirty pages to export, each of them of nearly a megabyte."""
    monkeypatch.setattr("gateway.rest.export.PAGE", PAGE)
    fill(gateway, 30 * PAGE, 5, 2000)
    return gateway


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sessions of each page that exports have read."""
    read = list[int]()

    def noted(sizes: list[tuple[str, int]], most: int) -> Any:
        read.append(len(sizes))
        return batches(sizes, most)

    monkeypatch.setattr("gateway.rest.export.batches", noted)
    return read


def dial(gateway: RunningGateway) -> socket.socket:
    address = urlsplit(gateway.url)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**19)
    line.connect((address.hostname, address.port))
    line.sendall(
        f"GET /admin/export HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\n\r\n".encode()
    )
    return line


def settled(pages: list[int]) -> int:
    """The number of pages read, once it has not changed for half a second."""
    before = -1
    while (now := len(pages)) != before:
        before = now
        time.sleep(0.5)  # no event shows that nothing is read, so the test has to wait
    return now


def test_nothing_is_read_that_a_slow_client_has_not_taken(much: RunningGateway, pages: list[int]) -> None:
    with dial(much) as line:
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        assert settled(pages) < HELD
        assert much.get("/live").status_code == 200
        while len(pages) <= HELD:
            line.recv(2**16)
    assert settled(pages) < 30, "a client that hangs up leaves nothing running"
