"""A request that kills each engine it meets: two die of it, it is refused, and nobody beside it is."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from gateway.errors import KillsEngines
from gateway.fleet import failover, suspects
from gateway.fleet.fleet_server import FleetServer, Registration
from gateway.fleet.placement import choose_server
from rollout_queue import clock
from tests.support.gateway.calls import RETRY, Call
from tests.support.gateway.mortal_engine import ANSWER, POISON, STOP_AT, TOKENS, MortalEngine
from tests.support.gateway.retry_counts import RetryCounts
from tests.support.gateway.running import CLIENT_KEY, Backends, RunningGateway
from tests.support.redis_clients import async_redis_at
from tests.support.serving import Served
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until

ENGINES = 5


@dataclass
class Scene:
    engines: Sequence[Served]
    made: Sequence[MortalEngine]
    gateways: Sequence[RunningGateway]
    flows: threading.Event

    def dead(self) -> int:
        return sum(engine.ended for engine in self.engines)

    def die(self, count: int) -> bool:
        """Whether so many engines die; one that dies needs a moment to end."""
        wait_until(lambda: self.dead() >= count)
        return self.dead() == count

    def innocent(self, number: int, session_id: str) -> httpx.Response:
        """A call of a session of its own; every second one is another gateway's."""
        gateway = self.gateways[number % len(self.gateways)]
        headers = {"x-session-id": session_id, "authorization": f"Bearer {CLIENT_KEY}"}
        body = {"token_ids": [7, 8, number + 100], "sampling_params": {"max_tokens": TOKENS}}
        return httpx.post(f"{gateway.url}/inference/v1/generate", json=body, headers=headers, timeout=300)


