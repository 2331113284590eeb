"""Engines that fail in the middle of an answer: another one continues it, and spans name the engines."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import msgpack, structs
from starlette.responses import JSONResponse, PlainTextResponse, Response
from tokenizers import Tokenizer

from gateway.edge.errors import api_error
from gateway.errors import GatewayError
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.failover import Sampler, Waits
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.generate_request import ANY, AllowedVersions, SampleRequest, SamplingParameters
from gateway.fleet.placement import WantedServer
from gateway.prometheus import Metrics
from rollout_queue import clock
from rollout_queue.contract.records import Span
from rollout_queue.http.errors import ApiError
from tests.support.gateway.fake_engine import FakeEngine, Interruption, logprob_of
from tests.support.gateway.gated_engine import GatedEngine
from tests.support.redis_clients import async_redis_at
from tests.support.serving import free_port, serving
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until_async

PROMPT = [1, 2, 3]
ANSWER = [*range(100, 112)]
VOCABULARY = 4096


@dataclass
class Endpoint:
    """A server address behind which a test can exchange the fake engine."""

    part: FakeEngine
    url: str = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.part.app()(scope, receive, send)


@pytest.fixture(scope="module")
def endpoints(tokenizer: Tokenizer) -> Iterator[list[Endpoint]]:
    endpoints = [Endpoint(FakeEngine(tokenizer)), Endpoint(FakeEngine(tokenizer))]
    with serving(endpoints[0]) as endpoints[0].url, serving(endpoints[1]) as endpoints[1].url:
        yield endpoints


@dataclass
class Scene:
    """Two engines that give the same answer, the fleet that holds both, and a sampler."""

    engines: list[GatedEngine]
    fleet: Fleet
    sampler: Sampler
    metrics: Metrics
    end: int
    heard: list[OutputChunk] = field(default_factory=list)

    @property
    def first(self) -> GatedEngine:
        """The engine that gets the session's first call."""
        server = self.fleet.rotation.choose(WantedServer("s"))
        assert server is not None
        return self.engines[int(server.id[-1])]

    @property
    def second(self) -> GatedEngine:
        return next(engine for engine in self.engines if engine is not self.first)

    @property
    def whole(self) -> list[int]:
        return [*ANSWER, self.end]

    async def read_versions(self) -> None:
        """Refresh until the fleet knows the engines' versions: it asks servers in a steady state in turn."""
        versions = [int(engine.version) for engine in self.engines]
        while [server.version for server in self.fleet.servers.values()] != versions:
            await self.fleet.refresh()
            await asyncio.sleep(0.01)  # a fleet that was refreshed just now asks no steady server

    def only(self, engine: GatedEngine) -> None:
        """Remove the other engine from the fleet."""
        del self.fleet.servers[f"engine-{1 - self.engines.index(engine)}"]

    def ask(self, **parameters: Any) -> SampleRequest:
        asked = {"max_new_tokens": 100, "stop_token_ids": [self.end], **parameters}
        return SampleRequest("rid", "s", ANY, PROMPT, SamplingParameters(**asked))

    async def hear(self, wanted: SampleRequest | None = None) -> OutputChunk:
        """Sample the whole answer; return its last piece."""
        self.heard.clear()
        await self.sampler.sample(wanted or self.ask(), self.take)
        return self.heard[-1]

    async def refused(self, wanted: SampleRequest | None = None) -> ApiError:
        """Sample an answer that fails; return what the client is told."""
        with pytest.raises(GatewayError) as caught:
            await self.hear(wanted)
        return api_error(caught.value)

    def take(self, piece: OutputChunk) -> None:
        self.heard.append(piece)

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.heard for token in piece.ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for piece in self.heard for logprob in piece.logprobs]

    def faults(self, reason: str, outcome: str = "retried") -> float:
        labels = {"reason": reason, "outcome": outcome}
        return self.metrics.registry.get_sample_value("weir_engine_faults_total", labels) or 0.0


@pytest.fixture
async def scene(endpoints: list[Endpoint], tokenizer: Tokenizer, redis_url: str) -> AsyncIterator[Scene]:
    async with staged(endpoints, tokenizer, redis_url) as scene:
        yield scene


