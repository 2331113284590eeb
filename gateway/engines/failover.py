"""One answer from as many engines as it takes: where one breaks off, another goes on from its tokens.

wanted ──▶ server ──▶ pieces … ──▶ the last piece
             ▲           │ fault
             └─ backoff ─┘   prompt + tokens so far, under a new rid; until patience is over ──▶ 503, 504
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.engines.answer import PartialAnswer, SampleRequest
from gateway.engines.engine import EngineClient
from gateway.engines.fleet import Fleet, FleetServer
from gateway.engines.stream import Piece
from gateway.errors import EngineFault, RequestRefused
from gateway.metrics import Metrics

__all__ = ["Hear", "SampleRequest", "Sampler"]

Hear = Callable[[Piece], Awaitable[None]]

logger = logging.getLogger(__name__)

FRUITLESS = 4
"""Attempts in a row that may end without one new token: what kills one engine is not shown to all of them."""
BACKOFF_FIRST_S, BACKOFF_LONGEST_S = 0.05, 2.0
INNOCENT = frozenset({"aborted", "busy"})
"""Faults that say nothing against the server."""
UNHEARD = frozenset({"refused", "busy"})
"""Faults of an engine that did not take the request, so that the request cannot be their cause."""


@dataclass
class Patience:
    """How long one answer waits for a next token after a fault, and how often it asks."""

    until: float = 0.0
    """time.monotonic(); 0 while nothing is wrong."""
    faults: int = 0
    fruitless: int = 0

    def rewarded(self) -> None:
        self.until, self.faults, self.fruitless = 0.0, 0, 0

    def left_s(self) -> float:
        return self.until - time.monotonic()

    def backoff_s(self, fault: EngineFault, limit_s: float) -> float:
        """How long to wait before the next attempt; raises the fault when there is to be none."""
        if not self.until:
            self.until = time.monotonic() + limit_s
        self.faults += 1
        self.fruitless += fault.reason not in UNHEARD
        if self.fruitless > FRUITLESS or self.left_s() <= 0:
            raise fault
        if self.faults == 1:
            return 0.0  # elsewhere, or over a fresh connection
        longest_s = min(BACKOFF_FIRST_S * 2.0**self.faults, BACKOFF_LONGEST_S, self.left_s())
        return longest_s * random.uniform(0.5, 1.0)


@dataclass
class Sampler:
    """Samples answers on the fleet. `text_of` decodes ids as the engine does, special tokens included."""

    engine: EngineClient
    fleet: Fleet
    metrics: Metrics
    text_of: Callable[[list[int]], str]
    vocab_size: int
    engine_wait_s: float
    patience_s: float
    _aborting: set[asyncio.Task[None]] = field(default_factory=set)

    async def close(self) -> None:
        """Finish telling engines of answers that nobody waits for."""
        await asyncio.gather(*self._aborting, return_exceptions=True)

    async def sample(self, wanted: SampleRequest, hear: Hear) -> None:
        """Let `hear` have the answer; the last piece has `finish` and `versions`, and is never an abort.

        A caller that is cancelled, or a `hear` that fails, stops the engine's work. Raises
        RequestRefused where the request is at fault; EngineFault or NoServer when patience is over.
        """
        answer = PartialAnswer(wanted, self.text_of, self.vocab_size)
        patience, avoid, wait_s = Patience(), "", self.engine_wait_s
        while not answer.finished:
            server = await self.fleet.acquire(wanted.session_id, wanted.version, max(wait_s, 0.0), avoid)
            try:
                await self._attempt(answer, server, patience, hear)
            except EngineFault as fault:
                # A connection that was kept alive too long says nothing of the engine, the first time.
                stale = fault.reason == "lost" and not patience.faults
                await self._learn(fault, answer, server, stale)
                if (last := answer.settle()) is not None:
                    await hear(last)
                    return
                await self._wait(fault, answer, server, patience)
                avoid, wait_s = "" if stale else server.id, patience.left_s()

    async def _attempt(
        self, answer: PartialAnswer, server: FleetServer, patience: Patience, hear: Hear
    ) -> None:
        """What one engine adds. Raises EngineFault where it ends before the answer does."""
        request, url = answer.request(server.id), server.registration.engine_url
        trial = server.enter()
        try:
            answering = await self.engine.generate(url, request)
            try:
                while not answer.finished:
                    for piece in await answering.read():
                        self._works(server)
                        for checked in answer.take(piece):
                            patience.rewarded()
                            await hear(checked)
                        if answer.finished:
                            break  # a stop string across the seam may leave pieces over
            finally:
                answering.close()
        except EngineFault:
            raise
        except RequestRefused as error:
            if not answer.ids:
                raise
            # One engine took the request: that another does not is its own fault.
            raise EngineFault("failed", error.message) from error
        except BaseException:
            if answer.cut or not answer.finished:
                await self._abort(url, request.rid)
            raise
        finally:
            server.leave(trial)
        if answer.cut:
            await self._abort(url, request.rid)

    async def _learn(
        self, fault: EngineFault, answer: PartialAnswer, server: FleetServer, stale: bool
    ) -> None:
        """The next calls need not make this one's experience."""
        if fault.reason in ("stalled", "nonsense"):
            # Awaited: an engine that aborts by prefix would take the next attempt for this one.
            await self._abort(server.registration.engine_url, answer.rid)
        if fault.reason not in INNOCENT and not stale:
            server.breaker.failed(gone=fault.reason == "refused")
            self.metrics.breakers.labels(server.id).set(server.breaker.state != "closed")

    async def _wait(
        self, fault: EngineFault, answer: PartialAnswer, server: FleetServer, patience: Patience
    ) -> None:
        """Until it is worth another try. Raises EngineFault when it is not."""
        try:
            answer.may_go_on(fault)
            # Tokens that are there are worth a longer wait than a question.
            limit_s = self.patience_s if answer.ids else self.engine_wait_s
            backoff_s = patience.backoff_s(fault, limit_s)
        except EngineFault:
            self.metrics.failovers.labels(fault.reason, "given_up").inc()
            raise
        self.metrics.failovers.labels(fault.reason, "retried").inc()
        logger.warning(
            "generation %s goes on after %d tokens: %s at %s: %s",
            answer.rid,
            len(answer.ids),
            fault.reason,
            server.id,
            fault.message,
        )
        await asyncio.sleep(backoff_s)

    def _works(self, server: FleetServer) -> None:
        if server.breaker.failures:
            self.fleet.works(server)
            self.metrics.breakers.labels(server.id).set(0)

    async def _abort(self, engine_url: str, rid: str) -> None:
        """Goes on when the caller is cancelled once more."""
        task = asyncio.create_task(self.engine.abort(engine_url, rid))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)
        await asyncio.shield(task)
