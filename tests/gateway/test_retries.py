"""A marked retry joins the call in flight, or replaces its turn; unmarked ones that are alike do neither."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from gateway.edge.retries import InFlightCall, InFlightCalls
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Turn
from rollout_queue.redis.writer import RedisWriter
from tests.gateway.conftest import CLIENT_KEY, Door, Stage, wait_until
from tests.support.gateway.fake_engine import FakeEngine
from weir.audit.audit import audit
from weir.audit.sources import Sources

ANSWER = [5] * 100
"""More tokens than one event brings to a client that does not stream."""
RETRY = "x-stainless-retry-count"


class GatedEngine(FakeEngine):
    """Stops where it stalls until it is let on."""

    open = False

    async def _stall(self) -> None:
        self.stalled = True
        while not self.open:  # noqa: ASYNC110 - the test that opens it runs in another thread
            await asyncio.sleep(0.005)


class Comings:
    """How often a retry joined, and how often a client left."""

    joined = left = 0


@pytest.fixture
def comings(monkeypatch: pytest.MonkeyPatch) -> Comings:
    seen, join, leave = Comings(), InFlightCalls.join, InFlightCall._leave

    def joined(calls: InFlightCalls, key: Hashable, attempt: int) -> InFlightCall | None:
        call = join(calls, key, attempt)
        seen.joined += call is not None
        return call

    def left(call: InFlightCall) -> None:
        leave(call)
        seen.left += 1

    monkeypatch.setattr(InFlightCalls, "join", joined)
    monkeypatch.setattr(InFlightCall, "_leave", left)
    return seen


@pytest.fixture
def gated(door: Door, stage: Stage) -> Door:
    """A door whose engine stops after three tokens of its answer."""
    stage.engine = door.engine = GatedEngine(stage.tokenizer, stall_after=3)
    door.engine.script.extend(list(ANSWER) for _ in range(20))
    return door


def let_on(door: Door) -> None:
    assert isinstance(door.engine, GatedEngine)
    door.engine.open = True


def asked(door: Door, times: int) -> None:
    """The engine was asked so often, and is in the middle of its answers."""
    wait_until(lambda: len(door.engine.requests) == times and door.engine.stalled)


class Call:
    """A call on the wire, whose answer is read when the test wants it."""

    def __init__(self, door: Door, session: dict[str, Any], attempt: int = 0, **body: Any) -> None:
        address = urlsplit(door.url)
        said = json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode()
        head = (
            f"POST /sessions/{session['session_id']}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            f"authorization: Bearer {CLIENT_KEY}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(said)}\r\n" + (f"{RETRY}: {attempt}\r\n" if attempt else "") + "\r\n"
        )
        self.line = socket.create_connection((address.hostname, address.port or 80))
        self.line.settimeout(10)
        self.line.sendall(head.encode() + said)

    def hang_up(self) -> None:
        self.line.close()

    def answer(self) -> tuple[int, bytes]:
        """The status, and the body as it was sent."""
        heard = b""
        while more := self.line.recv(65536):
            heard += more
        self.line.close()
        head, _, body = heard.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def completion(self) -> dict[str, Any]:
        status, body = self.answer()
        assert status == 200
        completion: dict[str, Any] = json.loads(body)
        return completion


def codes(door: Door, session: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(t["relation"], t["finish_reason"], t["verdict"]["code"]) for t in door.turns(session)]


def chat(door: Door, session: dict[str, Any], attempt: int = 0) -> Any:
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    return door.chat(path=path, headers={RETRY: str(attempt)})


# Joining


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_call_in_flight(gated: Door, comings: Comings, stream: bool) -> None:
    session = gated.session()
    first = Call(gated, session, stream=stream)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=stream)
    wait_until(lambda: comings.joined)
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert heard[0] == 200
    assert heard == heard_again
    assert len(gated.engine.requests) == 1
    (turn,) = gated.turns(session)
    assert (turn["output_ids"][:100], turn["verdict"]["code"]) == (ANSWER, "open")


def test_a_retry_hears_a_stream_from_its_beginning_and_then_live(gated: Door) -> None:
    session = gated.session()
    first = Call(gated, session, stream=True)
    begun = first.line.recv(65536)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=True)
    begun_again = b""
    while b"content" not in begun_again.partition(b"\r\n\r\n")[2]:
        begun_again += again.line.recv(65536)  # it hears the first tokens while the engine still waits
    assert begun.startswith(b"HTTP/1.1 200")
    let_on(gated)
    rest = b""
    while more := again.line.recv(65536):
        rest += more
    assert rest.rstrip().endswith(b"0")
    assert (begun_again + rest).count(b"[DONE]") == 1
    first.hang_up()


def test_a_retry_has_its_own_request_id_and_the_turn_of_the_first(gated: Door, comings: Comings) -> None:
    session = gated.session()
    path = f"{gated.url}/sessions/{session['session_id']}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=10) as http:
        calls = []
        for attempt in (0, 1):
            headers = {
                "authorization": f"Bearer {CLIENT_KEY}",
                RETRY: str(attempt),
                "x-request-id": f"r{attempt}",
            }
            calls.append(pool.submit(http.post, path, json=body, headers=headers))
            asked(gated, 1)
        wait_until(lambda: comings.joined)
        let_on(gated)
        first, again = (call.result() for call in calls)
    assert (first.headers["x-request-id"], again.headers["x-request-id"]) == ("r0", "r1")
    assert first.headers["x-weir-turn-id"] == again.headers["x-weir-turn-id"]
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_times_out_gets_the_answer_of_its_first_call(
    gated: Door, comings: Comings, stream: bool
) -> None:
    session = gated.session()
    seen: list[str] = []

    def note(request: Any) -> None:
        seen.append(request.headers[RETRY])

    http = openai.DefaultHttpxClient(event_hooks={"request": [note]})
    client = openai.OpenAI(
        base_url=session["base_url"],
        api_key=session["api_key"],
        timeout=1.0,
        max_retries=2,
        http_client=http,
    )

    def call() -> str:
        messages: Any = [{"role": "user", "content": "hi"}]
        if not stream:
            return client.chat.completions.create(model="policy", messages=messages).id
        with client.chat.completions.create(model="policy", messages=messages, stream=True) as chunks:
            return {chunk.id for chunk in chunks}.pop()

    if stream:
        gated.engine.stall_after = 0  # a stream that has begun is not retried by the client
    with ThreadPoolExecutor() as pool:
        completion = pool.submit(call)
        wait_until(lambda: comings.joined)
        let_on(gated)
        completion_id = completion.result()
    client.close()
    assert seen == ["0", "1"]
    assert len(gated.engine.requests) == 1
    assert gated.engine.aborted == []
    (turn,) = gated.turns(session)
    assert (turn["completion_id"], turn["verdict"]["code"]) == (completion_id, "open")


def test_an_answer_that_was_finished_for_nobody_waits_for_the_retry(gated: Door, comings: Comings) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    wait_until(lambda: comings.left)
    let_on(gated)
    time.sleep(0.3)  # time enough to record it, if it were
    assert gated.turns(session) == []
    completion = Call(gated, session, attempt=1).completion()
    (turn,) = gated.turns(session)
    assert (turn["completion_id"], turn["finish_reason"]) == (completion["id"], "stop")
    assert len(gated.engine.requests) == 1


def test_retries_of_parallel_samples_join_one_each(gated: Door, comings: Comings) -> None:
    session = gated.session()
    firsts = [Call(gated, session) for _ in range(3)]
    asked(gated, 3)
    retries = [Call(gated, session, attempt=1) for _ in firsts]
    wait_until(lambda: comings.joined == 3)
    let_on(gated)
    heard = {call.completion()["id"] for call in firsts}
    assert len(heard) == 3
    assert {call.completion()["id"] for call in retries} == heard
    assert len(gated.engine.requests) == 3


def test_a_retry_rather_joins_the_call_whose_client_left(gated: Door, comings: Comings) -> None:
    session = gated.session()
    stays = Call(gated, session)
    asked(gated, 1)
    leaves = Call(gated, session)
    asked(gated, 2)
    leaves.hang_up()
    wait_until(lambda: comings.left)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: comings.joined)
    let_on(gated)
    assert stays.completion()["id"] != again.completion()["id"]
    assert {(finish, code) for _, finish, code in codes(gated, session)} == {("stop", "open")}


def test_a_retry_hears_of_the_failure_of_the_first(gated: Door, comings: Comings) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: comings.joined)
    assert gated.post(f"/sessions/{session['session_id']}/finish", {"status": "completed"}).status_code == 200
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert (heard[0], json.loads(heard[1])["error"]["code"]) == (409, "session_finished")
    assert heard == heard_again
    assert gated.turns(session) == []


# Samples


def test_identical_calls_that_nobody_marked_are_samples_of_their_own(gated: Door) -> None:
    session = gated.session()
    calls = [Call(gated, session) for _ in range(3)]
    asked(gated, 3)
    let_on(gated)
    assert len({call.completion()["id"] for call in calls}) == 3
    assert {code for _, _, code in codes(gated, session)} == {"open"}
    assert len(gated.turns(session)) == 3


def test_identical_calls_share_an_answer_where_that_is_configured(
    gated: Door, stage: Stage, comings: Comings
) -> None:
    with stage.door(join_identical=True) as door:
        wait_until(lambda: door.get("/ready").status_code == 200)
        session = door.session()
        first = Call(door, session)
        asked(gated, 1)
        calls = [first, Call(door, session), Call(door, session)]
        wait_until(lambda: comings.joined == 2)
        let_on(gated)
        assert len({call.completion()["id"] for call in calls}) == 1
        assert len(door.turns(session)) == 1


def test_another_call_is_not_joined_though_it_is_marked(gated: Door) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    other = Call(gated, session, attempt=1, seed=7)
    wait_until(lambda: len(gated.engine.requests) == 2)
    let_on(gated)
    assert first.completion()["id"] != other.completion()["id"]
    assert {code for _, _, code in codes(gated, session)} == {"open"}


# Orphans


def test_a_retry_after_the_answer_replaces_its_turn(door: Door) -> None:
    session = door.session()
    first, again = chat(door, session), chat(door, session, attempt=1)
    assert first.json()["id"] != again.json()["id"]
    assert codes(door, session) == [("root", "stop", "orphan_retry"), ("retry", "stop", "open")]
    assert chat(door, session, attempt=2).status_code == 200
    assert [code for _, _, code in codes(door, session)] == ["orphan_retry", "orphan_retry", "open"]


def test_a_turn_that_was_continued_is_no_orphan(door: Door) -> None:
    door.engine.script.extend([list(ANSWER), list(ANSWER)])
    session = door.session()
    answer = chat(door, session).json()["choices"][0]["message"]
    history = [
        {"role": "user", "content": "hi"},
        answer,
        {"role": "tool", "content": "m", "tool_call_id": "c"},
    ]
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert door.post(path, {"messages": history}).status_code == 200
    assert chat(door, session, attempt=1).status_code == 200
    first, child, again = door.turns(session)
    assert child["parent_id"] == first["turn_id"]
    assert again["relation"] == "retry"
    assert {turn["verdict"]["code"] for turn in (first, child, again)} == {"open"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_client_is_aborted_within_two_seconds(gated: Door, stream: bool) -> None:
    session = gated.session()
    first = Call(gated, session, stream=stream)
    asked(gated, 1)
    first.hang_up()
    left_at = time.monotonic()
    wait_until(lambda: gated.engine.aborted)
    assert time.monotonic() - left_at < 2
    wait_until(lambda: gated.turns(session))
    assert codes(gated, session) == [("root", "abort", "aborted")]


def test_an_answer_that_nobody_came_back_for_is_aborted(gated: Door, comings: Comings) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    wait_until(lambda: comings.left)
    let_on(gated)
    wait_until(lambda: gated.turns(session))
    (turn,) = gated.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert turn["output_ids"][:100] == ANSWER


def test_a_retry_that_leaves_too_ends_the_call(gated: Door, comings: Comings) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: comings.joined)
    first.hang_up()
    wait_until(lambda: comings.left)
    time.sleep(1.2)  # longer than the call would go on without a client
    assert gated.engine.aborted == []
    again.hang_up()
    wait_until(lambda: gated.turns(session))
    assert codes(gated, session) == [("root", "abort", "aborted")]


def test_a_retry_after_the_abort_replaces_the_aborted_turn(gated: Door) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    wait_until(lambda: gated.turns(session))
    let_on(gated)
    Call(gated, session, attempt=1).completion()
    assert codes(gated, session) == [("root", "abort", "orphan_retry"), ("retry", "stop", "open")]


def test_a_retry_of_a_call_that_was_never_recorded_is_an_ordinary_turn(door: Door) -> None:
    session = door.session()
    assert chat(door, session, attempt=1).status_code == 200
    assert codes(door, session) == [("root", "stop", "open")]


def test_every_choice_of_a_call_is_replaced(door: Door) -> None:
    session = door.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    for attempt in (0, 1):
        reply = door.chat(path=path, n=3, headers={RETRY: str(attempt)})
        assert reply.status_code == 200
    verdicts = [code for _, _, code in codes(door, session)]
    assert sorted(verdicts) == ["open"] * 3 + ["orphan_retry"] * 3
    assert {relation for relation, _, code in codes(door, session) if code == "open"} == {"retry"}


@pytest.mark.parametrize("retried", [False, True])
def test_choices_of_a_call_that_was_recorded_in_part_are_samples_or_replaced(
    door: Door, stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retried: bool
) -> None:
    """As a gateway leaves them that dies between two of them, or whose Redis is full then."""
    append, begun = RedisWriter.append_turn, count()
    recorded: list[Turn] = []

    async def two_of_three(writer: RedisWriter, turn: Turn, *more: Any) -> Turn:
        if next(begun) == 2:
            while len(recorded) < 2:  # noqa: ASYNC110 - what it waits for runs in the same loop
                await asyncio.sleep(0.005)
            raise StorageUnavailable("the end")
        recorded.append(await append(writer, turn, *more))
        return recorded[-1]

    monkeypatch.setattr(RedisWriter, "append_turn", two_of_three)
    session = door.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert door.chat(path=path, n=3).status_code == 503
    heard = {turn.turn_id for turn in recorded}
    if retried:
        reply = door.chat(path=path, n=3, headers={RETRY: "1"})
        heard = set(reply.headers["x-weir-turn-id"].split(","))
    door.post(f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": 1.0})
    turns = door.turns(session)
    assert {turn["turn_id"] for turn in turns if turn["verdict"]["code"] == "ready"} == heard
    orphans = [turn["turn_id"] for turn in turns if turn["verdict"]["code"] == "orphan_retry"]
    assert sorted(orphans) == sorted(turn.turn_id for turn in recorded[:2] if retried)
    report = audit(Sources(stage.redis_url, None, checkpoint_dir=tmp_path))
    assert report.ok, report.findings


def test_a_retry_that_names_no_session_finds_the_one_of_the_first(door: Door) -> None:
    first, other = door.chat("hi"), door.chat("hello")
    again = door.chat("hi", headers={RETRY: "1"})
    sessions = [reply.headers["x-weir-session-id"] for reply in (first, other, again)]
    assert sessions[0] == sessions[2] != sessions[1]
    assert codes(door, {"session_id": sessions[0]}) == [
        ("root", "stop", "orphan_retry"),
        ("retry", "stop", "open"),
    ]
    assert door.chat("hi").headers["x-weir-session-id"] not in sessions


def test_a_retry_that_names_no_session_joins_the_call_in_flight(gated: Door, comings: Comings) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gated.chat)
        asked(gated, 1)
        again = pool.submit(gated.chat, headers={RETRY: "1"})
        wait_until(lambda: comings.joined)
        let_on(gated)
        replies = first.result(), again.result()
    assert replies[0].json() == replies[1].json()


# Two gateways


@contextmanager
def another(door: Door, stage: Stage) -> Iterator[Door]:
    with stage.door() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        yield other


def test_a_retry_at_another_gateway_replaces_a_turn_that_is_recorded_first(gated: Door, stage: Stage) -> None:
    session = gated.session()
    with another(gated, stage) as other:
        first = Call(gated, session)
        asked(gated, 1)
        again = Call(other, session, attempt=1)
        asked(gated, 2)
        let_on(gated)
        assert first.completion()["id"] != again.completion()["id"]
        verdicts = {relation: code for relation, _, code in codes(gated, session)}
    assert verdicts == {"root": "orphan_retry", "retry": "open"}


def test_a_retry_at_another_gateway_replaces_a_turn_that_is_recorded_later(gated: Door, stage: Stage) -> None:
    session = gated.session()
    with another(gated, stage) as other:
        first = Call(gated, session)
        asked(gated, 1)
        gated.engine.stall_after = None
        again = Call(other, session, attempt=1).completion()
        assert codes(gated, session) == [("root", "stop", "open")]
        let_on(gated)
        assert first.completion()["id"] != again["id"]
        verdicts = [(t["completion_id"], t["relation"], t["verdict"]["code"]) for t in gated.turns(session)]
    assert verdicts[0] == (again["id"], "retry", "open")
    assert verdicts[1][1:] == ("root", "orphan_retry")


# Memory


def test_nothing_is_kept_of_a_call_that_is_over(gated: Door, comings: Comings) -> None:
    session = gated.session()
    first = Call(gated, session, stream=True)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=True)
    wait_until(lambda: comings.joined)
    let_on(gated)
    assert first.answer() == again.answer()

    def left() -> int:
        gc.collect()
        return sum(type(thing) is InFlightCall for thing in gc.get_objects())

    wait_until(lambda: left() == 0)