@asynccontextmanager
async def staged(
    endpoints: list[Endpoint], tokenizer: Tokenizer, redis_url: str, silence_s: float = 5.0
) -> AsyncIterator[Scene]:
    """A scene with other timeouts than the default."""
    engines = [GatedEngine(tokenizer, mind=list(ANSWER)) for _ in endpoints]
    endpoints[0].part, endpoints[1].part = engines
    redis, engine, metrics = async_redis_at(redis_url), EngineClient(silence_s), Metrics()
    fleet = Fleet(redis, engine, None, [endpoint.url for endpoint in endpoints])
    sampler = Sampler(
        engine,
        fleet,
        metrics,
        text_of=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        vocab_size=VOCABULARY,
        engine_wait_s=0.5,
        patience_s=1.0,
    )
    (end,) = tokenizer.encode("<|im_end|>").ids
    scene = Scene(engines, fleet, sampler, metrics, end)
    for each in scene.engines:
        each.received = lambda: len(scene.ids)
    try:
        while any(server.state != "ready" for server in fleet.servers.values()):
            await fleet.refresh()
        yield scene
    finally:
        await sampler.close()
        await fleet.close()
        await engine.close()
        await redis.aclose()


EARLY_ENDS = [
    Interruption(5, "reset"),
    Interruption(5, "abort"),
    Interruption(5, {"error": {"message": "a", "type": "t", "code": 500, "retryable": False}}),
    Interruption(5, {"object": "error", "message": "flat", "type": "503", "param": None, "code": 503}),
    Interruption(5, {"error": "a string"}),
    Interruption(5, {"output_ids": [7], "meta_info": {"completion_tokens": 99}}),
    Interruption(5, {"output_ids": [VOCABULARY], "meta_info": {"completion_tokens": 6,
                     "output_token_logprobs": [[-1.0, VOCABULARY, None]]}}),
    Interruption(5, {"output_ids": [4095], "meta_info": {"completion_tokens": 6,
                     "finish_reason": {"type": "stop", "matched": "NaN happened"},
                     "output_token_logprobs": [[-1.0, 4095, None]]}}),
]  # fmt: skip


@pytest.mark.parametrize("interruption", EARLY_ENDS)
@pytest.mark.parametrize("cumulative", [False, True])
async def test_an_answer_that_breaks_off_goes_on_elsewhere_token_for_token(
    scene: Scene, interruption: Interruption, cumulative: bool
) -> None:
    first, second = scene.first, scene.second
    first.cumulative = second.cumulative = cumulative
    first.interruptions.append(interruption)
    last = await scene.hear()
    assert scene.ids == scene.whole
    assert scene.logprobs == [logprob_of(index) for index in range(len(scene.whole))]
    assert last.finish == "stop"
    one, two = (f"engine-{scene.engines.index(engine)}" for engine in (first, second))
    assert last.versions == (Span(0, 0, 5, one), Span(0, 5, 13, two))
    assert scene.heard[0].server == one
    (again,) = second.requests
    assert again["input_ids"] == PROMPT + ANSWER[:5]
    assert again["sampling_params"]["max_new_tokens"] == 95
    assert again["rid"] == "1.rid"


async def test_an_answer_by_one_engine_names_none_in_its_spans_and_a_long_prompt_is_sent_whole(
    scene: Scene,
) -> None:
    prompt = [n % VOCABULARY for n in range(100_000)]
    last = await scene.hear(structs.replace(scene.ask(), input_ids=prompt))
    assert last.versions == (Span(0, 0, 13),)
    assert scene.ids == scene.whole
    assert scene.first.requests[0]["input_ids"] == prompt


async def test_an_engine_that_dies_again_and_again_is_asked_again_for_as_long_as_tokens_come(
    scene: Scene,
) -> None:
    engine = scene.first
    scene.only(engine)
    engine.stop_after = 2
    engine.version = "3"
    last = await scene.hear()
    assert scene.ids == scene.whole
    assert last.versions == (Span(3, 0, 13),)
    assert [body["rid"] for body in engine.requests] == ["rid", *(f"{n}.rid" for n in range(1, 7))]


async def test_each_part_keeps_the_version_that_its_engine_reported(scene: Scene) -> None:
    first, second = scene.first, scene.second
    first.version, second.version = "4", "7"
    first.interruptions.append(Interruption(6, "abort"))
    first.spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 6}]
    second.spans = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 7}]
    versions = (await scene.hear()).versions
    spans = [(span.version, span.start, span.end) for span in versions]
    assert spans == [(3, 0, 2), (4, 2, 6), (7, 6, 9), (8, 9, 13)]
    assert len({span.engine for span in versions}) == 2


