"""Gateways as real processes on one Redis: each can serve the next call of a session, and each may die."""

import itertools
import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.gateway.calls import RETRY, Call, codes
from tests.support.gateway.conversation import answered, path_of, say, stored, trainable
from tests.support.gateway.gated_engine import NumberingEngine, asked, let_on
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import RunningGateway
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def urls(processes: Processes) -> Iterator[list[str]]:
    """Two gateways that all tests share, and no test ends."""
    started = [processes.start() for _ in range(2)]
    yield [url for _, url in started]
    for process, _ in started:
        process.terminate()
    assert [process.wait(timeout=300) for process, _ in started] == [0, 0]


@pytest.fixture
def pair(processes: Processes, urls: list[str]) -> Iterator[tuple[RunningGateway, RunningGateway]]:
    """The two gateways, with a fresh engine that gives each answer its own number."""
    engine = NumberingEngine(processes.backends.tokenizer)
    engine.numbers = itertools.count()
    processes.backends.engine = engine
    one, other = map(processes.at, urls)
    yield one, other
    let_on(one)
    one.http.close()
    other.http.close()


def whole_prompt(turn: dict[str, Any], turns: dict[str, dict[str, Any]]) -> list[int]:
    """Every token before the turn's own output, along its branch."""
    if turn["parent_id"] is None:
        return list(turn["context_ids"])
    parent = turns[turn["parent_id"]]
    return [*whole_prompt(parent, turns), *parent["output_ids"], *turn["context_ids"]]


