"""A marked retry joins the call in flight or replaces its turn. Identical calls without a mark do neither."""

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.edge.retries import InFlightCall
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Turn
from rollout_queue.redis.writer import RedisWriter
from tests.support.gateway.calls import RETRY, Call, codes
from tests.support.gateway.gated_engine import ANSWER, asked, let_on
from tests.support.gateway.retry_counts import RetryCounts
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, Backends, RunningGateway
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from weir.audit.audit import audit
from weir.audit.sources import Sources

GRACE_S = 1.0
"""How long a call continues without a client."""


def chat(gateway: RunningGateway, session: dict[str, Any], attempt: int = 0) -> Any:
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    return gateway.chat(path=path, headers={RETRY: str(attempt)})


def engine_is_idle(gateway: RunningGateway) -> bool:
    (server,) = gateway.get("/admin/rollout_servers", key=ADMIN_KEY).json()["data"]
    return bool(server["in_flight"] == 0)


def told(stream: bytes) -> list[Any]:
    """What a stream says, whatever tokens each of its events has."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return [text, {chunk["id"] for chunk in chunks}, chunks[-1]["choices"][0]["finish_reason"]]


# Joining


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_call_in_flight(
    gated: RunningGateway, retry_counts: RetryCounts, stream: bool
) -> None:
    session = gated.session()
    first = Call(gated, session, stream=stream)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=stream)
    wait_until(lambda: retry_counts.joined)
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert heard[0] == 200
    assert told(heard[1]) == told(heard_again[1]) if stream else heard == heard_again
    assert len(gated.engine.requests) == 1
    (turn,) = gated.turns(session)
    assert (turn["output_ids"][:100], turn["verdict"]["code"]) == (ANSWER, "open")


def test_a_retry_hears_a_stream_from_its_beginning_and_then_live(gated: RunningGateway) -> None:
    session = gated.session()
    first = Call(gated, session, stream=True)
    begun = first.line.recv(65536)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=True)
    begun_again = b""
    while b"content" not in begun_again.partition(b"\r\n\r\n")[2]:
        begun_again += again.line.recv(65536)  # the retry gets the first tokens while the engine still waits
    assert begun.startswith(b"HTTP/1.1 200")
    let_on(gated)
    rest = b""
    while more := again.line.recv(65536):
        rest += more
    assert rest.rstrip().endswith(b"0")
    assert (begun_again + rest).count(b"[DONE]") == 1
    first.hang_up()


def test_a_retry_has_its_own_request_id_and_the_turn_of_the_first(
    gated: RunningGateway, retry_counts: RetryCounts
) -> None:
    session = gated.session()
    path = f"{gated.url}/sessions/{session['session_id']}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=120) as http:
        calls = []
        for attempt in (0, 1):
            headers = {
                "authorization": f"Bearer {CLIENT_KEY}",
                RETRY: str(attempt),
                "x-request-id": f"r{attempt}",
            }
            calls.append(pool.submit(http.post, path, json=body, headers=headers))
            asked(gated, 1)
        wait_until(lambda: retry_counts.joined)
        let_on(gated)
        first, again = (call.result() for call in calls)
    assert (first.headers["x-request-id"], again.headers["x-request-id"]) == ("r0", "r1")
    assert first.headers["x-weir-turn-id"] == again.headers["x-weir-turn-id"]
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_times_out_gets_the_answer_of_its_first_call(
    gated: RunningGateway, retry_counts: RetryCounts, stream: bool
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
        wait_until(lambda: retry_counts.joined)
        let_on(gated)
        completion_id = completion.result()
    client.close()
    assert seen == ["0", "1"]
    assert len(gated.engine.requests) == 1
    assert gated.engine.aborted == []
    (turn,) = gated.turns(session)
    assert (turn["completion_id"], turn["verdict"]["code"]) == (completion_id, "open")


def test_an_answer_that_was_finished_for_nobody_waits_for_the_retry(
    gated: RunningGateway, retry_counts: RetryCounts
) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    wait_until(lambda: retry_counts.left)
    let_on(gated)
    time.sleep(0.3)  # the turn would be recorded within this time; no event tells that it is not
    assert gated.turns(session) == []
    completion = Call(gated, session, attempt=1).completion()
    (turn,) = gated.turns(session)
    assert (turn["completion_id"], turn["finish_reason"]) == (completion["id"], "stop")
    assert len(gated.engine.requests) == 1


def test_retries_of_parallel_samples_join_one_each(gated: RunningGateway, retry_counts: RetryCounts) -> None:
    session = gated.session()
    firsts = [Call(gated, session) for _ in range(3)]
    asked(gated, 3)
    retries = [Call(gated, session, attempt=1) for _ in firsts]
    wait_until(lambda: retry_counts.joined == 3)
    let_on(gated)
    heard = {call.completion()["id"] for call in firsts}
    assert len(heard) == 3
    assert {call.completion()["id"] for call in retries} == heard
    assert len(gated.engine.requests) == 3


def test_a_retry_rather_joins_the_call_whose_client_left(
    gated: RunningGateway, retry_counts: RetryCounts
) -> None:
    session = gated.session()
    stays = Call(gated, session)
    asked(gated, 1)
    leaves = Call(gated, session)
    asked(gated, 2)
    leaves.hang_up()
    wait_until(lambda: retry_counts.left)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: retry_counts.joined)
    let_on(gated)
    assert stays.completion()["id"] != again.completion()["id"]
    assert {(finish, code) for _, finish, code in codes(gated, session)} == {("stop", "open")}


def test_a_retry_hears_of_the_failure_of_the_first(gated: RunningGateway, retry_counts: RetryCounts) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: retry_counts.joined)
    assert gated.post(f"/sessions/{session['session_id']}/finish", {"status": "completed"}).status_code == 200
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert (heard[0], json.loads(heard[1])["error"]["code"]) == (409, "session_finished")
    assert heard == heard_again
    assert gated.turns(session) == []


# Samples


def test_identical_calls_that_nobody_marked_are_samples_of_their_own(gated: RunningGateway) -> None:
    session = gated.session()
    calls = [Call(gated, session) for _ in range(3)]
    asked(gated, 3)
    let_on(gated)
    assert len({call.completion()["id"] for call in calls}) == 3
    assert {code for _, _, code in codes(gated, session)} == {"open"}
    assert len(gated.turns(session)) == 3


def test_identical_calls_share_an_answer_where_that_is_configured(
    gated: RunningGateway, backends: Backends, retry_counts: RetryCounts
) -> None:
    with backends.gateway(join_identical=True) as gateway:
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        session = gateway.session()
        first = Call(gateway, session)
        asked(gated, 1)
        calls = [first, Call(gateway, session), Call(gateway, session)]
        wait_until(lambda: retry_counts.joined == 2)
        let_on(gated)
        assert len({call.completion()["id"] for call in calls}) == 1
        assert len(gateway.turns(session)) == 1


def test_another_call_is_not_joined_though_it_is_marked(gated: RunningGateway) -> None:
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    other = Call(gated, session, attempt=1, seed=7)
    wait_until(lambda: len(gated.engine.requests) == 2)
    let_on(gated)
    assert first.completion()["id"] != other.completion()["id"]
    assert {code for _, _, code in codes(gated, session)} == {"open"}


# Orphans


def test_a_retry_after_the_answer_replaces_its_turn(gateway: RunningGateway) -> None:
    session = gateway.session()
    first, again = chat(gateway, session), chat(gateway, session, attempt=1)
    assert first.json()["id"] != again.json()["id"]
    assert codes(gateway, session) == [("root", "stop", "orphan_retry"), ("retry", "stop", "open")]
    assert chat(gateway, session, attempt=2).status_code == 200
    assert [code for _, _, code in codes(gateway, session)] == ["orphan_retry", "orphan_retry", "open"]


def test_a_turn_that_was_continued_is_no_orphan(gateway: RunningGateway) -> None:
    gateway.engine.script.extend([list(ANSWER), list(ANSWER)])
    session = gateway.session()
    answer = chat(gateway, session).json()["choices"][0]["message"]
    history = [
        {"role": "user", "content": "hi"},
        answer,
        {"role": "tool", "content": "m", "tool_call_id": "c"},
    ]
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert gateway.post(path, {"messages": history}).status_code == 200
    assert chat(gateway, session, attempt=1).status_code == 200
    first, child, again = gateway.turns(session)
    assert child["parent_id"] == first["turn_id"]
    assert again["relation"] == "retry"
    assert {turn["verdict"]["code"] for turn in (first, child, again)} == {"open"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_client_is_aborted(
    gated_timed: RunningGateway, turned: TurnedClock, stream: bool
) -> None:
    gated = gated_timed
    session = gated.session()
    first = Call(gated, session, stream=stream)
    asked(gated, 1)
    first.hang_up()
    turned.turn_until(lambda: gated.engine.aborted, GRACE_S)  # its gate is shut: only an abort ends this
    wait_until(lambda: gated.turns(session))
    assert codes(gated, session) == [("root", "abort", "aborted")]


def test_an_answer_without_a_retry_in_time_is_aborted(
    gated_timed: RunningGateway, turned: TurnedClock, retry_counts: RetryCounts
) -> None:
    gated = gated_timed
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    wait_until(lambda: retry_counts.left)
    let_on(gated)
    wait_until(lambda: engine_is_idle(gated))  # the gateway has the whole answer
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    (turn,) = gated.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert turn["output_ids"][: len(ANSWER)] == ANSWER


def test_a_retry_that_leaves_too_ends_the_call(
    gated_timed: RunningGateway, turned: TurnedClock, retry_counts: RetryCounts
) -> None:
    gated = gated_timed
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: retry_counts.joined)
    first.hang_up()
    wait_until(lambda: retry_counts.left)
    turned.turn(2 * GRACE_S)
    assert gated.session()  # a round trip, within which the gateway would have ended the call
    assert gated.engine.aborted == []
    again.hang_up()
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    assert codes(gated, session) == [("root", "abort", "aborted")]


def test_a_retry_after_the_abort_replaces_the_aborted_turn(
    gated_timed: RunningGateway, turned: TurnedClock
) -> None:
    gated = gated_timed
    session = gated.session()
    first = Call(gated, session)
    asked(gated, 1)
    first.hang_up()
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    let_on(gated)
    Call(gated, session, attempt=1).completion()
    assert codes(gated, session) == [("root", "abort", "orphan_retry"), ("retry", "stop", "open")]


def test_a_retry_of_a_call_that_was_never_recorded_is_an_ordinary_turn(gateway: RunningGateway) -> None:
    session = gateway.session()
    assert chat(gateway, session, attempt=1).status_code == 200
    assert codes(gateway, session) == [("root", "stop", "open")]


def test_every_choice_of_a_call_is_replaced(gateway: RunningGateway) -> None:
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    for attempt in (0, 1):
        reply = gateway.chat(path=path, n=3, headers={RETRY: str(attempt)})
        assert reply.status_code == 200
    verdicts = [code for _, _, code in codes(gateway, session)]
    assert sorted(verdicts) == ["open"] * 3 + ["orphan_retry"] * 3
    assert {relation for relation, _, code in codes(gateway, session) if code == "open"} == {"retry"}


@pytest.mark.parametrize("retried", [False, True])
def test_choices_of_a_call_that_was_recorded_in_part_are_samples_or_replaced(
    gateway: RunningGateway,
    backends: Backends,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    retried: bool,
) -> None:
    """A gateway that dies between two choices, or whose Redis is full then, leaves such a call behind."""
    append, begun = RedisWriter.append_turn, count()
    recorded: list[Turn] = []

    async def two_of_three(writer: RedisWriter, turn: Turn, *more: Any) -> Turn:
        if next(begun) == 2:
            while len(recorded) < 2:  # noqa: ASYNC110 - the awaited tasks run in the same loop
                await asyncio.sleep(0.005)  # until the other two choices are recorded
            raise StorageUnavailable("the end")
        recorded.append(await append(writer, turn, *more))
        return recorded[-1]

    monkeypatch.setattr(RedisWriter, "append_turn", two_of_three)
    session = gateway.session()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    assert gateway.chat(path=path, n=3).status_code == 503
    heard = {turn.turn_id for turn in recorded}
    if retried:
        reply = gateway.chat(path=path, n=3, headers={RETRY: "1"})
        heard = set(reply.headers["x-weir-turn-id"].split(","))
    gateway.post(f"/sessions/{session['session_id']}/finish", {"status": "completed", "reward": 1.0})
    turns = gateway.turns(session)
    assert {turn["turn_id"] for turn in turns if turn["verdict"]["code"] == "ready"} == heard
    orphans = [turn["turn_id"] for turn in turns if turn["verdict"]["code"] == "orphan_retry"]
    assert sorted(orphans) == sorted(turn.turn_id for turn in recorded[:2] if retried)
    report = audit(Sources(backends.redis_url, None, checkpoint_dir=tmp_path))
    assert report.ok, report.findings


def test_a_retry_that_names_no_session_finds_the_one_of_the_first(gateway: RunningGateway) -> None:
    first, other = gateway.chat("hi"), gateway.chat("hello")
    again = gateway.chat("hi", headers={RETRY: "1"})
    sessions = [reply.headers["x-weir-session-id"] for reply in (first, other, again)]
    assert sessions[0] == sessions[2] != sessions[1]
    assert codes(gateway, {"session_id": sessions[0]}) == [
        ("root", "stop", "orphan_retry"),
        ("retry", "stop", "open"),
    ]
    assert gateway.chat("hi").headers["x-weir-session-id"] not in sessions


def test_a_retry_that_names_no_session_joins_the_call_in_flight(
    gated: RunningGateway, retry_counts: RetryCounts
) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gated.chat)
        asked(gated, 1)
        again = pool.submit(gated.chat, headers={RETRY: "1"})
        wait_until(lambda: retry_counts.joined)
        let_on(gated)
        replies = first.result(), again.result()
    assert replies[0].json() == replies[1].json()


# Two gateways


@contextmanager
def another(gateway: RunningGateway, backends: Backends) -> Iterator[RunningGateway]:
    with backends.gateway() as other:
        wait_until(lambda: other.get("/ready").status_code == 200)
        yield other


def test_a_retry_at_another_gateway_replaces_a_turn_that_is_recorded_first(
    gated: RunningGateway, backends: Backends
) -> None:
    session = gated.session()
    with another(gated, backends) as other:
        first = Call(gated, session)
        asked(gated, 1)
        again = Call(other, session, attempt=1)
        asked(gated, 2)
        let_on(gated)
        assert first.completion()["id"] != again.completion()["id"]
        verdicts = {relation: code for relation, _, code in codes(gated, session)}
    assert verdicts == {"root": "orphan_retry", "retry": "open"}


def test_a_retry_at_another_gateway_replaces_a_turn_that_is_recorded_later(
    gated: RunningGateway, backends: Backends
) -> None:
    session = gated.session()
    with another(gated, backends) as other:
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


def test_nothing_is_kept_of_a_call_that_is_over(gated: RunningGateway, retry_counts: RetryCounts) -> None:
    session = gated.session()
    first = Call(gated, session, stream=True)
    asked(gated, 1)
    again = Call(gated, session, attempt=1, stream=True)
    wait_until(lambda: retry_counts.joined)
    let_on(gated)
    assert told(first.answer()[1]) == told(again.answer()[1])

    def left() -> int:
        gc.collect()
        return sum(type(thing) is InFlightCall for thing in gc.get_objects())

    wait_until(lambda: left() == 0)
