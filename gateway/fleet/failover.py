"""Failover: samples one answer on as many engines as necessary. If one fails, another continues the answer.

wanted ──▶ server ──▶ chunks … ──▶ the last chunk
             ▲           │ fault
             └─ backoff ─┘   prompt + tokens so far, under a new rid, until the time limit ──▶ EngineFault

A rid is SGLang's id of a request; an abort names it.
"""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gateway.errors import EngineFault, RequestRefused
from gateway.fleet.answer import PartialAnswer
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.event_stream import OutputChunk
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import EngineWait, FleetServer
from gateway.fleet.generate_request import SampleRequest
from gateway.fleet.placement import WantedServer
from gateway.fleet.suspects import Case, request_digest
from gateway.prometheus import Metrics
from rollout_queue import clock

Waits = Callable[[], Awaitable[None]]
OnChunk = Callable[[OutputChunk], Waits | None]
"""Takes a chunk. Returns what is awaited before the engine is read further; None if nothing is."""
OnEngine = Callable[[bool], None]
"""Called with True when an engine has accepted the request, with False when it failed afterwards."""

logger = logging.getLogger(__name__)

MAX_FRUITLESS = 4
"""Consecutive attempts that may end without a new token. Of one request, two engines die (`suspects.py`)."""
ENDED = frozenset({"lost", "broken"})
"""Faults that may be the end of the engine's process."""
PROBE_S = 1.0
"""How long an engine whose connection has ended may take to show that it lives."""
ENDS_WITHIN_S = 0.1
BACKOFF_FIRST_S, BACKOFF_LONGEST_S = 0.05, 2.0
HARMLESS = frozenset({"aborted", "busy", "no_tokenizer"})
"""Faults that the server's circuit breaker does not count."""
NOT_ACCEPTED = frozenset({"refused", "busy", "no_tokenizer"})
"""Faults of a server that did not accept the request: the request cannot be their cause."""
NO_TOKENIZER = re.compile(r"[a-z ]+: stop=.* is unavailable when skip_tokenizer_init=True", re.DOTALL)
"""How SGLang refuses a stop string if it was started with `--skip-tokenizer-init`. Others may repeat a
client's words, but do not begin so."""
NO_ADAPTER = re.compile(
    r"[a-z ]+: (Got LoRA adapter that has never|Failed to implicitly load|LoRA|The follow)"
)
"""How SGLang refuses an adapter that it does not have: it has started again since it was asked."""


@dataclass
class RetryState:
    """The faults of one answer since its last token, and the time limit of its retries."""

    until: float = 0.0
    """When the last retry may begin, by clock.monotonic(); 0 while there is no fault."""
    faults: int = 0
    fruitless: int = 0
    """Faults that the request itself may have caused, because the server had accepted it."""

    def progressed(self) -> None:
        """A new token arrived."""
        self.until, self.faults, self.fruitless = 0.0, 0, 0

    def waited(self, began: float) -> None:
        """A suspect has waited for others since then: its own time goes on now."""
        if self.until:
            self.until += clock.monotonic() - began

    def left_s(self) -> float:
        return self.until - clock.monotonic()

    def backoff_s(self, fault: EngineFault, limit_s: float) -> float:
        """How long to wait before the next attempt. Raises the fault if no attempt is left."""
        if not self.until:
            self.until = clock.monotonic() + limit_s
        self.faults += 1
        self.fruitless += fault.reason not in NOT_ACCEPTED
        if self.fruitless > MAX_FRUITLESS or self.left_s() <= 0:
            raise fault
        if self.faults == 1:
            return 0.0  # the first retry uses another server or a new connection, so it need not wait
        longest_s = min(BACKOFF_FIRST_S * 2.0**self.faults, BACKOFF_LONGEST_S, self.left_s())
        return longest_s * random.uniform(0.5, 1.0)