async def test_tokens_of_one_event_that_may_be_of_two_versions_are_sampled_again(scene: Scene) -> None:
    """This happens if the client does not stream and the engine dies before it sends the version spans."""
    first = scene.first
    events = [
        {"output_ids": ANSWER[:2], "meta_info": meta("1", ANSWER[:2], 2)},
        {"output_ids": ANSWER[2:6], "meta_info": meta("2", ANSWER[2:6], 6)},
    ]
    first.raw = "".join(f"data: {text}\n\n" for text in map(json_of, events)).encode()
    scene.second.version = "2"
    last = await scene.hear(scene.ask(stream_interval=64))
    assert scene.ids == scene.whole
    assert [(span.version, span.start, span.end) for span in last.versions] == [(1, 0, 2), (2, 2, 13)]


def json_of(value: Any) -> str:
    return bytes(JSONResponse(value).body).decode()


def meta(version: str, ids: list[int], total: int) -> dict[str, Any]:
    return {
        "completion_tokens": total,
        "weight_version": version,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
    }


FAULTS: list[Response] = [
    JSONResponse({"error": "a string"}, 500),
    JSONResponse({"error": {"message": "nested"}}, 503),
    JSONResponse({"object": "error", "message": "flat", "type": "503", "param": None, "code": 503}, 503),
    JSONResponse({"error": "Unauthorized"}, 401),
    JSONResponse({"detail": "Not Found"}, 404),
    PlainTextResponse("Internal Server Error", 500),
    PlainTextResponse("", 502),
    PlainTextResponse("not an event", 200),
]


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_error_of_any_shape_is_the_engines_and_another_answers(
    scene: Scene, fault: Response
) -> None:
    scene.first.refusals.append(fault)
    await scene.hear()
    assert scene.ids == scene.whole


TOO_LONG = (
    "The input is longer than the model's context length (512 tokens)",
    "Input length (508 tokens) exceeds the maximum allowed length (506 tokens). Use a shorter input.",
)
REFUSALS: list[tuple[Response, str | None]] = [
    (JSONResponse({"error": "sampling_params: unknown field"}, 400), None),
    (JSONResponse({"object": "error", "message": "flat", "type": "Bad Request", "code": 400}, 400), None),
    (
        PlainTextResponse(
            'data: {"error":{"message":"too long","type":"invalid_request_error","code":400}}\n\n'
            "data: [DONE]\n\n"
        ),
        None,
    ),
    (
        PlainTextResponse(
            'data: {"output_ids":[],"meta_info":{"completion_tokens":0,"finish_reason":{"type":"abort",'
            '"message":"invalid stop_regex","status_code":400,"err_type":"BadRequestError"}}}\n\n'
        ),
        None,
    ),
    (JSONResponse({"error": {"message": TOO_LONG[0]}}, 400), "context_length_exceeded"),
    (JSONResponse({"error": {"message": TOO_LONG[1]}}, 400), "context_length_exceeded"),
]


@pytest.mark.parametrize(("refusal", "code"), REFUSALS)
async def test_what_is_the_requests_fault_is_a_400_at_once(
    scene: Scene, refusal: Response, code: str | None
) -> None:
    scene.first.refusals.append(refusal)
    said = await scene.refused()
    assert (said.status, code in (None, said.code)) == (400, True)
    assert scene.second.requests == []


@pytest.mark.parametrize("words", [{"error": {"message": "no", "code": 500}}, "abort", "reset"], ids=repr)
async def test_when_patience_is_over_the_engines_words_are_a_503(scene: Scene, words: Any) -> None:
    for engine in scene.engines:
        engine.interruptions.extend([Interruption(0, words)] * 50)
    said = await scene.refused()
    assert (said.status, said.type) == (503, "engine_unavailable")
    assert said.headers["retry-after"]
    assert sum(len(engine.requests) for engine in scene.engines) <= 12


async def test_a_request_that_breaks_every_engine_is_not_shown_to_all_of_them_for_ever(scene: Scene) -> None:
    for engine in scene.engines:
        engine.interruptions.extend([Interruption(0, "reset")] * 50)
    scene.sampler.engine_wait_s = 60
    await scene.refused()
    assert sum(len(engine.requests) for engine in scene.engines) == 5


