"""A session that two gateways serve in turns: one tree, and of several attempts the one that trains."""

import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.gateway.calls import RETRY, Call, codes
from tests.support.gateway.conversation import answered, path_of, say, stored, trainable
from tests.support.gateway.gated_engine import NumberingEngine, asked, let_on
from tests.support.gateway.running import Backends, RunningGateway
from tests.support.waiting import wait_until

Pair = tuple[RunningGateway, RunningGateway]
"""Two gateways of one deployment."""


@pytest.fixture(scope="module")
def urls(own_backends: Backends) -> Iterator[list[str]]:
    """Two gateways that all tests share."""
    own_backends.clear(None)
    with own_backends.gateway_url() as one, own_backends.gateway_url() as other:
        yield [one, other]


@pytest.fixture
def pair(own_backends: Backends, urls: list[str]) -> Iterator[Pair]:
    """The two gateways, with a fresh engine that gives each answer its own number."""
    engine = NumberingEngine(own_backends.tokenizer)
    engine.numbers = itertools.count()
    own_backends.engine = engine
    with ExitStack() as stack:
        one, other = [
            RunningGateway(url, engine, own_backends.redis, stack.enter_context(httpx.Client(timeout=120)))
            for url in urls
        ]
        wait_until(lambda: all(each.get("/ready").status_code == 200 for each in (one, other)))
        yield one, other
        let_on(one)


def whole_prompt(turn: dict[str, Any], turns: dict[str, dict[str, Any]]) -> list[int]:
    """Every token before the turn's own output, along its branch."""
    if turn["parent_id"] is None:
        return list(turn["context_ids"])
    parent = turns[turn["parent_id"]]
    return [*whole_prompt(parent, turns), *parent["output_ids"], *turn["context_ids"]]


def check_record(pair: Pair, session: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Both gateways show the same tree. The stream has it once, and the engine was given its prompts."""
    one, other = pair
    told = one.turns(session)
    assert told == other.turns(session)
    turns = {turn["turn_id"]: turn for turn in told}
    assert sorted(turn.turn_id for turn in stored(one, session)) == sorted(turns)
    given = {request["rid"]: request["input_ids"] for request in one.engine.requests}
    for turn_id, turn in turns.items():
        assert whole_prompt(turn, turns) == given[turn_id]
    return turns


# One tree


def test_two_gateways_serve_the_turns_of_one_session_alternately(pair: Pair) -> None:
    session = pair[0].session()
    history = [{"role": "user", "content": "begin"}]
    for gateway in (*pair, *pair, *pair):
        history = answered(history, say(gateway, session, history))
    turns = list(check_record(pair, session).values())
    assert [turn["relation"] for turn in turns] == ["root", *["extends"] * 5]
    assert [turn["parent_id"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]


def test_parallel_calls_of_many_sessions_at_both_gateways_lose_and_double_nothing(pair: Pair) -> None:
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

    with ThreadPoolExecutor(6) as agents:
        episodes = list(agents.map(episode, range(6)))
    for session, chosen in episodes:
        turns = check_record(pair, session)
        assert len(turns) == 2 * rounds
        parents = sorted(str(turn["parent_id"]) for turn in turns.values())
        assert parents == sorted(2 * ["None", *chosen[:-1]])


# Retries


def completion_of(call: Call) -> str:
    """The completion id in the first chunk of a streaming call."""
    heard = b""
    while not (found := re.search(rb'"id":"(chatcmpl-\w{32})"', heard)):
        heard += call.line.recv(65536)
    return found[1].decode()


def test_a_retry_at_the_other_gateway_after_the_answer_is_the_one_that_trains(pair: Pair) -> None:
    one, other = pair
    session = one.session()
    first = one.chat(path=path_of(session))
    again = other.chat(path=path_of(session), headers={RETRY: "1"})
    assert first.json()["id"] != again.json()["id"]
    assert codes(one, session) == [("root", "stop", "orphan_retry"), ("retry", "stop", "open")]
    assert [turn.completion_id for turn in trainable(one, session)] == [again.json()["id"]]


@pytest.mark.parametrize("recorded_first", ["first", "retry"])
def test_of_attempts_in_flight_at_both_gateways_one_trains(pair: Pair, recorded_first: str) -> None:
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
def test_of_three_attempts_the_answer_that_the_last_one_heard_trains(pair: Pair, second_stays: bool) -> None:
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


def test_a_retry_at_the_other_gateway_replaces_the_turn_of_a_client_that_left(pair: Pair) -> None:
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