def check_record(
    one: RunningGateway, other: RunningGateway, session: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Both gateways show the same tree. The stream has it once, and the engine was given its prompts."""
    told = one.turns(session)
    assert told == other.turns(session)
    turns = {turn["turn_id"]: turn for turn in told}
    assert sorted(turn.turn_id for turn in stored(one, session)) == sorted(turns)
    given = {request["rid"]: request["input_ids"] for request in one.engine.requests}
    for turn_id, turn in turns.items():
        assert whole_prompt(turn, turns) == given[turn_id]
    return turns


# One tree


def test_two_gateways_serve_the_turns_of_one_session_alternately(
    pair: tuple[RunningGateway, RunningGateway],
) -> None:
    session = pair[0].session()
    history = [{"role": "user", "content": "begin"}]
    for gateway in (*pair, *pair, *pair):
        history = answered(history, say(gateway, session, history))
    turns = list(check_record(*pair, session).values())
    assert [turn["relation"] for turn in turns] == ["root", *["extends"] * 5]
    assert [turn["parent_id"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]


def test_parallel_calls_of_many_sessions_at_both_gateways_lose_and_double_nothing(
    pair: tuple[RunningGateway, RunningGateway],
) -> None:
    """Each round makes two calls at the same time, one at each gateway, and continues one of the answers."""
    rounds = 3

    def episode(number: int) -> tuple[dict[str, Any], list[str]]:
        session = pair[number % 2].session()
        history = [{"role": "user", "content": f"task {number}"}]
        chosen: list[str] = []
        with ThreadPoolExecutor(2) as calls:
            for index in range(rounds):
                replies = list(calls.map(lambda gateway: say(gateway, session, history), pair))  # noqa: B023
                reply = replies[(number + index) % 2]
                chosen.append(reply.headers["x-weir-turn-id"])
                history = answered(history, reply)
        return session, chosen

    with ThreadPoolExecutor(8) as agents:
        episodes = list(agents.map(episode, range(8)))
    for session, chosen in episodes:
        turns = check_record(*pair, session)
        assert len(turns) == 2 * rounds
        parents = sorted(str(turn["parent_id"]) for turn in turns.values())
        assert parents == sorted(2 * ["None", *chosen[:-1]])


# A client that leaves


@pytest.mark.parametrize("stream", [False, True])
def test_the_call_of_a_client_that_leaves_is_aborted_in_the_engine(
    pair: tuple[RunningGateway, RunningGateway], stream: bool
) -> None:
    one, other = pair
    one.engine.stall_after = 3
    session = one.session()
    call = Call(one, session, stream=stream)
    asked(one, 1)
    if stream:
        assert call.line.recv(65536).startswith(b"HTTP/1.1 200")
    call.hang_up()
    wait_until(lambda: one.engine.aborted)  # the engine stalls for ever: nothing but an abort ends this
    wait_until(lambda: other.turns(session))
    (turn,) = other.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert one.engine.aborted == [turn["turn_id"]]
    assert trainable(one, session) == []


# Retries


def completion_of(call: Call) -> str:
    """The completion id in the first chunk of a streaming call."""
    heard = b""
    while not (found := re.search(rb'"id":"(chatcmpl-\w{32})"', heard)):
        heard += call.line.recv(65536)
    return found[1].decode()


def test_a_retry_at_the_other_gateway_after_the_answer_is_the_one_that_trains(
    pair: tuple[RunningGateway, RunningGateway],
) -> None:
    one, other = pair
    session = one.session()
    first = one.chat(path=path_of(session))
    again = other.chat(path=path_of(session), headers={RETRY: "1"})
    assert first.json()["id"] != again.json()["id"]
    assert codes(one, session) == [("root", "stop", "orphan_retry"), ("retry", "stop", "open")]
    assert [turn.completion_id for turn in trainable(one, session)] == [again.json()["id"]]


@pytest.mark.parametrize("recorded_first", ["first", "retry"])
def test_of_attempts_in_flight_at_both_gateways_one_trains(
    pair: tuple[RunningGateway, RunningGateway], recorded_first: str
) -> None:
    one, other = pair
    one.engine.stall_after = 3
    session = one.session()
    first = Call(one, session)
    asked(one, 1)
    if recorded_first == "retry":
        one.engine.stall_after = None
        retry_id = Call(other, session, attempt=1).completion()["id"]
        let_on(one)
        first.completion()
    else:
        retry = Call(other, session, attempt=1)
        asked(one, 2)
        let_on(one)
        first.completion()
        retry_id = retry.completion()["id"]
    assert {(relation, code) for relation, _, code in codes(one, session)} == {
        ("root", "orphan_retry"),
        ("retry", "open"),
    }
    assert [turn.completion_id for turn in trainable(other, session)] == [retry_id]


@pytest.mark.parametrize("second_stays", [False, True])
def test_of_three_attempts_the_answer_that_the_last_one_heard_trains(
    pair: tuple[RunningGateway, RunningGateway], second_stays: bool
) -> None:
    """The third attempt joins the first at one gateway. In between, the second goes to the other gateway."""
    one, other = pair
    one.engine.stall_after = 3
    session = one.session()
    first = Call(one, session, stream=True)
    asked(one, 1)
    second = Call(other, session, attempt=1, stream=True)
    asked(one, 2)
    if not second_stays:
        second.hang_up()
        wait_until(lambda: other.engine.aborted)
    third = Call(one, session, attempt=2, stream=True)
    heard = completion_of(third)
    assert heard == completion_of(first)
    let_on(one)
    wait_until(lambda: len(one.turns(session)) == 2)
    for call in (first, second, third):
        call.hang_up()
    assert len(one.engine.requests) == 2
    assert [turn.completion_id for turn in trainable(one, session)] == [heard]


def test_a_retry_at_the_other_gateway_replaces_the_turn_of_a_client_that_left(
    pair: tuple[RunningGateway, RunningGateway],
) -> None:
    one, other = pair
    one.engine.stall_after = 3
    session = one.session()
    call = Call(one, session)
    asked(one, 1)
    call.hang_up()
    wait_until(lambda: one.turns(session))
    let_on(one)
    again = Call(other, session, attempt=1).completion()
    assert codes(one, session) == [("root", "abort", "orphan_retry"), ("retry", "stop", "open")]
    assert [turn.completion_id for turn in trainable(one, session)] == [again["id"]]


# A gateway that ends


def refuses(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_under_load_drains(processes: Processes, pair: tuple[RunningGateway, RunningGateway]) -> None:
    survivor, _ = pair
    survivor.engine.stall_after = 3
    with processes.gateway() as (process, gateway):
        session = gateway.session()
        calls = [Call(gateway, session, stream=number % 2 == 1) for number in range(8)]
        asked(gateway, 8)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(gateway.url))
        assert survivor.turns(session) == []
        let_on(survivor)
        heard = [call.answer() for call in calls]
        assert process.wait(timeout=300) == 0
    assert [status for status, _ in heard] == [200] * 8
    assert all(json.loads(body)["choices"][0]["finish_reason"] == "stop" for _, body in heard[::2])
    assert all(b"data: [DONE]" in body for _, body in heard[1::2])
    assert [turn["finish_reason"] for turn in survivor.turns(session)] == ["stop"] * 8
    assert len(trainable(survivor, session)) == 8


def test_a_gateway_killed_in_mid_stream_leaves_no_half_turn(
    processes: Processes, pair: tuple[RunningGateway, RunningGateway]
) -> None:
    survivor, _ = pair
    history = [{"role": "user", "content": "begin"}]
    with processes.gateway() as (process, gateway):
        session = gateway.session()
        history = answered(history, say(gateway, session, history))
        survivor.engine.stall_after = 3
        body = {"messages": history, "stream": True}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        heard = b""
        with httpx.stream("POST", gateway.url + path_of(session), json=body, headers=headers) as stream:
            assert stream.status_code == 200
            pieces = stream.iter_bytes()
            while b'"content":"an' not in heard:
                heard += next(pieces)
            process.kill()
            with pytest.raises(httpx.TransportError):
                heard += b"".join(pieces)
        assert process.wait(timeout=300) == -signal.SIGKILL
    assert b"[DONE]" not in heard
    assert len(survivor.turns(session)) == 1
    let_on(survivor)
    survivor.engine.stall_after = None
    again = survivor.post(
        path_of(session), {"messages": history}, key=session["api_key"], headers={RETRY: "1"}
    )
    assert again.status_code == 200
    say(survivor, session, answered(history, again))
    turns = check_record(*pair, session).values()
    assert [(turn["relation"], turn["finish_reason"]) for turn in turns] == [
        ("root", "stop"),
        ("extends", "stop"),
        ("extends", "stop"),
    ]
