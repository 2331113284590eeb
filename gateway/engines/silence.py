"""Finds engines that hang or cannot be reached, and moves their answers to other engines.

no bytes for a while ──▶ probe ──answered──▶ the engine works
                           └─no answer──▶ silent: its answers move ──a probe is answered──▶ gets calls again
"""

import asyncio
import logging
import time

from gateway.cancellation import cancel_and_wait
from gateway.engines.client import EngineClient
from gateway.engines.fleet import Fleet
from gateway.engines.fleet_server import FleetServer
from gateway.errors import EngineFault
from gateway.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.25
PROBE_AFTER_S = 1.0
SUSPECT_S = 2.0
SILENCE_S = 3.0
PROBE_TIMEOUT_S = 2.0


class SilenceWatch:
    """Watches the servers that have answers in flight. Its rule:

    A sign of life is a byte of any answer, or a response to a probe: `GET /ping` of the engine, with any
    status but 502 and 504, which a proxy sends when it does not reach the engine. SGLang's HTTP process
    responds while its scheduler is in a long prefill, loads weights or is paused, so such an engine is not
    silent. A server with answers in flight is probed once it has sent nothing for PROBE_AFTER_S.

    After SILENCE_S without a sign of life, its answers move. Each moves only if another server can continue
    it: one that is ready, serves the version, and has itself given a sign of life within SILENCE_S. For this,
    all servers are probed as soon as one is suspected (SUSPECT_S). So if the gateway has one server only, or
    reaches none, its answers stay, and wait for at most `engine_timeout_s`. A server that loads weights is
    never silent.

    A server whose answers moved is `silent`: its breaker opens, and it gets no calls until it has responded
    to a probe.

    Silence is not the only reason: `Fleet` gives a server up at once when its status says that it is dead, or
    when nothing listens at its address.
    """

    def __init__(self, fleet: Fleet, engine: EngineClient, metrics: Metrics) -> None:
        self._fleet = fleet
        self._engine = engine
        self._metrics = metrics
        self._checked_at = time.monotonic()
        self._probes: dict[str, asyncio.Task[None]] = {}
        """By the address of the engine."""

    async def close(self) -> None:
        """Cancel the probes in flight."""
        await cancel_and_wait(list(self._probes.values()))

    def check(self) -> None:
        """Called every WATCH_EVERY_S."""
        now, servers = time.monotonic(), self._fleet.answering
        # While this process itself stood still, it could not hear anybody.
        stood_still_s = max(0.0, now - self._checked_at - 2 * WATCH_EVERY_S)
        self._checked_at = now
        for server in servers:
            server.heard_at = min(now, server.heard_at + stood_still_s)
            if server.loads:
                server.heard_at = now
        suspicion = any(server.waits and now - server.heard_at >= SUSPECT_S for server in servers)
        for server in servers:
            if (server.waits or server.silent or suspicion) and now - server.heard_at >= PROBE_AFTER_S:
                self._probe(server)
        for server in servers:
            if server.waits and now - server.heard_at >= SILENCE_S:
                self._move_answers(server, now - SILENCE_S)

    def _move_answers(self, server: FleetServer, since: float) -> None:
        moved = [
            wait
            for wait in server.waits
            if wait.movable and self._fleet.can_replace(server, wait.version, since)
        ]
        if moved and not server.silent:
            server.silent = True
            server.breaker.failed(unreachable=True)
            self._metrics.breakers.labels(server.id).set(1)
            logger.warning("the engine of %s is silent: %d of its answers move", server.id, len(moved))
        for wait in moved:
            wait.end(EngineFault("stalled", f"the engine gave no sign of life for {SILENCE_S:g} s"))

    def _probe(self, server: FleetServer) -> None:
        url = server.registration.engine_url
        if url not in self._probes:
            self._probes[url] = probe = asyncio.create_task(self._hear(server, url))
            probe.add_done_callback(lambda _: self._probes.pop(url))

    async def _hear(self, server: FleetServer, url: str) -> None:
        if await self._engine.responds(f"{url}/ping", PROBE_TIMEOUT_S):
            server.heard_at = time.monotonic()
            if server.silent:
                logger.warning("the engine of %s gives signs of life again", server.id)
                self._fleet.is_heard_again(server)