@dataclass
class Delivery:
    """Passes on the chunks of one engine where they arrive, outside of the task, unless one has to wait."""

    answer: PartialAnswer
    server: FleetServer
    wait: EngineWait
    case: Case
    retries: RetryState
    on_chunk: OnChunk
    works: Callable[[FleetServer], None]
    """Is called if the server failed before."""
    waits: Waits | None = None
    """What is awaited before the next chunk is passed on."""
    _chunks: list[OutputChunk] = field(default_factory=list)
    _checked: Iterator[OutputChunk] = field(default_factory=lambda: iter(()))

    def take(self, chunks: list[OutputChunk]) -> bool:
        """Pass on what can be. Returns whether to go on waiting for more; if not, `catch_up` is due."""
        self.server.gave_bytes(tokens=bool(chunks))
        if self.wait.fault is not None:
            return False  # the task is cancelled
        if chunks and self.server.breaker.failures:
            self.works(self.server)
        self._chunks = chunks
        self.wait.waiting = False
        self.wait.waiting = self._pass_on() and not self.case.needed
        return self.wait.waiting

    async def catch_up(self) -> None:
        """Wait, and pass on the rest. A reader that is slow keeps no suspect on trial."""
        if self.case.needed:
            await self.case.progressed(self.answer.by_engine)
        while self.waits is not None:
            await self.waits()
            self._pass_on()
        if self.case.needed:
            await self.case.progressed(self.answer.by_engine)

    def _pass_on(self) -> bool:
        """Returns whether nothing is left, and the answer has not ended."""
        self.waits = None
        while True:
            for chunk in self._checked:
                if self.retries.faults:
                    self.retries.progressed()
                if (waits := self.on_chunk(chunk)) is not None:
                    self.waits = waits
                    return False
            # Behind a stop string across two engines, the other chunks are not part of the answer.
            if self.answer.finished or not self._chunks:
                return not self.answer.finished
            self._checked = iter(self.answer.take(self._chunks.pop(0)))


