"""What only a process shows: it writes its log, hears SIGHUP, leaves on SIGTERM, and may be killed."""

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.http.http_server import ENDED_WITHIN_S
from rollout_queue.redis import key_names
from tests.support.gateway.background import read, start
from tests.support.gateway.calls import RETRY, Call
from tests.support.gateway.conversation import answered, path_of, say, stored, trainable
from tests.support.gateway.deletion import delete, holding, is_gone
from tests.support.gateway.gated_engine import GatedEngine, asked, let_on
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.gateway.streams import text_of
from tests.support.redis_process import RedisProcess
from tests.support.waiting import wait_until

ENDS_WITHIN_S = 120.0
LEAVE_S = 10
"""The test calls the gateway in this time, in which the machine may pause."""
FIRST, SECOND = "first-secret-of-32-characters-00", "second-secret-of-32-characters-0"
KEYS = "keys: [{{name: team-a, secrets: [{0}]}}]"
MARK = "zebrafinch"


@pytest.fixture
def engine(processes: Processes) -> Iterator[GatedEngine]:
    """An engine that stops after three tokens of each answer."""
    engine = GatedEngine(processes.backends.tokenizer, stall_after=3, mind=[5] * 100)
    processes.backends.engine = engine
    yield engine
    engine.open = True


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(KEYS.format(FIRST))
    return file


