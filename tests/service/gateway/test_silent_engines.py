"""Engines that hang, or that a partition cuts off: their answers move to another engine within seconds."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send
from tokenizers import Tokenizer

from rollout_queue import clock
from tests.support.gateway.fake_engine import FakeEngine, Interruption
from tests.support.gateway.gated_engine import let_on
from tests.support.gateway.links import Link, link
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.serving import free_port, serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until

TOKENS, STOP_AT = 150, 20
STATUS_TIMEOUT_S = 60.0
"""The fleet's own judgment takes two timeouts of a status, which are real time."""
STEP_S = 0.25
"""A gateway that finds a longer time gone has stood still itself, and blames no engine."""
LONGER_THAN_SILENCE_S = 5
REPLY_S = 60.0
"""Time enough for the gateway's polls and its reply on a busy machine."""
SCHEDULER_SILENCE_S = 3.0


class PacedEngine(FakeEngine):
    """Gives every call the same long answer, and stops in its middle until `flows`. Its scheduler may hang:
    then the engine sends no tokens and answers no `/server_info`, but still answers other requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, mind=[10 + n % 50 for n in range(TOKENS)], stall_after=STOP_AT)
        self.flows = False
        self.hangs = False
        self.pings = 0
        """How often it has said that its process lives."""
        self._app = self.app()
        self._app.router.routes.append(Route("/server_info", self._server_info))

    async def _server_info(self, _: Request) -> Response:
        return JSONResponse({"internal_states": []})

    async def _stall(self) -> None:
        while not self.flows:  # noqa: ASYNC110 - the test that ends it runs in another thread
            await asyncio.sleep(0.005)  # until the test lets the answers flow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_when_it_works(message: Message) -> None:
            while self.hangs:  # noqa: ASYNC110 - the test that ends it runs in another thread
                await asyncio.sleep(0.005)  # until the scheduler works again
            await send(message)

        by_scheduler = scope.get("path") in ("/generate", "/server_info")
        await self._app(scope, receive, send_when_it_works if by_scheduler else send)
        self.pings += scope.get("path") == "/ping"


@dataclass
class Reached:
    """An engine, and the link over which gateways reach it. While the link is cut, the engine is as one whose
    process hangs: the kernel still accepts connections and bytes for it."""

    engine: PacedEngine
    link: Link

    @property
    def url(self) -> str:
        return self.link.url


@dataclass
class Stream:
    """One streamed answer: its token ids, which come at its end, and the number of its events."""

    gateway: RunningGateway
    session_id: str
    ids: list[int] = field(default_factory=list)
    events: int = 0
    failure: Any = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "return_token_ids": True}
        headers = {"authorization": f"Bearer {CLIENT_KEY}", "x-session-id": self.session_id}
        url = self.gateway.url + "/v1/chat/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as reply:
                assert reply.status_code == 200, reply.read()
                for line in reply.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    self.events += 1
                    event = json.loads(line[6:])
                    self.failure = event.get("error", self.failure)
                    for choice in event.get("choices", []):
                        self.ids += choice.get("token_ids") or []
        except Exception as error:  # the test's thread raises it
            self.failure = error

    def whole(self) -> tuple[int, ...]:
        self.thread.join(300)
        assert not self.thread.is_alive()
        assert self.failure is None, self.failure
        return tuple(self.ids)


@pytest.fixture(autouse=True)
def slow_judgment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.server_status.STATUS_TIMEOUT_S", STATUS_TIMEOUT_S)


@pytest.fixture(scope="module")
def engines(tokenizer: Tokenizer) -> Iterator[list[Reached]]:
    with ExitStack() as stack:
        made = [PacedEngine(tokenizer) for _ in range(2)]
        links = [stack.enter_context(link(stack.enter_context(serving(each)))) for each in made]
        yield [Reached(*each) for each in zip(made, links, strict=True)]


@contextmanager
def gateway_over(backends: Backends, urls: list[str], **settings: Any) -> Iterator[RunningGateway]:
    backends.clear(None)
    wide = {"engines": urls, "failover_patience_s": 60.0, "engine_wait_s": 20.0, "poll_every_s": 0.5}
    with backends.gateway(**wide | settings) as gateway:
        wait_until(lambda: all(each["state"] == "ready" for each in servers(gateway)))
        yield gateway


def whole_answers(streams: list[Stream]) -> None:
    """Check that all streams end with the same answer: no token is lost, and none is doubled."""
    assert [len(each) for each in {stream.whole() for stream in streams}] == [TOKENS + 1]


@contextmanager
def cut_off(engine: Reached) -> Iterator[None]:
    engine.link.cut()
    try:
        yield
    finally:
        engine.link.mend()


@contextmanager
def hanging(*engines: Reached) -> Iterator[None]:
    """Their schedulers hang."""
    for each in engines:
        each.engine.hangs = True
    try:
        yield
    finally:
        for each in engines:
            each.engine.hangs = False


def servers(gateway: RunningGateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.admin("GET", "/rollout_servers").json()["data"]
    return sorted(found, key=lambda each: str(each["id"]))


def answers_in_flight(gateway: RunningGateway) -> list[int]:
    return [each["in_flight"] for each in servers(gateway)]


def engines_of(gateway: RunningGateway, stream: Stream) -> list[str]:
    (turn,) = gateway.turns({"session_id": stream.session_id})
    return [span.get("engine") or turn["engine"] for span in turn["versions"]]


def spread(gateway: RunningGateway, engines: list[Reached]) -> list[Stream]:
    """Streams on both engines, each of which has begun and is not complete."""
    flow(engines, False)
    streams = [Stream(gateway, f"s{n}") for n in range(8)]
    wait_until(lambda: all(each.events > 1 for each in streams))
    assert all(answers_in_flight(gateway))
    return streams


def flow(engines: list[Reached], flows: bool = True) -> None:
    """Let the engines complete their answers, or stop in the middle of each."""
    for each in engines:
        each.engine.flows = flows


def longer_than_silence(
    turned: TurnedClock, gateway: RunningGateway, living: Sequence[PacedEngine | Backends] = ()
) -> None:
    """Let so much time pass that answers would move. Meanwhile, the processes of the `living` engines, which
    have answers in flight, respond to probes, which the gateway sends each second."""
    for _ in range(LONGER_THAN_SILENCE_S):
        before = [each.pings for each in living]
        for _ in range(math.ceil(1 / STEP_S) + 1):
            turned.turn(STEP_S)
            answers_in_flight(gateway)
        wait_until(lambda: all(each.pings > ping for each, ping in zip(living, before, strict=True)))  # noqa: B023


def test_the_answers_of_a_silent_engine_move_and_the_engine_comes_back(
    backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    with gateway_over(backends, [each.url for each in engines]) as gateway:
        streams = spread(gateway, engines)
        engines[0].engine.aborted.clear()
        with cut_off(engines[0]):
            turned.turn_until(lambda: answers_in_flight(gateway)[0] == 0, STEP_S)
            flow(engines)
            whole_answers(streams)
            used = [engines_of(gateway, each) for each in streams]
            assert ["engine-0", "engine-1"] in used
            assert ["engine-1"] in used
            assert servers(gateway)[0]["breaker"] != "closed"
            whole_answers([Stream(gateway, "meanwhile")])
        turned.turn_until(lambda: engines[0].engine.aborted, STEP_S)
        turned.turn_until(lambda: served_by_the_first(gateway), STEP_S)
        assert servers(gateway)[0]["breaker"] == "closed"


def test_the_answers_of_an_engine_whose_scheduler_hangs_move_although_its_http_lives(
    backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    urls = [each.url for each in engines]
    with gateway_over(backends, urls, scheduler_silence_s=SCHEDULER_SILENCE_S) as gateway:
        streams = spread(gateway, engines)
        with hanging(engines[0]):
            turned.turn_until(lambda: answers_in_flight(gateway)[0] == 0, STEP_S)
            flow(engines)
            whole_answers(streams)
            assert ["engine-0", "engine-1"] in [engines_of(gateway, each) for each in streams]
            assert servers(gateway)[0]["error"] == "its engine gives no sign of life"
            whole_answers([Stream(gateway, f"meanwhile-{number}") for number in range(4)])
        turned.turn_until(lambda: served_by_the_first(gateway), STEP_S)
        assert servers(gateway)[0]["error"] is None


def test_answers_stay_while_no_scheduler_of_the_fleet_responds(
    backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    """On a slow machine a forward pass may take longer than the setting; then it does so on every engine."""
    urls = [each.url for each in engines]
    with gateway_over(backends, urls, scheduler_silence_s=SCHEDULER_SILENCE_S) as gateway:
        streams = spread(gateway, engines)
        with hanging(*engines):
            longer_than_silence(turned, gateway, [each.engine for each in engines])
        flow(engines)
        whole_answers(streams)
        assert "weir_engine_faults_total{" not in gateway.get("/metrics").text


def test_calls_of_a_hung_engine_get_a_503_if_there_is_no_other(
    backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    wait_s = 4.0
    flow(engines, False)
    with gateway_over(backends, [engines[0].url], engine_wait_s=wait_s) as gateway:
        stream = Stream(gateway, "s")
        wait_until(lambda: stream.events > 1)
        with cut_off(engines[0]), ThreadPoolExecutor(1) as pool:
            for within_s in (2 * wait_s, wait_s):  # the second time, it is known to be silent
                began, calling = clock.monotonic(), pool.submit(gateway.chat)
                turned.turn_until(calling.done, STEP_S)
                refused = calling.result()
                assert (refused.status_code, refused.json()["error"]["type"]) == (503, "engine_unavailable")
                assert clock.monotonic() - began < within_s + REPLY_S
        flow(engines)
        whole_answers([stream])
        assert engines_of(gateway, stream) == ["engine-0"]


def served_by_the_first(gateway: RunningGateway) -> bool:
    """Whether one of a few new sessions is answered by the first engine."""
    for _ in range(8):
        session = gateway.session()
        gateway.chat(max_tokens=1, key=session["api_key"])
        if gateway.turns(session)[0]["engine"] == "engine-0":
            return True
    return False


def test_the_answers_of_a_server_that_reports_its_engines_death_move_at_once(
    gated: RunningGateway, backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    """The connections of a killed engine may stay open, because its children hold them."""
    flow(engines)
    states = {"r0": "ready", "r1": "ready"}

    async def status(request: Request) -> Response:
        return JSONResponse({"state": states[request.path_params["id"]], "version": 0})

    app = Starlette(routes=[Route("/{id}/status", status)])
    with serving(app) as url, gateway_over(backends, []) as gateway:
        backends.engine = gated.engine
        for server_id, engine_url in (("r0", backends.engine_url), ("r1", engines[1].url)):
            body = {"id": server_id, "url": f"{url}/{server_id}", "engine_url": engine_url}
            assert gateway.admin("POST", "/rollout_servers", body).status_code == 200
        wait_until(lambda: gateway.get("/ready").status_code == 200)
        streams = [Stream(gateway, f"s{n}") for n in range(8)]
        wait_until(lambda: gated.engine.stalled)
        states["r0"] = "dead"
        turned.turn_until(lambda: answers_in_flight(gateway)[0] == 0, STEP_S)
        for stream in streams:
            stream.whole()


def test_a_hung_engine_keeps_its_answers_while_there_is_no_other(
    backends: Backends, engines: list[Reached], turned: TurnedClock
) -> None:
    flow(engines, False)
    with gateway_over(backends, [engines[0].url]) as gateway:
        stream = Stream(gateway, "s")
        wait_until(lambda: stream.events > 1)
        with cut_off(engines[0]):
            longer_than_silence(turned, gateway)
        flow(engines)
        whole_answers([stream])
        assert engines_of(gateway, stream) == ["engine-0"]
        assert "weir_engine_faults_total{" not in gateway.get("/metrics").text


@pytest.mark.parametrize("tokens", [0, 3])
def test_an_engine_that_works_in_silence_keeps_its_answers(
    gated: RunningGateway, backends: Backends, engines: list[Reached], turned: TurnedClock, tokens: int
) -> None:
    """A long prefill delays the answer's begin, and the next tokens of every other answer."""
    flow(engines)
    gated.engine.stall_after = tokens
    with gateway_over(backends, [backends.engine_url, engines[1].url]) as gateway:
        backends.engine = gated.engine
        streams = [Stream(gateway, f"s{n}") for n in range(8)]
        wait_until(lambda: gated.engine.stalled)
        longer_than_silence(turned, gateway, [backends])
        let_on(gated)
        for stream in streams:
            stream.whole()
        assert "weir_engine_faults_total{" not in gateway.get("/metrics").text