@dataclass
class Sampler:
    """Samples answers on the fleet. `text_of` decodes ids as the engine does, with special tokens.

    The time limit of retries is `engine_wait_s` for an answer without tokens, and else `patience_s`.
    """

    engine: EngineClient
    fleet: Fleet
    metrics: Metrics
    text_of: Callable[[list[int]], str]
    vocab_size: int
    engine_wait_s: float
    patience_s: float
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)

    async def close(self) -> None:
        """Wait until the engines have been told to abort every answer that is no longer needed."""
        await asyncio.gather(*self._aborting, return_exceptions=True)

    async def sample(
        self, wanted: SampleRequest, on_chunk: OnChunk, on_engine: OnEngine = lambda _: None
    ) -> None:
        """Call `on_chunk` with each chunk as it arrives, outside of the caller's task.

        The last chunk has `finish` and `versions`, and is never an abort.

        If the caller is cancelled, or `on_chunk` raises, the engine is told to abort. Raises RequestRefused
        if the request is at fault, EngineFault or NoServer if no server completed the answer in time.
        """
        answer = PartialAnswer(wanted, self.text_of, self.vocab_size)
        digest = partial(request_digest, wanted.input_ids, wanted.parameters, wanted.images)
        case = Case(self.fleet.suspects, digest)
        retries, avoid, wait_s = RetryState(), "", self.engine_wait_s
        while not answer.finished:
            cached = (wanted.cached_at, wanted.cached_version)
            asked = WantedServer(wanted.session_id, wanted.allowed, avoid, *cached, wanted.owner)
            server = await self.acquire(asked, wait_s, case, retries)
            try:
                await self._attempt(answer, server, retries, case, on_chunk, on_engine)
                if case.needed:
                    await case.progressed(case.needed)
            except EngineFault as fault:
                on_engine(False)
                dead, tokens = await self.died(fault, server), answer.by_engine
                # The first lost connection may be one from the pool that the engine had closed already.
                closed_in_pool = fault.reason == "lost" and not (dead or retries.faults)
                self._note_fault(fault, answer, server, closed_in_pool)
                if (last := answer.keep_delivered()) is not None:
                    if (waits := on_chunk(last)) is not None:
                        await waits()
                    return
                if dead:
                    began = clock.monotonic()
                    await case.died(server.id, tokens)
                    retries.waited(began)
                await self._back_off(fault, answer, server, retries)
                avoid, wait_s = "" if closed_in_pool else server.id, retries.left_s()
            finally:
                if case.trial is not None:
                    await case.end()

    async def acquire(
        self, asked: WantedServer, wait_s: float, case: Case, retries: RetryState
    ) -> FleetServer:
        """The server for the next attempt. Raises KillsEngines if the request is guilty, and NoServer.

        A suspect gets a server where no other is tried. It is on trial only if the engine lives: it has no
        part in an earlier death. Its wait for others does not count as a retry's.
        """
        suspects = self.fleet.suspects
        while True:
            if clock.monotonic() >= suspects.current_until:
                await suspects.renew()
            await case.check()
            server = await self.fleet.acquire(asked, max(wait_s, 0.0))
            if not case.needed:
                return server
            began = clock.monotonic()
            if await case.begin(server.id):
                lives = False
                try:
                    lives = case.trial is None or await self._lives(server)
                    if lives and case.trial is not None:
                        await suspects.forget_beside(case.trial)
                finally:
                    if not lives:
                        await case.end()
                return server
            if server.freed is not None:
                server.freed(server)  # another call may have the place
            asked = asked._replace(avoid=server.id)
            retries.waited(began)

    async def died(self, fault: EngineFault, server: FleetServer) -> bool:
        """Whether the fault was the end of the engine's process, and nobody had told it to end."""
        if fault.reason not in ENDED or server.state == "draining":
            return False
        if not await self._lives(server):
            return True
        await clock.sleep(ENDS_WITHIN_S)  # a process that ends may lose one connection before it loses all
        return not await self._lives(server)

    async def _lives(self, server: FleetServer) -> bool:
        return await self.engine.responds(f"{server.registration.engine_url}/ping", PROBE_S)

    async def _attempt(
        self,
        answer: PartialAnswer,
        server: FleetServer,
        retries: RetryState,
        case: Case,
        on_chunk: OnChunk,
        on_engine: OnEngine,
    ) -> None:
        """Let one engine continue the answer. Raises EngineFault if it fails before the answer's end."""
        allowed, url = answer.allowed, server.registration.engine_url
        adapter = server.adapter_of(allowed.version, allowed.adapter)
        request = answer.next_request(server.has_tokenizer, adapter)
        trial, wait = server.enter(), EngineWait(answer)
        delivery = Delivery(answer, server, wait, case, retries, on_chunk, self._note_success)
        server.begin_wait(wait)
        try:
            with wait:
                stream = await self.engine.generate(url, request, server.id, adapter)
            on_engine(True)
            try:
                while not answer.finished:
                    with wait:
                        await stream.follow(delivery.take)
                    if delivery.waits is not None or case.needed:
                        await delivery.catch_up()
            finally:
                stream.close()
        except EngineFault:
            raise
        except RequestRefused as error:
            if server.has_tokenizer and answer.has_stops and NO_TOKENIZER.match(error.message):
                server.has_tokenizer = False
                raise EngineFault("no_tokenizer", error.message) from error
            if adapter is not None and NO_ADAPTER.match(error.message):
                raise EngineFault("failed", error.message) from error
            if not answer.ids:
                raise
            # An engine has accepted the request before, so the request is not at fault.
            raise EngineFault("failed", error.message) from error
        except BaseException:
            if answer.cut_short or not answer.finished:
                await self._abort(url, request.rid)
            raise
        finally:
            server.waits.discard(wait)
            server.leave(trial)
        if answer.cut_short:
            await self._abort(url, request.rid)

    def _note_fault(
        self, fault: EngineFault, answer: PartialAnswer, server: FleetServer, closed_in_pool: bool
    ) -> None:
        """Abort the request if the engine may still work on it, and count the fault against the server."""
        if fault.reason in ("stalled", "nonsense"):
            self._begin_abort(server.registration.engine_url, answer.rid)  # not awaited: it may hang, too
        if fault.reason not in HARMLESS and not closed_in_pool:
            server.breaker.failed(unreachable=fault.reason == "refused")
            self.metrics.breakers.labels(server.id).set(server.breaker.state != "closed")

    async def _back_off(
        self, fault: EngineFault, answer: PartialAnswer, server: FleetServer, retries: RetryState
    ) -> None:
        """Wait before the next attempt. Raises the fault if no attempt is left."""
        try:
            answer.check_resumable(fault)
            # An answer that has tokens already is worth a longer wait.
            limit_s = self.patience_s if answer.ids else self.engine_wait_s
            backoff_s = retries.backoff_s(fault, limit_s)
        except EngineFault:
            self.metrics.failovers.labels(fault.reason, "given_up").inc()
            raise
        self.metrics.failovers.labels(fault.reason, "retried").inc()
        logger.warning(
            "generation %s is retried after %d tokens: %s at %s: %s",
            answer.rid,
            len(answer.ids),
            fault.reason,
            server.id,
            fault.message,
        )
        await clock.sleep(backoff_s)

    def _note_success(self, server: FleetServer) -> None:
        self.fleet.call_succeeded(server)
        self.metrics.breakers.labels(server.id).set(0)

    async def _abort(self, engine_url: str, rid: str) -> None:
        """Tell the engine to abort the request, even if the caller is cancelled meanwhile."""
        await asyncio.shield(self._begin_abort(engine_url, rid))

    def _begin_abort(self, engine_url: str, rid: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self.engine.abort(engine_url, rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)
        return task
