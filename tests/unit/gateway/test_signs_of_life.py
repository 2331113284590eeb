"""Servers that are late or silent: when the fleet gives them up."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.engines.engine_wait import EngineWait
from gateway.engines.fleet import Fleet
from gateway.engines.fleet_server import FleetServer, Registration
from gateway.engines.server_status import read_status
from gateway.engines.silence import SILENCE_S, WATCH_EVERY_S, SilenceWatch
from gateway.errors import EngineFault
from gateway.metrics.metrics import Metrics
from tests.support.turned_clock import TurnedClock

NOBODY = cast(Any, None)


@dataclass
class Engine:
    """Answers requests for its status, and probes, unless it is late."""

    late: bool = False

    async def get(self, url: str, timeout_s: float) -> bytes:
        if self.late:
            raise TimeoutError
        return b"{}"

    async def responds(self, url: str, timeout_s: float) -> bool:
        return not self.late


async def test_a_server_is_dead_when_it_is_late_twice_in_a_row() -> None:
    engine, states = Engine(), []
    server = FleetServer(Registration(id="r", engine_url="http://r"), "ready")
    for engine.late in (True, False, True, True):
        await read_status(server, cast(Any, engine), {})
        states.append(server.state)
    assert states == ["ready", "ready", "ready", "dead"]


@pytest.mark.parametrize("late", [False, True])
async def test_an_answer_without_bytes_stays_as_long_as_its_engine_responds_to_probes(
    stopped: TurnedClock, late: bool
) -> None:
    fleet = Fleet(NOBODY, NOBODY, None, ["http://engine"])
    (server,) = fleet.servers.values()
    watch = SilenceWatch(fleet, cast(Any, Engine(late)), Metrics(), 10 * SILENCE_S, SILENCE_S)
    wait = EngineWait(NOBODY)
    server.begin_wait(wait)
    for _ in range(round(2 * SILENCE_S / WATCH_EVERY_S)):
        stopped.turn(WATCH_EVERY_S)
        watch.check()
        for _ in range(3):
            await asyncio.sleep(0)  # the probes
    await watch.close()
    with pytest.raises(EngineFault) if late else nullcontext(), wait:
        pass  # it raises here if the answer moves
