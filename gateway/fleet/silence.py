"""Finds engines that hang or cannot be reached, and moves their answers to other engines.

no bytes for a while ──▶ probe ──answered──▶ the engine works
                           └─no answer──▶ silent: its answers move ──a probe is answered──▶ gets calls again
"""

import asyncio
import logging
from dataclasses import dataclass

from gateway.cancellation import cancel_and_wait
from gateway.errors import EngineFault
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer, Life
from gateway.prometheus import Metrics
from rollout_queue import clock

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.25
SILENCE_S = 3.0
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Sign:
    """A sign of life: a byte of any answer, or a response to a probe, which is a GET of `path`."""

    life: Life
    path: str
    silence_s: float
    """After so long without the sign, answers move."""
    timeout_s: float
    """How long a probe may take."""

    @property
    def probe_after_s(self) -> float:
        return self.silence_s / 3

    @property
    def suspect_s(self) -> float:
        """After so long, all servers are probed: those that respond can take over the answers."""
        return self.silence_s * 2 / 3

    @property
    def fresh_s(self) -> float:
        """A server whose last sign is younger than this can take over."""
        return self.silence_s / 2


class SilenceWatch:
    """Watches the servers that have answers in flight, by two signs of life:

    process    `GET /ping`, which SGLang's HTTP process answers while its scheduler is in a long prefill,
               loads weights or is paused. Missing for SILENCE_S: the process hangs, or the network is cut.
    scheduler  `GET /server_info`, for which SGLang asks its scheduler. The scheduler answers between two
               forward passes, and while it is paused. Missing for `scheduler_silence_s`: it hangs.

    Every response counts but 502 and 504, which a proxy sends when it does not reach the engine. An engine
    that does not know a path answers 404, which counts as well.

    If a sign is missing for its time, the server's answers move. Each moves only to a server that is ready,
    serves the version, has given the sign in the last half of that time, and was not suspected within it (a
    sign that is missing for two thirds of its time makes a server suspect). So engines that stop and go on at
    about the same time, because the network fails or all are in long forward passes, keep their answers. A
    server that loads weights is never silent.

    If no other server can continue an answer, it stays. A server whose process is silent for `alone_s` is
    given up all the same: its answers then wait for any engine, this one included, as after every fault.

    A silent server's breaker opens, and it gets no calls until it has responded to a probe.

    Silence is not the only reason: `Fleet` gives a server up at once when its status says that it is dead, or
    when nothing listens at its address.
    """

    def __init__(
        self, fleet: Fleet, engine: EngineClient, metrics: Metrics, scheduler_silence_s: float, alone_s: float
    ) -> None:
        self._fleet = fleet
        self._engine = engine
        self._metrics = metrics
        self._signs = (
            Sign("process", "/ping", SILENCE_S, PROBE_TIMEOUT_S),
            Sign("scheduler", "/server_info", scheduler_silence_s, scheduler_silence_s),
        )
        self._alone_s = max(alone_s, SILENCE_S)
        self._checked_at = clock.monotonic()
        self._probes: dict[tuple[str, Life], asyncio.Task[None]] = {}
        """By the address of the engine and the sign."""

    async def close(self) -> None:
        """Cancel the probes in flight."""
        await cancel_and_wait(list(self._probes.values()))

    def check(self) -> None:
        """Called every WATCH_EVERY_S."""
        now, servers = clock.monotonic(), self._fleet.answering
        # While this process itself stood still, it could receive nothing.
        stood_still_s = max(0.0, now - self._checked_at - 2 * WATCH_EVERY_S)
        self._checked_at = now
        for sign in self._signs:
            for server in servers:
                at = now if server.loads else min(now, server.signs[sign.life] + stood_still_s)
                server.signs[sign.life] = at
            self._look_for(sign, servers, now)

    def _look_for(self, sign: Sign, servers: list[FleetServer], now: float) -> None:
        """Probe servers for the sign, and move the answers of those that have not given it for too long."""
        missing_s = {server.id: now - server.signs[sign.life] for server in servers}
        suspicion = any(server.waits and missing_s[server.id] >= sign.suspect_s for server in servers)
        for server in servers:
            if server.waits and missing_s[server.id] >= sign.suspect_s:
                server.missed[sign.life] = now
            wanted = server.waits or sign.life in server.silent or suspicion
            if wanted and missing_s[server.id] >= sign.probe_after_s:
                self._probe(server, sign)
        for server in servers:
            if server.waits and missing_s[server.id] >= sign.silence_s:
                self._move_answers(server, sign, now)

    def _move_answers(self, server: FleetServer, sign: Sign, now: float) -> None:
        def lives(other: FleetServer) -> bool:
            fresh = now - other.signs[sign.life] < sign.fresh_s
            return fresh and now - other.missed[sign.life] > sign.silence_s

        given_up = sign.life == "process" and now - server.signs["process"] >= self._alone_s
        moved = [
            wait
            for wait in server.waits
            if given_up or (wait.movable and self._fleet.can_replace(server, wait.allowed, lives))
        ]
        if moved and sign.life not in server.silent:
            server.silent.add(sign.life)
            server.breaker.failed(unreachable=True)
            self._metrics.breakers.labels(server.id).set(1)
            logger.warning(
                "the %s of engine %s is silent: %d of its answers move", sign.life, server.id, len(moved)
            )
        for wait in moved:
            wait.end(EngineFault("stalled", f"the engine's {sign.life} gave no sign of life"))

    def _probe(self, server: FleetServer, sign: Sign) -> None:
        probed = server.registration.engine_url, sign.life
        if probed not in self._probes:
            self._probes[probed] = probe = asyncio.create_task(self._hear(server, sign))
            probe.add_done_callback(lambda _: self._probes.pop(probed))

    async def _hear(self, server: FleetServer, sign: Sign) -> None:
        if await self._engine.responds(f"{server.registration.engine_url}{sign.path}", sign.timeout_s):
            server.signs[sign.life] = clock.monotonic()
            if sign.life in server.silent:
                logger.warning("the %s of engine %s gives signs of life again", sign.life, server.id)
                self._fleet.responds_again(server, sign.life)
