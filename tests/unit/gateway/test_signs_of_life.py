"""Servers that are late or silent: when the fleet gives them up."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import pytest

from gateway.errors import EngineFault
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import EngineWait, FleetServer, Registration
from gateway.fleet.generate_request import AllowedVersions
from gateway.fleet.placement import WantedServer
from gateway.fleet.server_status import read_status
from gateway.fleet.silence import SILENCE_S, WATCH_EVERY_S, SilenceWatch
from gateway.prometheus import Metrics
from rollout_queue.contract.serving_plan import Admissible, Canary, ServingPlan
from tests.support.turned_clock import TurnedClock

NOBODY = cast(Any, None)


@dataclass
class Engine:
    """Answers requests for its status, and probes, unless it is late, or the URL is that of the late one."""

    late: bool = False
    late_one: str | None = None

    async def get(self, url: str, timeout_s: float) -> bytes:
        if self.late:
            raise TimeoutError
        return b"{}"

    async def responds(self, url: str, timeout_s: float) -> bool:
        return not self.late and (self.late_one is None or self.late_one not in url)


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


@dataclass
class Answer:
    """An answer that any engine can continue."""

    allowed: AllowedVersions
    resumable: bool = True


@pytest.mark.parametrize("arm", ["canary", "baseline"])
@pytest.mark.parametrize("hangs", ["r0", "r1"])
async def test_a_hung_server_is_left_after_the_usual_silence_also_while_a_canary_is_open(
    stopped: TurnedClock, hangs: str, arm: str
) -> None:
    """r0 has the canary's version, r1 the fleet's."""
    fleet = Fleet(NOBODY, NOBODY, None)
    canary = Canary(id=2, version=2, baseline=1, servers=("r0",), share=0.5, state="open", started_at=0.0)
    fleet.adopt(ServingPlan(admissible=(Admissible(1, 1),), canary=canary))
    for name, version in (("r0", 2), ("r1", 1)):
        registration = Registration(id=name, url=f"http://{name}", engine_url=f"http://{name}")
        fleet.servers[name] = FleetServer(registration, state="ready", version=version)
    watch = SilenceWatch(fleet, cast(Any, Engine(late_one=hangs)), Metrics(), 10 * SILENCE_S, 20 * SILENCE_S)
    hung, other = fleet.servers[hangs], fleet.servers[{"r0": "r1", "r1": "r0"}[hangs]]
    wait = EngineWait(cast(Any, Answer(AllowedVersions(prefers=2 if arm == "canary" else None))))
    hung.begin_wait(wait)
    for _ in range(round(2 * SILENCE_S / WATCH_EVERY_S)):
        stopped.turn(WATCH_EVERY_S)
        watch.check()
        for _ in range(3):
            await asyncio.sleep(0)  # the probes
    await watch.close()
    with pytest.raises(EngineFault), wait:
        pass  # it raises here if the answer moves
    assert fleet.rotation.choose(WantedServer("s", wait.allowed, hangs)) is other
    assert "silent" in str(hung)
