"""Calls whose client leaves or asks again.

A marked retry joins the call in flight or replaces its turn. Identical calls without a mark do neither. If
nobody waits for an answer any more, the engine stops, and the sampled tokens are recorded as aborted.
"""

import asyncio
import gc
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.edge.calls import InFlightCalls
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Turn
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.gateway.calls import RETRY, Call, codes
from tests.support.gateway.gated_engine import ANSWER, asked, let_on
from tests.support.gateway.polls import polled
from tests.support.gateway.retry_counts import RetryCounts
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until
from weir.audit.audit import audit
from weir.audit.audit_sources import Sources

GRACE_S = 1.0
"""How long a call continues without a client."""


@pytest.fixture
def patient(gated: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> RunningGateway:
    """`gated`, which continues a call without a client for as long as the test takes."""
    monkeypatch.setattr(InFlightCalls, "grace_s", property(lambda _: PATIENCE_S), raising=False)
    return gated


def told(stream: bytes) -> list[Any]:
    """What a stream says, whatever tokens each of its events has."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    return [text, {chunk["id"] for chunk in chunks}, chunks[-1]["choices"][0]["finish_reason"]]


# Joining


def hung_up(gated: RunningGateway, session: dict[str, Any], reads: bool = False, **body: Any) -> None:
    """A client calls, and leaves when the engine has stopped in the middle of its answer."""
    call = Call(gated, session, **body)
    asked(gated, body.get("n", 1))
    if reads:
        assert call.line.recv(4096).startswith(b"HTTP/1.1 200")
    assert gated.session()  # a round trip, within which the gateway reads what the engine has sent
    call.hang_up()


def joined(gated: RunningGateway, counts: RetryCounts, session: dict[str, Any], **body: Any) -> list[Call]:
    """A call in flight, and a retry that has joined it."""
    first = Call(gated, session, **body)
    asked(gated, 1)
    calls = [first, Call(gated, session, attempt=1, **body)]
    wait_until(lambda: counts.calls)
    return calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_call_in_flight_and_nothing_is_kept_of_it(
    gated: RunningGateway, retry_counts: RetryCounts, stream: bool
) -> None:
    session = gated.session()
    first, again = joined(gated, retry_counts, session, stream=stream)
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert heard[0] == 200
    assert told(heard[1]) == told(heard_again[1]) if stream else heard == heard_again
    assert len(gated.engine.requests) == 1
    (turn,) = gated.turns(session)
    assert (turn["output_ids"][:100], turn["verdict"]["code"]) == (ANSWER, "open")

    def forgotten() -> bool:
        gc.collect()
        return all(call() is None for call in retry_counts.calls)

    wait_until(forgotten)


def test_a_retry_hears_of_the_failure_of_the_first(gated: RunningGateway, retry_counts: RetryCounts) -> None:
    session = gated.session()
    first, again = joined(gated, retry_counts, session)
    gated.finish(session)
    let_on(gated)
    heard, heard_again = first.answer(), again.answer()
    assert (heard[0], json.loads(heard[1])["error"]["code"]) == (409, "session_finished")
    assert heard == heard_again
    assert gated.turns(session) == []


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
        wait_until(lambda: retry_counts.calls)
        let_on(gated)
        first, again = (call.result() for call in calls)
    assert (first.headers["x-request-id"], again.headers["x-request-id"]) == ("r0", "r1")
    assert first.headers["x-weir-turn-id"] == again.headers["x-weir-turn-id"]
    assert first.json()["id"] == again.json()["id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_times_out_gets_the_answer_of_its_first_call(
    patient: RunningGateway, retry_counts: RetryCounts, stream: bool
) -> None:
    gated, session = patient, patient.session()
    seen: list[str] = []

    def note(request: Any) -> None:
        seen.append(request.headers[RETRY])
        request.extensions["timeout"] = {"read": 1.0} if seen == ["0"] else {}  # only the first times out

    http = openai.DefaultHttpxClient(event_hooks={"request": [note]})
    client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], http_client=http)

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
        wait_until(lambda: retry_counts.calls)
        let_on(gated)
        completion_id = completion.result()
    client.close()
    assert seen == ["0", "1"]
    assert len(gated.engine.requests) == 1
    assert gated.engine.aborted == []
    (turn,) = gated.turns(session)
    assert (turn["completion_id"], turn["verdict"]["code"]) == (completion_id, "open")


def test_an_answer_that_was_finished_for_nobody_waits_for_the_retry(
    patient: RunningGateway, retry_counts: RetryCounts
) -> None:
    gated, session = patient, patient.session()
    hung_up(gated, session)
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
    wait_until(lambda: len(retry_counts.calls) == 3)
    let_on(gated)
    heard = {call.completion()["id"] for call in firsts}
    assert len(heard) == 3
    assert {call.completion()["id"] for call in retries} == heard
    assert len(gated.engine.requests) == 3


def test_an_attempt_that_a_later_one_overtook_joins_their_call(
    gated: RunningGateway, retry_counts: RetryCounts
) -> None:
    """Each worker of a gateway takes its own time to find the call."""
    session = gated.session()
    calls = [Call(gated, session)]
    asked(gated, 1)
    for attempt in (2, 1):
        calls.append(Call(gated, session, attempt))
        wait_until(lambda: len(retry_counts.calls) == len(calls) - 1)
    let_on(gated)
    assert len({call.completion()["id"] for call in calls}) == 1
    assert len(gated.engine.requests) == 1


def test_a_retry_rather_joins_the_call_whose_client_left(
    patient: RunningGateway, retry_counts: RetryCounts
) -> None:
    gated, session = patient, patient.session()
    stays = Call(gated, session)
    asked(gated, 1)
    leaves = Call(gated, session)
    asked(gated, 2)
    leaves.hang_up()
    wait_until(lambda: retry_counts.left)
    again = Call(gated, session, attempt=1)
    wait_until(lambda: retry_counts.calls)
    let_on(gated)
    assert stays.completion()["id"] != again.completion()["id"]
    assert {(finish, code) for _, finish, code in codes(gated, session)} == {("stop", "open")}


# Samples


def test_identical_calls_that_nobody_marked_and_another_call_are_samples_of_their_own(
    gated: RunningGateway,
) -> None:
    session = gated.session()
    calls = [Call(gated, session) for _ in range(3)]
    asked(gated, 3)
    calls.append(Call(gated, session, attempt=1, seed=7))  # is marked, but not the same
    asked(gated, 4)
    let_on(gated)
    assert len({call.completion()["id"] for call in calls}) == 4
    assert [code for _, _, code in codes(gated, session)] == ["open"] * 4


def test_identical_calls_share_an_answer_where_that_is_configured(
    gated: RunningGateway, backends: Backends, retry_counts: RetryCounts
) -> None:
    with backends.ready_gateway(join_identical=True) as gateway:
        session = gateway.session()
        first = Call(gateway, session)
        asked(gated, 1)
        calls = [first, Call(gateway, session), Call(gateway, session)]
        wait_until(lambda: len(retry_counts.calls) == 2)
        let_on(gated)
        assert len({call.completion()["id"] for call in calls}) == 1
        assert len(gateway.turns(session)) == 1


# Orphans


def test_a_retry_after_the_answer_replaces_its_turn(gateway: RunningGateway) -> None:
    session = gateway.session()
    first, again = gateway.chat(session=session), gateway.chat(session=session, headers={RETRY: "1"})
    assert first.json()["id"] != again.json()["id"]
    assert codes(gateway, session) == [("root", "stop", "orphan_retry"), ("retry", "stop", "open")]
    assert gateway.chat(session=session, headers={RETRY: "2"}).status_code == 200
    assert [code for _, _, code in codes(gateway, session)] == ["orphan_retry", "orphan_retry", "open"]
    never_recorded = gateway.session()
    assert gateway.chat(session=never_recorded, headers={RETRY: "1"}).status_code == 200
    assert codes(gateway, never_recorded) == [("root", "stop", "open")], "it is an ordinary turn"


def test_a_turn_that_was_continued_is_no_orphan(gateway: RunningGateway) -> None:
    gateway.engine.script.extend([list(ANSWER), list(ANSWER)])
    session = gateway.session()
    answer = gateway.chat(session=session).json()["choices"][0]["message"]
    result = {"role": "tool", "content": "m", "tool_call_id": "c"}
    history = [{"role": "user", "content": "hi"}, answer, result]
    assert gateway.chat(session=session, messages=history).status_code == 200
    assert gateway.chat(session=session, headers={RETRY: "1"}).status_code == 200
    first, child, again = gateway.turns(session)
    assert child["parent_id"] == first["turn_id"]
    assert again["relation"] == "retry"
    assert {turn["verdict"]["code"] for turn in (first, child, again)} == {"open"}


def test_an_answer_without_a_retry_in_time_is_aborted(
    gated_timed: RunningGateway, turned: TurnedClock, retry_counts: RetryCounts
) -> None:
    gated, session = gated_timed, gated_timed.session()
    hung_up(gated, session)
    wait_until(lambda: retry_counts.left)
    let_on(gated)
    wait_until(lambda: gated.admin("GET", "/rollout_servers").json()["data"][0]["in_flight"] == 0)
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    (turn,) = gated.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert turn["output_ids"][: len(ANSWER)] == ANSWER


def test_every_choice_of_a_call_is_replaced(gateway: RunningGateway) -> None:
    session = gateway.session()
    for attempt in (0, 1):
        reply = gateway.chat(session=session, n=3, headers={RETRY: str(attempt)})
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
    append, begun = StreamWriter.append_turn, count()
    recorded: list[Turn] = []

    async def two_of_three(writer: StreamWriter, turn: Turn, *more: Any) -> Turn:
        if next(begun) == 2:
            while len(recorded) < 2:  # noqa: ASYNC110 - the awaited tasks run in the same loop
                await asyncio.sleep(0.005)  # until the other two choices are recorded
            raise StorageUnavailable("the end")
        recorded.append(await append(writer, turn, *more))
        return recorded[-1]

    monkeypatch.setattr(StreamWriter, "append_turn", two_of_three)
    session = gateway.session()
    assert gateway.chat(session=session, n=3).status_code == 503
    heard = {turn.turn_id for turn in recorded}
    if retried:
        reply = gateway.chat(session=session, n=3, headers={RETRY: "1"})
        heard = set(reply.headers["x-weir-turn-id"].split(","))
    gateway.finish(session, reward=1.0)
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
        wait_until(lambda: retry_counts.calls)
        let_on(gated)
        replies = first.result(), again.result()
    assert replies[0].json() == replies[1].json()


# Clients that leave


@pytest.mark.parametrize(("stream", "sampled"), [(False, 0), (False, 64), (True, 0), (True, 3)])
def test_a_client_that_goes_away_aborts_its_answer(
    gated_timed: RunningGateway, turned: TurnedClock, stream: bool, sampled: int
) -> None:
    """A retry replaces the aborted turn."""
    gated, session = gated_timed, gated_timed.session()
    gated.engine.stall_after = sampled
    hung_up(gated, session, reads=stream and sampled > 0, stream=stream)
    turned.turn_until(lambda: gated.engine.aborted, GRACE_S)  # its gate is shut: only an abort ends this
    wait_until(lambda: gated.turns(session))
    (turn,) = gated.turns(session)
    assert codes(gated, session) == [("root", "abort", "aborted")]
    assert turn["output_ids"] == ANSWER[:sampled]
    assert turn["versions"] == ([{"version": 0, "start": 0, "end": sampled}] if sampled else [])
    assert gated.engine.aborted == [turn["turn_id"]]
    let_on(gated)
    assert Call(gated, session, attempt=1, stream=stream).answer()[0] == 200
    assert codes(gated, session) == [("root", "abort", "orphan_retry"), ("retry", "stop", "open")]


def test_of_several_choices_those_that_were_done_are_recorded_as_well(
    gated_timed: RunningGateway, turned: TurnedClock
) -> None:
    """The client got none of the choices, so that the finished one is recorded as aborted, too."""
    gated, session = gated_timed, gated_timed.session()
    gated.engine.script.appendleft("short")
    gated.engine.stall_after = 64
    hung_up(gated, session, n=2)
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    wait_until(lambda: len(gated.turns(session)) == 2)
    turns = gated.turns(session)
    assert {turn["verdict"]["code"] for turn in turns} == {"aborted"}
    assert sorted(turn["output_len"] for turn in turns)[1] == 64


def test_a_retry_that_leaves_too_ends_the_call(
    gated_timed: RunningGateway, turned: TurnedClock, retry_counts: RetryCounts
) -> None:
    gated, session = gated_timed, gated_timed.session()
    first, again = joined(gated, retry_counts, session)
    first.hang_up()
    wait_until(lambda: retry_counts.left)
    turned.turn(2 * GRACE_S)
    assert gated.session()  # a round trip, within which the gateway would have ended the call
    assert gated.engine.aborted == []
    again.hang_up()
    turned.turn_until(lambda: gated.turns(session), GRACE_S)
    assert codes(gated, session) == [("root", "abort", "aborted")]


def test_a_turn_that_is_lost_after_its_client_left_is_an_error_in_the_log(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    session = gateway.session()

    def appending() -> int:
        """How many bytes wait in Redis behind an append that Redis holds back; -1 without such an append."""
        lines = gateway.redis.client_list()
        held = (line["qbuf"] for line in lines if "b" in line["flags"] and line["cmd"] == "evalsha")
        return int(next(held, -1))

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    gateway.redis.config_set("maxmemory", 1)
    gateway.redis.client_pause(30_000, all=False)
    try:
        call = Call(gateway, session)
        wait_until(lambda: appending() >= 0)
        before = appending()
        call.hang_up()
        wait_until(lambda: appending() > before)  # the gateway has sent the append a second time
        gateway.redis.client_unpause()
        wait_until(errors)
    finally:
        gateway.redis.client_unpause()
        gateway.redis.config_set("maxmemory", 0)
        polled()  # tests that follow find an empty Redis
    (request,) = gateway.engine.requests
    (said,) = errors()
    assert said.startswith(f"turn {request['rid']} is not recorded: Redis: ")
    assert gateway.turns(session) == []