async def test_a_silent_engine_is_left_for_another_and_told_to_stop(
    endpoints: list[Endpoint], tokenizer: Tokenizer, redis_url: str, turned: TurnedClock
) -> None:
    async with staged(endpoints, tokenizer, redis_url, silence_s=60) as scene:
        first = scene.first
        first.stall_after = 4
        answering = asyncio.create_task(scene.hear())
        await wait_until_async(lambda: len(scene.ids) == 4)
        turned.turn(60)
        await answering
        assert scene.ids == scene.whole
        await wait_until_async(lambda: first.aborted == ["rid"])
        assert scene.faults("stalled") == 1


async def test_bytes_of_an_answer_are_a_sign_that_the_engines_process_lives(
    scene: Scene, stopped: TurnedClock
) -> None:
    """The engine accepts the request, and sends the tokens half a second later."""
    server = scene.fleet.rotation.choose(WantedServer("s"))
    assert server is not None
    await scene.sampler.sample(scene.ask(), scene.take, lambda _: stopped.turn(0.5))
    assert server.signs["process"] == clock.monotonic()


async def test_silence_everywhere_is_a_504(
    endpoints: list[Endpoint], tokenizer: Tokenizer, redis_url: str
) -> None:
    async with staged(endpoints, tokenizer, redis_url, silence_s=0.3) as scene:
        for engine in scene.engines:
            engine.stall_after = 0
        said = await scene.refused()
        assert (said.status, said.type) == (504, "timeout_error")


async def test_an_engine_that_is_not_there_gets_no_second_call(scene: Scene, stopped: TurnedClock) -> None:
    gone = next(iter(scene.fleet.servers.values()))
    move(gone, f"http://127.0.0.1:{free_port()}")
    for n in range(6):
        await scene.hear(structs.replace(scene.ask(), session_id=f"s{n}"))
        assert scene.ids == scene.whole
    assert gone.breaker.state == "open"
    assert scene.faults("refused") == 1
    assert scene.metrics.registry.get_sample_value("weir_breaker_open", {"server": gone.id}) == 1


async def test_an_answer_waits_for_the_only_engine_to_come_back(scene: Scene) -> None:
    engine = scene.first
    scene.only(engine)
    scene.sampler.engine_wait_s = scene.sampler.patience_s = 300.0
    (server,) = scene.fleet.servers.values()
    url = server.registration.engine_url
    engine.interruptions.append(Interruption(3, "reset"))

    def hear(piece: OutputChunk) -> None:
        scene.take(piece)
        if len(scene.ids) == 3:
            move(server, f"http://127.0.0.1:{free_port()}")

    answering = asyncio.create_task(scene.sampler.sample(scene.ask(), hear))
    await wait_until_async(lambda: scene.faults("refused"))
    assert server.breaker.open_until
    server.breaker.open_until = clock.monotonic() + 3600
    move(server, url)
    server.state = "dead"
    while server.state != "ready":
        await scene.fleet.refresh()  # finds that the server is back, which ends the breaker's hour
    await asyncio.wait_for(answering, 300)
    assert scene.ids == scene.whole
    assert server.breaker.state == "closed"


def move(server: FleetServer, url: str) -> None:
    server.registration = structs.replace(server.registration, engine_url=url)


@pytest.mark.parametrize("words", ["reset", "abort"])
async def test_an_answer_that_is_complete_when_its_engine_fails_needs_no_other_engine(
    scene: Scene, words: Any
) -> None:
    first, second = scene.first, scene.second
    for parameters, interruption, finish in (
        ({"max_new_tokens": 5}, Interruption(5, words), "length"),
        ({"stop_token_ids": [ANSWER[4]]}, Interruption(5, words), "stop"),
    ):
        first.interruptions.append(interruption)
        first.script.append([*ANSWER, *ANSWER])
        last = await scene.hear(scene.ask(**{"max_new_tokens": 100, **parameters}))
        assert (last.finish, last.ids) == (finish, []) or last.ids
        assert scene.ids == ANSWER[:5]
        assert [(span.start, span.end) for span in last.versions] == [(0, 5)]
    assert second.requests == []


