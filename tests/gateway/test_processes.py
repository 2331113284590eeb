"""Gateways as real processes on one Redis: any of them serves the next call, and any of them may die."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from starlette.requests import Request
from starlette.responses import Response
from tokenizers import Tokenizer

from rollout_queue.contract.attempts import orphans_of
from rollout_queue.contract.codec import decode
from rollout_queue.contract.records import Turn
from rollout_queue.redis import keys
from tests.gateway.conftest import ADMIN_KEY, CLIENT_KEY, Door, Stage, wait_until
from tests.gateway.test_retries import RETRY, Call, GatedEngine, asked, codes, let_on
from tests.support.gateway.fake_engine import FakeEngine
from tests.support.serving import free_port, serving

STARTS_WITHIN_S = 60.0
"""A process has Python and the model's tokenizer to load, and the machine may have other things to do."""


class NumberingEngine(GatedEngine):
    """Never says the same twice, so that every answer names its turn; and always more than one event."""

    numbers: Iterator[int]

    async def generate(self, request: Request) -> Response:
        self.script.append(f"answer {next(self.numbers)}" + ", and so it goes on" * 20)
        return await super().generate(request)


@dataclass
class Processes:
    """Starts gateways, on a Redis database and an engine that only they use."""

    stage: Stage
    logs: Path
    _number: Iterator[int] = field(default_factory=itertools.count)

    def start(self) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        environment = os.environ | {
            "WEIR_REDIS_URL": self.stage.redis_url,
            "WEIR_MODEL_PATH": str(self.stage.model_path),
            "WEIR_ENGINES": self.stage.engine_url,
            "WEIR_CLIENT_KEYS": CLIENT_KEY,
            "WEIR_ADMIN_KEYS": ADMIN_KEY,
            "WEIR_GATEWAY__PORT": str(port),
        }
        with (self.logs / f"gateway-{next(self._number)}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, "-m", "gateway"], env=environment, stderr=log)
        return process, f"http://127.0.0.1:{port}"

    def door(self, url: str) -> Door:
        """The gateway at this address, once it is ready."""
        door = Door(url, self.stage.engine, self.stage.redis)
        wait_until(lambda: ready(door), STARTS_WITHIN_S)
        return door

    @contextmanager
    def gateway(self) -> Iterator[tuple[subprocess.Popen[bytes], Door]]:
        """One that a test may end."""
        process, url = self.start()
        try:
            door = self.door(url)
            yield process, door
            door.http.close()
        finally:
            process.kill()
            process.wait()


def ready(door: Door) -> bool:
    try:
        return bool(door.get("/ready").status_code == 200)
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def processes(
    redis_url: str, tiny_model: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    own = redis_url.removesuffix("0") + "4"
    stage = Stage(own, tiny_model, tokenizer, Redis.from_url(own), FakeEngine(tokenizer))
    with serving(stage) as stage.engine_url:
        yield Processes(stage, tmp_path_factory.mktemp("gateways"))
    stage.redis.close()


@pytest.fixture(scope="module")
def urls(processes: Processes) -> Iterator[list[str]]:
    """Two gateways that no test ends."""
    started = [processes.start() for _ in range(2)]
    yield [url for _, url in started]
    for process, _ in started:
        process.terminate()
    assert [process.wait(timeout=20) for process, _ in started] == [0, 0]


@pytest.fixture
def pair(processes: Processes, urls: list[str]) -> Iterator[tuple[Door, Door]]:
    """The two, in front of a fresh engine that never says the same twice."""
    engine = NumberingEngine(processes.stage.tokenizer)
    engine.numbers = itertools.count()
    processes.stage.engine = engine
    one, other = map(processes.door, urls)
    yield one, other
    let_on(one)
    one.http.close()
    other.http.close()


def path_of(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}/v1/chat/completions"


def say(door: Door, session: dict[str, Any], history: list[dict[str, Any]]) -> httpx.Response:
    """Go on with the conversation. A client of its own, since threads call."""
    headers = {"authorization": f"Bearer {session['api_key']}"}
    reply = httpx.post(door.url + path_of(session), json={"messages": history}, headers=headers, timeout=20)
    assert reply.status_code == 200, reply.text
    return reply


def answered(history: list[dict[str, Any]], reply: httpx.Response) -> list[dict[str, Any]]:
    """The conversation with an answer, and what the agent says next."""
    return [*history, reply.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]


def stored(door: Door, session: dict[str, Any]) -> list[Turn]:
    """The session's turns as they stand in the stream, which is what the trainer reads."""
    entries: Any = door.redis.xrange(keys.STREAM)
    records = [decode(fields[b"r"]) for _, fields in entries]
    return [each for each in records if isinstance(each, Turn) and each.session_id == session["session_id"]]


def trainable(door: Door, session: dict[str, Any]) -> list[Turn]:
    turns = stored(door, session)
    orphans = orphans_of(turns)
    return [turn for turn in turns if turn.turn_id not in orphans and turn.finish != "abort"]


def whole_prompt(turn: dict[str, Any], turns: dict[str, dict[str, Any]]) -> list[int]:
    """Every token before the turn's own output, along its branch."""
    if turn["parent_id"] is None:
        return list(turn["context_ids"])
    parent = turns[turn["parent_id"]]
    return [*whole_prompt(parent, turns), *parent["output_ids"], *turn["context_ids"]]


def check_record(one: Door, other: Door, session: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Both gateways tell one tree; it stands in the stream once, and is what the engine was given."""
    told = one.turns(session)
    assert told == other.turns(session)
    turns = {turn["turn_id"]: turn for turn in told}
    assert sorted(turn.turn_id for turn in stored(one, session)) == sorted(turns)
    given = {request["rid"]: request["input_ids"] for request in one.engine.requests}
    for turn_id, turn in turns.items():
        assert whole_prompt(turn, turns) == given[turn_id]
    return turns


# One tree


def test_two_gateways_serve_the_turns_of_one_session_alternately(pair: tuple[Door, Door]) -> None:
    session = pair[0].session()
    history = [{"role": "user", "content": "begin"}]
    for door in (*pair, *pair, *pair):
        history = answered(history, say(door, session, history))
    turns = list(check_record(*pair, session).values())
    assert [turn["relation"] for turn in turns] == ["root", *["extends"] * 5]
    assert [turn["parent_id"] for turn in turns] == [None, *(turn["turn_id"] for turn in turns[:-1])]


def test_parallel_calls_of_many_sessions_at_both_gateways_lose_and_double_nothing(
    pair: tuple[Door, Door],
) -> None:
    """Each round asks twice at the same time, once at each gateway, and goes on with one of the answers."""
    rounds = 3

    def episode(number: int) -> tuple[dict[str, Any], list[str]]:
        session = pair[number % 2].session()
        history = [{"role": "user", "content": f"task {number}"}]
        chosen: list[str] = []
        with ThreadPoolExecutor(2) as calls:
            for index in range(rounds):
                replies = list(calls.map(lambda door: say(door, session, history), pair))  # noqa: B023
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
def test_a_client_that_leaves_is_aborted_upstream_within_two_seconds(
    pair: tuple[Door, Door], stream: bool
) -> None:
    one, other = pair
    one.engine.stall_after = 3
    session = one.session()
    call = Call(one, session, stream=stream)
    asked(one, 1)
    if stream:
        assert call.line.recv(65536).startswith(b"HTTP/1.1 200")
    call.hang_up()
    left_at = time.monotonic()
    wait_until(lambda: one.engine.aborted)
    assert time.monotonic() - left_at < 2
    wait_until(lambda: other.turns(session))
    (turn,) = other.turns(session)
    assert (turn["finish_reason"], turn["verdict"]["code"]) == ("abort", "aborted")
    assert one.engine.aborted == [turn["turn_id"]]
    assert trainable(one, session) == []


# Retries


def completion_of(call: Call) -> str:
    """The completion that a streaming call hears, as soon as it hears something."""
    heard = b""
    while not (found := re.search(rb'"id":"(chatcmpl-\w{32})"', heard)):
        heard += call.line.recv(65536)
    return found[1].decode()


def test_a_retry_at_the_other_gateway_after_the_answer_is_the_one_that_trains(
    pair: tuple[Door, Door],
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
    pair: tuple[Door, Door], recorded_first: str
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
    pair: tuple[Door, Door], second_stays: bool
) -> None:
    """The first and the third are one call of one gateway, and the second asks the other in between."""
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
    pair: tuple[Door, Door],
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


def test_sigterm_under_load_drains(processes: Processes, pair: tuple[Door, Door]) -> None:
    survivor, _ = pair
    survivor.engine.stall_after = 3
    with processes.gateway() as (process, door):
        session = door.session()
        calls = [Call(door, session, stream=number % 2 == 1) for number in range(8)]
        asked(door, 8)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(door.url))
        assert survivor.turns(session) == []
        let_on(survivor)
        heard = [call.answer() for call in calls]
        assert process.wait(timeout=20) == 0
    assert [status for status, _ in heard] == [200] * 8
    assert all(json.loads(body)["choices"][0]["finish_reason"] == "stop" for _, body in heard[::2])
    assert all(b"data: [DONE]" in body for _, body in heard[1::2])
    assert [turn["finish_reason"] for turn in survivor.turns(session)] == ["stop"] * 8
    assert len(trainable(survivor, session)) == 8


def test_a_gateway_killed_in_mid_stream_leaves_no_half_turn(
    processes: Processes, pair: tuple[Door, Door]
) -> None:
    survivor, _ = pair
    history = [{"role": "user", "content": "begin"}]
    with processes.gateway() as (process, door):
        session = door.session()
        history = answered(history, say(door, session, history))
        survivor.engine.stall_after = 3
        body = {"messages": history, "stream": True}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        heard = b""
        with httpx.stream("POST", door.url + path_of(session), json=body, headers=headers) as stream:
            assert stream.status_code == 200
            pieces = stream.iter_bytes()
            while b'"content":"an' not in heard:
                heard += next(pieces)
            process.kill()
            with pytest.raises(httpx.TransportError):
                heard += b"".join(pieces)
        assert process.wait(timeout=20) == -signal.SIGKILL
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