@contextmanager
def staged(
    backends: Backends,
    tokenizer: Tokenizer,
    fuse: int,
    beside: int | Sequence[str] = 20,
    stop_at: int = STOP_AT,
    **other: Any,
) -> Iterator[Scene]:
    """Two gateways, and so many innocent calls, or those of these sessions, in the middle of their answers;
    all get them whole. `other` are settings of the second gateway alone."""
    sessions = [f"innocent-{number}" for number in range(beside)] if isinstance(beside, int) else beside
    backends.clear(None)
    flows = threading.Event()
    with ExitStack() as stack:
        made, served = list[MortalEngine](), list[Served]()
        for number in range(ENGINES):
            die = partial(lambda at: served[at].kill(), number)
            made.append(MortalEngine(tokenizer, die, flows, fuse, stop_at))
            served.append(Served(made[-1].app()))
            stack.callback(served[-1].join)
            stack.callback(served[-1].end)
        settings: Any = {"engines": [each.url for each in served], "engine_wait_s": 20.0}
        settings |= {"failover_patience_s": 60.0}
        gateways = [stack.enter_context(backends.ready_gateway(**settings | more)) for more in ({}, other)]
        pool = stack.enter_context(ThreadPoolExecutor(32))
        stack.callback(flows.set)
        for engine in made:
            stack.callback(setattr, engine, "holds", False)
        scene = Scene(served, made, gateways, flows)
        innocents = [pool.submit(scene.innocent, *each) for each in enumerate(sessions)]
        wait_until(lambda: sum(each.begun for each in made) == len(innocents))
        yield scene
        flows.set()
        for innocent in innocents:
            reply = innocent.result()
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == ANSWER


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lives answers a ping, however busy the machine is."""
    monkeypatch.setattr(failover, "PROBE_S", PATIENCE_S)


def refused(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.headers["x-should-retry"]) == (400, "false"), reply.text
    assert "engine" in reply.text


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": POISON}]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"prompt": ["fine", POISON]}),
    ("/v1/responses", {"input": POISON}),
    ("/v1/messages", CHAT | {"max_tokens": 50}),
]


@pytest.mark.parametrize("fuse", [0, 3])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_two_engines_die_of_a_request_and_none_of_its_retries_by_whatever_gateway(
    own_backends: Backends, tokenizer: Tokenizer, path: str, body: dict[str, Any], fuse: int
) -> None:
    beside = 0 if "n" in body else 20  # answers to one call go to one engine unless it is busier than others
    with staged(own_backends, tokenizer, fuse, beside=beside) as scene:
        first, other = scene.gateways
        reply = first.post(path, body)
        if fuse and body.get("stream"):
            assert (reply.status_code, "kills_engines" in reply.text) == (200, True), reply.text
        else:
            refused(reply)
        for gateway, attempt in ((other, 0), (first, 1), (other, 2)):
            refused(gateway.post(path, body, headers={RETRY: str(attempt)} if attempt else {}))
        assert scene.die(2)


def test_a_gateway_that_reads_late_knows_a_guilty_request_when_its_client_does(
    own_backends: Backends, tokenizer: Tokenizer
) -> None:
    with staged(own_backends, tokenizer, fuse=0, beside=0, poll_every_s=3600.0) as scene:
        for gateway in scene.gateways:
            refused(gateway.post("/v1/chat/completions", CHAT))
        assert scene.die(2)


FLEET = [FleetServer(Registration(id=f"engine-{each}", engine_url="")) for each in range(ENGINES)]


def session_of(engine: int, number: int = 0) -> str:
    """The session with this number whose calls go to the engine while none has many."""
    names = (f"of-{engine}-{each}" for each in itertools.count())
    own = (name for name in names if choose_server(FLEET, name) is FLEET[engine])
    return next(itertools.islice(own, number, None))


def of(engine: int) -> dict[str, str]:
    return {"x-session-id": session_of(engine)}


@pytest.mark.parametrize("fuse", [0, 3])
@pytest.mark.parametrize("gateway", [0, 1])
def test_a_suspect_is_not_refused_for_what_another_request_did_while_it_was_tried(
    own_backends: Backends, tokenizer: Tokenizer, gateway: int, fuse: int
) -> None:
    """Its first engine is killed. Of the second one, a request of either gateway is the cause, and is sent on
    to both dead engines by the gateway that does not know yet that they are dead."""
    with staged(own_backends, tokenizer, fuse, beside=[session_of(0)], poll_every_s=3600.0) as scene:
        for engine in scene.made:
            engine.holds = True
        scene.engines[0].kill()
        wait_until(lambda: any(engine.held for engine in scene.made))
        tried = next(number for number, engine in enumerate(scene.made) if engine.held)
        for engine in scene.made:
            engine.holds = engine.held > 0
        refused(scene.gateways[gateway].post("/v1/chat/completions", CHAT, headers=of(tried)))
        assert scene.die(3)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_deadly_request_is_refused_once_the_calls_beside_it_are_cleared(
    own_backends: Backends, tokenizer: Tokenizer, retry_counts: RetryCounts, leaves: bool
) -> None:
    """Also if its client leaves before that, and comes again."""
    young = [session_of(engine, number) for engine in range(1, ENGINES) for number in range(2)]
    with staged(own_backends, tokenizer, fuse=0, beside=young, stop_at=3) as scene:
        first, other = scene.gateways
        call = Call(first, {"session_id": session_of(0)}, **CHAT)
        assert scene.die(2)
        if leaves:
            call.hang_up()
            wait_until(lambda: retry_counts.left)
        scene.flows.set()
        if not leaves:
            status, said = call.answer()
            assert (status, b"engine" in said) == (400, True), said
        for gateway in (first, other):
            refused(gateway.post("/v1/chat/completions", CHAT, headers={RETRY: "1"}))
        assert scene.die(2)


def test_a_deadly_request_is_refused_although_a_call_beside_it_has_no_end(
    own_backends: Backends, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "DECIDED_WITHIN_S", 4.0)
    young = [session_of(engine) for engine in range(1, ENGINES)]
    with staged(own_backends, tokenizer, fuse=0, beside=young, stop_at=3) as scene:
        refused(scene.gateways[0].post("/v1/chat/completions", CHAT, headers=of(0)))
        assert scene.die(2)


def test_a_suspect_is_not_refused_because_an_engine_had_died_before_it_was_tried_there(
    own_backends: Backends, tokenizer: Tokenizer
) -> None:
    """Its gateway does not know yet that the engine is gone, which comes back afterwards."""
    following = choose_server(FLEET[1:], session_of(0))
    assert following is not None
    with staged(own_backends, tokenizer, fuse=0, beside=[session_of(0)]) as scene:
        gone = scene.made[FLEET.index(following)]
        gone.gone = True
        scene.engines[0].kill()
        wait_until(lambda: not gone.gone)


def test_the_error_of_a_guilty_request_waits_for_all_gateways_also_in_another_answer_to_the_call(
    own_backends: Backends,
) -> None:
    """Else its client would try it again at a gateway that does not know it yet."""
    turned = TurnedClock()

    async def judged() -> None:
        redis = async_redis_at(own_backends.redis_url)
        known = suspects.Suspects(redis)
        noting = asyncio.create_task(known.note("poison", guilty=True))
        await asyncio.sleep(0)  # here, the verdict is known
        telling = asyncio.create_task(suspects.Case(known, lambda: "poison").check())
        await asyncio.wait([telling], timeout=0.05)  # without the fault, no event shows that it waits
        assert not telling.done()
        while not (telling.done() and noting.done()):
            turned.turn(suspects.CURRENT_S)
            await asyncio.sleep(0.001)  # Redis answers meanwhile
        with pytest.raises(KillsEngines):
            await telling
        await redis.aclose()

    own_backends.clear(None)
    with clock.using(turned):
        asyncio.run(asyncio.wait_for(judged(), PATIENCE_S))