# Heartbeats: a stream opens with 200 only once an engine works on the answer

CALL = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
HEADERS = {"authorization": f"Bearer {CLIENT_KEY}"}
HEARTBEAT_S, ENGINE_WAIT_S = 10.0, 60.0
"""A call waits for an engine longer than several heartbeats take."""
T = TypeVar("T")


def meanwhile_turning(
    turned: TurnedClock, work: Callable[[], T], begun: Callable[[], bool] = lambda: True
) -> T:
    """What `work` returns. Once it has `begun`, time passes until then."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        wait_until(begun)
        turned.turn_until(working.done, HEARTBEAT_S / 2)
        return working.result()


@pytest.mark.parametrize("engine", ["none", "busy", "lost"])
def test_a_stream_that_no_engine_takes_is_a_503(backends: Backends, turned: TurnedClock, engine: str) -> None:
    settings: dict[str, Any] = {"heartbeat_s": HEARTBEAT_S, "engine_wait_s": ENGINE_WAIT_S}
    if engine == "none":
        settings["engines"] = [f"http://127.0.0.1:{free_port()}"]
    backends.clear(None)
    with backends.gateway(**settings) as gateway:
        if engine != "none":
            backends.engine.refusals.extend(PlainTextResponse("busy", 503) for _ in range(200))
        if engine == "lost":
            backends.engine.refusals.appendleft(None)
            backends.engine.interruptions.append(Interruption(0, "reset"))
        url = gateway.url + "/v1/chat/completions"
        reply = meanwhile_turning(
            turned,
            lambda: gateway.http.post(url, json=CALL, headers=HEADERS),
            lambda: engine != "lost" or len(backends.engine.requests) > 1,
        )
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "engine_unavailable")
        assert reply.headers["retry-after"]


def test_a_stream_that_an_engine_works_on_is_kept_alive(
    gated: RunningGateway, backends: Backends, turned: TurnedClock
) -> None:
    gated.engine.stall_after = 0
    with backends.ready_gateway(heartbeat_s=HEARTBEAT_S) as gateway:
        url = gateway.url + "/v1/chat/completions"
        call = gateway.http.build_request("POST", url, json=CALL, headers=HEADERS)
        reply = meanwhile_turning(turned, lambda: gateway.http.send(call, stream=True))
        lines = reply.iter_lines()
        assert (reply.status_code, next(lines)[:1]) == (200, ":")
        let_on(gated)
        assert [line for line in lines if line][-1] == "data: [DONE]"