@pytest.fixture(scope="module")
def shared(processes: Processes, keys_file: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A gateway for the tests below. The last of them ends it."""
    processes.backends.clear(None)
    settings = {"leave_s": LEAVE_S, "keys_file": keys_file, "log_format": "json", "access_log": True}
    with processes.gateway(**settings) as (process, gateway):
        yield process, gateway.url


@pytest.fixture
def gateway(
    processes: Processes, engine: GatedEngine, shared: tuple[subprocess.Popen[bytes], str]
) -> Iterator[RunningGateway]:
    with httpx.Client(timeout=120) as http:
        yield RunningGateway(shared[1], engine, processes.backends.redis, http)


@pytest.fixture
def survivor(processes: Processes) -> Iterator[RunningGateway]:
    """Another gateway on the same Redis, in this process."""
    with processes.backends.gateway() as survivor:
        wait_until(lambda: survivor.get("/ready").status_code == 200)
        yield survivor


def test_its_log_on_standard_error_has_a_line_for_each_call(
    processes: Processes, gateway: RunningGateway
) -> None:
    let_on(gateway)
    reply = gateway.chat(headers={"x-request-id": "my-request"})
    log = processes.logs / "gateway-0.log"

    def lines() -> list[dict[str, Any]]:
        written = [
            json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        return [each for each in written if each.get("request_id") == "my-request"]

    wait_until(lines)
    (line,) = lines()
    assert (line["logger"], line["status"]) == ("weir.access", 200)
    assert line["turn_id"] == reply.headers["x-weir-turn-id"]


def test_sighup_has_it_read_its_keys_again(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway, keys_file: Path
) -> None:
    assert gateway.get("/sessions", key=FIRST).status_code == 200
    keys_file.write_text(KEYS.format(SECOND))
    shared[0].send_signal(signal.SIGHUP)
    wait_until(lambda: gateway.get("/sessions", key=SECOND).status_code == 200)
    assert gateway.get("/sessions", key=FIRST).status_code == 401


def refuses(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)).close()
    except ConnectionRefusedError:
        return True
    return False


def events_of_the_page(gateway: RunningGateway, seen: list[str]) -> None:
    """Reads the names of the events that a viewer of the page gets, until the stream ends."""
    bearer = {"authorization": f"Bearer {ADMIN_KEY}"}
    with httpx.stream("GET", f"{gateway.url}/page/events", headers=bearer, timeout=300) as reply:
        seen.extend(line for line in reply.iter_lines() if line.startswith("event: "))


def test_sigterm_is_told_to_load_balancers_first_and_then_all_calls_end(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway, survivor: RunningGateway
) -> None:
    process, _ = shared
    session, seen = gateway.session(), list[str]()
    calls = [Call(gateway, session, stream=number % 2 == 1) for number in range(8)]
    asked(gateway, 8)
    viewer = threading.Thread(target=events_of_the_page, args=(gateway, seen))
    viewer.start()
    wait_until(lambda: seen)
    process.terminate()
    wait_until(lambda: gateway.get("/ready").status_code == 503)
    assert "leaves" in gateway.get("/ready").json()["error"]["message"]
    assert gateway.get("/live").status_code == 200
    reply = gateway.chat(max_tokens=1)
    assert (reply.status_code, reply.headers["connection"]) == (200, "close")
    wait_until(lambda: refuses(gateway.url))
    assert survivor.turns(session) == []
    let_on(gateway)
    heard = [call.answer() for call in calls]
    viewer.join()
    assert process.wait(ENDS_WITHIN_S) == 0
    assert seen[-1] == "event: end"
    assert [status for status, _ in heard] == [200] * 8
    assert all(json.loads(body)["choices"][0]["finish_reason"] == "stop" for _, body in heard[::2])
    assert all(b"data: [DONE]" in body for _, body in heard[1::2])
    assert [turn["finish_reason"] for turn in survivor.turns(session)] == ["stop"] * 8
    assert len(trainable(survivor, session)) == 8


# Answers that it does not finish

LAST = {
    "/v1/chat/completions": 'data: {"error":',
    "/v1/messages": "event: error",
    "/v1/responses": "event: error",
}
"""How the last event of a stream begins that ends with an error."""
DRAIN_S = 1


class Reading:
    """One call in a thread: its status, and what arrived until its end."""

    def __init__(self, gateway: RunningGateway, path: str, attempt: int = 0, *, stream: bool) -> None:
        self.status = 0
        self.lines: list[str] = []
        self.failure: Exception | None = None
        said = [{"role": "user", "content": "hi"}]
        body = {"input": said} if path == "/v1/responses" else {"max_tokens": 90, "messages": said}
        headers = {"authorization": f"Bearer {CLIENT_KEY}"} | ({RETRY: str(attempt)} if attempt else {})
        given = {"json": body | {"model": "policy", "stream": stream}, "headers": headers}
        self._thread = threading.Thread(target=self._read, args=(gateway.url + path, given), daemon=True)
        self._thread.start()

    def _read(self, url: str, given: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url, timeout=300, **given) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.failure = error

    def end(self) -> "Reading":
        self._thread.join(ENDS_WITHIN_S)
        assert not self._thread.is_alive()
        assert self.failure is None
        return self


def newest_log(processes: Processes) -> str:
    return max(processes.logs.iterdir(), key=lambda each: each.stat().st_ctime).read_text()


@pytest.mark.parametrize("stands_still_s", [0, DRAIN_S + ENDED_WITHIN_S + 1], ids=["runs", "stands still"])
def test_answers_beyond_the_drain_end_with_an_error(
    processes: Processes, engine: GatedEngine, survivor: RunningGateway, stands_still_s: float
) -> None:
    redis = processes.backends.redis
    with processes.gateway(drain_timeout_s=DRAIN_S) as (process, gateway):
        before = redis.xlen(key_names.STREAM)
        told = start(gateway, max_output_tokens=90)
        streams, retries, whole = list[Reading](), list[Reading](), list[Reading]()
        for path in LAST:
            streams.append(Reading(gateway, path, stream=True))
            wait_until(lambda: streams[-1].lines)
            retries.append(Reading(gateway, path, 1, stream=True))
            wait_until(lambda: retries[-1].lines)
            whole.append(Reading(gateway, path, stream=False))
        wait_until(lambda: len(engine.requests) == 2 * len(LAST) + 1)
        process.terminate()
        if stands_still_s:
            wait_until(lambda: "for connections to close" in newest_log(processes))
            process.send_signal(signal.SIGSTOP)
            time.sleep(stands_still_s)  # nothing happens in a stopped process
            redis.client_pause(1000)  # Redis stood still, too, and is a little late
            process.send_signal(signal.SIGCONT)
        for stream, retry, last in zip(streams, retries, LAST.values(), strict=True):
            for each in (stream.end(), retry.end()):
                assert each.status == 200
                assert any(line.startswith(last) for line in each.lines), each.lines
                assert "data: [DONE]" not in each.lines
            assert text_of(stream.lines) == text_of(retry.lines)
        for each in whole:
            assert each.end().status == 503
            error = json.loads("".join(each.lines))["error"]
            assert error["type"] == "engine_unavailable"
            assert "stop" in error["message"]
        assert process.wait(ENDS_WITHIN_S) == 0
    assert redis.xlen(key_names.STREAM) == before + 2 * len(LAST) + 1
    found = read(survivor, told)
    assert (found["status"], "stopped" in found["error"]["message"]) == ("failed", True)
    (turn,) = survivor.turns(told)
    assert turn["finish_reason"] == "abort"


# A gateway that is killed


def test_a_gateway_killed_in_mid_stream_leaves_no_half_turn(
    processes: Processes, engine: GatedEngine, survivor: RunningGateway
) -> None:
    """Its answers in the background are told as failed when it has given no sign of life for a while."""
    history = [{"role": "user", "content": "begin"}]
    engine.script.extend(["first", "answer" + ", and so it goes on" * 20, "background" * 20, "second"])
    with processes.gateway() as (process, gateway):
        session = gateway.session()
        engine.stall_after = None
        history = answered(history, say(gateway, session, history))
        engine.stall_after = 3
        body = {"messages": history, "stream": True}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        heard = b""
        given: dict[str, Any] = {"json": body, "headers": headers, "timeout": 300}
        with httpx.stream("POST", gateway.url + path_of(session), **given) as stream:
            assert stream.status_code == 200
            pieces = stream.iter_bytes()
            while b'"content":"an' not in heard:
                heard += next(pieces)
            told = start(gateway)
            wait_until(lambda: len(engine.requests) == 3)
            process.kill()
            with pytest.raises(httpx.TransportError):
                heard += b"".join(pieces)
        assert process.wait(ENDS_WITHIN_S) == -signal.SIGKILL
    assert b"[DONE]" not in heard
    assert len(survivor.turns(session)) == 1
    engine.open, engine.stall_after = True, None
    retry = {RETRY: "1"}
    again = survivor.post(path_of(session), {"messages": history}, key=session["api_key"], headers=retry)
    assert again.status_code == 200
    say(survivor, session, answered(history, again))
    turns = survivor.turns(session)
    assert [(turn["relation"], turn["finish_reason"]) for turn in turns] == [
        ("root", "stop"),
        ("extends", "stop"),
        ("extends", "stop"),
    ]
    assert sorted(each.turn_id for each in stored(survivor, session)) == sorted(
        each["turn_id"] for each in turns
    )
    assert read(survivor, told)["status"] == "in_progress"
    record, redis = key_names.response(told["id"]), processes.backends.redis
    left_ms: Any = redis.pttl(record)
    redis.pexpire(record, left_ms - 31_000)  # as if half a minute had passed in which nobody renewed it
    assert read(survivor, told)["status"] == "failed"
    assert "stopped" in read(survivor, told)["error"]["message"]


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_turn_that_a_gateway_told_as_failed_before_it_ended_is_not_trained(
    processes: Processes, tmp_path: Path, ending: signal.Signals
) -> None:
    """A replica stands still. Another gateway ends the session."""
    master, replica = RedisProcess(tmp_path / "master").start(), RedisProcess(tmp_path / "replica")
    replica.start(replicaof=f"127.0.0.1 {master.port}")
    wait_until(lambda: master.client.set("any", "value") and master.client.wait(1, 100))
    here = processes.backends
    backends = Backends(master.url, here.model_path, here.tokenizer, master.client, here.engine)
    backends.engine_url = here.engine_url
    try:
        waits = {"redis_wait_replicas": 1, "redis_wait_timeout_s": 1.0}
        with Processes(backends, tmp_path).gateway(**waits) as (process, gateway):

            def stored() -> dict[str, Any] | None:
                """A session with a turn that the replica has confirmed; it may be late."""
                opened = gateway.session()
                return opened if gateway.chat("stored", session=opened).status_code == 200 else None

            session = wait_until(stored) or {}
            replica.process.send_signal(signal.SIGSTOP)
            failed = gateway.chat("not confirmed", session=session)
            assert (failed.status_code, failed.json()["error"]["type"]) == (503, "storage_unavailable")
            process.send_signal(ending)
            process.wait(ENDS_WITHIN_S)
        with backends.ready_gateway() as heir:
            heir.finish(session, reward=1.0)
            codes = [turn["verdict"]["code"] for turn in heir.turns(session)]
            assert sorted(codes) == ["aborted", "orphan_retry", "ready"]
    finally:
        replica.process.send_signal(signal.SIGCONT)
        replica.close()
        master.close()


@pytest.mark.long
def test_a_deletion_that_died_with_its_gateway_is_finished_by_another(processes: Processes) -> None:
    redis = processes.backends.redis
    redis.flushdb()
    with processes.gateway() as (process, gateway):
        session = gateway.session()
        assert gateway.chat(MARK, path=path_of(session)).status_code == 200
        (turn,) = gateway.turns(session)
        ids = TokenIds(turn["context_ids"]).tobytes()
        with redis.pipeline(transaction=False) as pipeline:
            for _ in range(200_000):  # reading these entries keeps the deletion busy until the kill
                pipeline.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b"\x01"})
            pipeline.execute()
        assert gateway.chat(MARK, path=path_of(session)).status_code == 200
        head = key_names.session(session["session_id"])
        fields: list[Any] = redis.hkeys(head)
        # An older build has no ids of entries: then all entries are read.
        redis.hdel(head, *(name for name in fields if name.startswith(b"e:")))
        with ThreadPoolExecutor() as pool:
            deleting = pool.submit(delete, gateway, session)
            wait_until(lambda: redis.hexists(key_names.DELETED, session["session_id"]))
            process.send_signal(signal.SIGKILL)
            assert isinstance(deleting.exception(), httpx.TransportError)
        assert redis.hexists(key_names.DELETED, session["session_id"])
        assert holding(redis, ids) == [key_names.STREAM]
    redis.zadd(key_names.DELETING, {session["session_id"]: 0.0})  # as if it had begun long ago
    with processes.backends.gateway() as heir:
        assert is_gone(heir.get(f"/sessions/{session['session_id']}"))
        wait_until(lambda: not redis.exists(key_names.DELETING), 30)
    assert holding(redis, ids) == []
    redis.flushdb()


@pytest.mark.long
def test_a_gateway_that_stood_still_for_12_s_tells_nobody_that_redis_failed(
    processes: Processes, engine: GatedEngine
) -> None:
    """12 s are more than any answer of Redis may take. Calls and other requests are at every stage."""
    with processes.gateway() as (process, gateway), ThreadPoolExecutor(64) as pool:
        calls = [pool.submit(gateway.chat, f"call {number}") for number in range(20)]
        wait_until(lambda: len(engine.requests) == len(calls))
        engine.open = True
        more = [pool.submit(gateway.chat, f"later call {number}") for number in range(20)]
        more += [pool.submit(gateway.post, "/sessions") for _ in range(20)]
        wait_until(lambda: any(each.done() for each in [*calls, *more]))
        process.send_signal(signal.SIGSTOP)
        time.sleep(12.0)  # nothing happens in a stopped process
        process.send_signal(signal.SIGCONT)
        assert {each.result().status_code for each in [*calls, *more]} == {200, 201}