async def test_a_stop_string_across_both_parts_ends_the_answer(scene: Scene, tokenizer: Tokenizer) -> None:
    first, second = scene.first, scene.second
    answer = "so it is. Observation: nothing else"
    for engine in scene.engines:
        engine.mind = answer
    ids = tokenizer.encode(answer).ids
    until = next(n for n in range(len(ids)) if "Observation:" in tokenizer.decode(ids[:n]))
    seam = until - 2
    assert seam > 0
    first.interruptions.append(Interruption(seam, "reset"))
    second.stall_after = until - seam  # so the engine still has tokens to send when the answer is over
    last = await scene.hear(scene.ask(stop=["Observation:"]))
    assert second.requests, "the first engine failed before the answer's end"
    assert scene.ids == ids[:until]
    assert (last.finish, last.matched) == ("stop", "Observation:")
    assert [(span.start, span.end) for span in last.versions] == [(0, seam), (seam, until)]
    assert second.aborted == ["1.rid"]


async def test_the_second_engine_finds_a_stop_string_in_its_own_part(
    scene: Scene, tokenizer: Tokenizer
) -> None:
    answer = "one two three four five six seven eight nine STOP ten"
    for engine in scene.engines:
        engine.mind = answer
    scene.first.interruptions.append(Interruption(2, "reset"))
    last = await scene.hear(scene.ask(stop=["STOP"]))
    assert (last.finish, last.matched) == ("stop", "STOP")
    assert tokenizer.decode(scene.ids).endswith("STOP")


async def test_the_gateway_finds_stop_strings_for_engines_without_a_tokenizer(
    scene: Scene, tokenizer: Tokenizer
) -> None:
    answer = "so it is. Observation: nothing else, although there is much more to say"
    for engine in scene.engines:
        engine.mind, engine.has_tokenizer, engine.pace_s = answer, False, 0.01
    scene.sampler.engine_wait_s = 60
    ids = tokenizer.encode(answer).ids
    until = next(n for n in range(len(ids)) if "Observation:" in tokenizer.decode(ids[:n]))
    for number in range(3):
        last = await scene.hear(scene.ask(stop=["never said", "Observation:"], stream_interval=16))
        assert (scene.ids, last.finish, last.matched) == (ids[:until], "stop", "Observation:"), number
        assert [(span.start, span.end) for span in last.versions] == [(0, until)]
    asked = [request["sampling_params"] for engine in scene.engines for request in engine.requests]
    assert sum("stop" in each for each in asked) <= len(scene.engines), "each engine refuses once"
    assert all(server.breaker.state == "closed" for server in scene.fleet.servers.values())


@pytest.mark.parametrize("stop", [[], ["END"]])
async def test_a_refusal_that_repeats_the_clients_words_does_not_tell_that_a_tokenizer_is_missing(
    scene: Scene, stop: list[str]
) -> None:
    words = "stop=['x'] is unavailable when skip_tokenizer_init=True"
    refusal = JSONResponse({"error": f"the grammar {words!r} is invalid"} if stop else {"error": words}, 400)
    scene.first.refusals.append(refusal)
    assert (await scene.refused(scene.ask(stop=stop))).status == 400
    assert all(server.has_tokenizer for server in scene.fleet.servers.values())


async def test_a_pinned_answer_goes_on_only_with_its_version(scene: Scene) -> None:
    first, second = scene.first, scene.second
    first.version, second.version = "12", "13"
    await scene.read_versions()
    first.interruptions.append(Interruption(5, "reset"))
    last = await scene.hear(structs.replace(scene.ask(), allowed=AllowedVersions(12)))
    assert last.versions == (Span(12, 0, 13),)
    assert second.requests == []
    scene.only(second)
    assert (await scene.refused(structs.replace(scene.ask(), allowed=AllowedVersions(12)))).status == 503


async def test_tokens_of_another_version_are_no_part_of_a_pinned_answer(scene: Scene) -> None:
    first = scene.first
    first.version = scene.second.version = "12"
    await scene.read_versions()
    first.version = "13"  # the fleet has not read this version yet
    last = await scene.hear(structs.replace(scene.ask(), allowed=AllowedVersions(12)))
    assert last.versions == (Span(12, 0, 13),)
    assert len(first.requests) == 1


@pytest.mark.parametrize("seen", [False, True])
async def test_a_constrained_answer_starts_again_only_where_nobody_saw_its_beginning(
    scene: Scene, seen: bool
) -> None:
    """It is not continued, because the grammar of the rest is another one."""
    scene.first.interruptions.append(Interruption(5, "reset"))
    if seen:
        assert (await scene.refused(scene.ask(structural_tag="{}"))).status == 503
        assert (scene.ids, scene.second.requests) == (ANSWER[:5], [])
    else:
        await scene.hear(scene.ask(structural_tag="{}", stream_interval=2))
        assert scene.ids == scene.whole
        assert scene.second.requests[0]["input_ids"] == PROMPT


async def test_chunks_are_taken_in_the_context_of_their_call(scene: Scene) -> None:
    """Connections are kept, so the bytes of one call may arrive on the connection that another one made."""
    call, taken = ContextVar[int]("call"), list[tuple[int, int]]()

    def hear(piece: OutputChunk) -> None:
        taken.extend((number, call.get()) for _ in piece.ids)

    for number in range(3):
        call.set(number)
        await asyncio.create_task(scene.sampler.sample(scene.ask(), hear))
    assert taken == [(number, number) for number in range(3) for _ in scene.whole]


async def test_what_a_chunk_waits_for_is_awaited_before_the_next_one(scene: Scene) -> None:
    free, waiting, engine = asyncio.Event(), asyncio.Event(), scene.first
    engine.stall_after = 3

    async def wait() -> None:
        engine.open = True
        waiting.set()
        await free.wait()

    def hear(piece: OutputChunk) -> Waits:
        scene.take(piece)
        return wait

    answering = asyncio.create_task(scene.sampler.sample(scene.ask(), hear))
    await waiting.wait()
    heard = scene.ids.copy()
    await asyncio.sleep(0.2)  # the engine sends the rest; nothing shows that none of it is taken
    assert scene.ids == heard != scene.whole
    free.set()
    await answering
    assert scene.ids == scene.whole


async def test_a_client_that_disconnects_stops_the_engine(scene: Scene) -> None:
    first, second = scene.first, scene.second
    first.interruptions.append(Interruption(3, "reset"))
    second.stall_after = 4

    def hear(piece: OutputChunk) -> None:
        scene.take(piece)
        if len(scene.ids) == 7:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await scene.sampler.sample(scene.ask(), hear)
    assert second.aborted == ["1.rid"]
    assert all(server.in_flight == 0 for server in scene.fleet.servers.values())


async def test_a_cancelled_call_stops_the_engine(scene: Scene) -> None:
    first = scene.first
    first.stall_after = 0
    task = asyncio.create_task(scene.hear())
    await wait_until_async(lambda: first.stalled)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first.aborted == ["rid"]
    assert all(server.in_flight == 0 for server in scene.fleet.servers.values())


async def test_a_stale_connection_counts_as_no_fault_of_the_engine(scene: Scene) -> None:
    """The engine closes an idle connection just when a request is sent on it."""
    closing: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not closing:
            closing.append(writer)
            writer.close()
            return
        event = {"output_ids": [scene.end], "meta_info": meta("0", [scene.end], 1)}
        event["meta_info"] |= {"finish_reason": {"type": "stop", "matched": scene.end}}  # type: ignore[operator]
        body = f"data: {json_of(event)}\n\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scene.only(scene.first)
    (there,) = scene.fleet.servers.values()
    move(there, f"http://127.0.0.1:{port}")
    async with server:
        await scene.hear()
    assert scene.ids == [scene.end]
    assert scene.faults("lost") == 1
    assert scene.metrics.registry.get_sample_value("weir_breaker_open", {"server": there.id}) is None


async def test_many_answers_survive_the_death_of_their_engine(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    first = scene.first
    first.interruptions.extend([Interruption(n % 7, "reset") for n in range(16)])

    async def one(n: int) -> list[int]:
        ids: list[int] = []

        def hear(piece: OutputChunk) -> None:
            ids.extend(piece.ids)

        await scene.sampler.sample(structs.replace(scene.ask(), rid=f"r{n}"), hear)
        return ids

    answers = await asyncio.gather(*(one(n) for n in range(32)))
    assert answers == [scene.whole] * 32


def test_a_span_names_an_engine_on_the_wire_only_where_it_has_one() -> None:
    """Older records and readers have spans without an engine."""
    old = msgpack.encode({"version": 1, "start": 0, "end": 2})
    assert msgpack.encode(Span(1, 0, 2)) == old
    assert msgpack.decode(old, type=Span) == Span(1, 0, 2)
    assert msgpack.decode(msgpack.encode(Span(1, 0, 2, "r0")), type=Span).engine == "r0"
