"""The engine's memory is released for a trainer and taken again, in an order in which SGLang does not die."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import httpx
import pytest

from tests.support.rollout_server.harness import Harness, hastened, make_harness
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until_async

RELEASE = [
    "/pause_generation",
    "/flush_cache",
    "/release_memory_occupation kv_cache",
    "/release_memory_occupation weights",
]
RESUME = [
    "/resume_memory_occupation weights",
    "/update_weights_from_disk",
    "/model_info",
    "/weights_checker",
    "/resume_memory_occupation kv_cache",
    "/continue_generation",
]


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Harness]:
    """A started server with memory that is shared; its engine serves version 0, and has calls."""
    async with make_harness(tmp_path, memory="shared").started() as harness:
        harness.engine.calls.clear()
        yield harness
    assert harness.engine.deaths == []


async def release(harness: Harness, for_s: float = 60.0, holder: str = "trainer") -> httpx.Response:
    return await harness.http.post("/memory/release", json={"holder": holder, "for_s": for_s})


async def resume(harness: Harness, holder: str | None = "trainer") -> httpx.Response:
    return await harness.http.post("/memory/resume", json={"holder": holder})


async def test_memory_is_released_paused_and_idle_and_taken_with_proved_weights(shared: Harness) -> None:
    assert (await release(shared)).json() == {"version": 0, "renewed": False}
    assert shared.engine.calls == RELEASE
    status = await shared.status()
    assert (status["state"], status["released"]) == ("loading", True), "calls wait there"
    assert (await shared.http.get("/ready")).status_code == 503
    shared.engine.calls.clear()
    assert (await resume(shared)).json() == {"version": 0}
    assert shared.engine.calls == RESUME
    status = await shared.status()
    assert (status["state"], status["released"], status["restarts"]) == ("ready", False, 0)
    assert shared.engine.running == 2, "the calls go on"
    seconds = shared.server.metrics.registry.get_sample_value("weir_rollout_released_seconds_total")
    assert seconds is not None
    assert seconds > 0


async def test_a_second_release_and_a_second_resume_do_not_reach_the_engine(shared: Harness) -> None:
    assert (await resume(shared)).status_code == 200
    await release(shared)
    calls = list(shared.engine.calls)
    assert (await release(shared)).json()["renewed"]
    assert shared.engine.calls == calls
    await asyncio.gather(resume(shared), resume(shared))
    assert shared.engine.calls == RELEASE + RESUME


async def test_a_release_waits_until_the_engine_is_idle(shared: Harness) -> None:
    """A grammar that is compiled, for example, is done only while the engine is not paused."""
    shared.engine.busy_pauses = 2
    assert (await release(shared)).status_code == 200
    again = ["/pause_generation", "/flush_cache", "/continue_generation"]
    assert shared.engine.calls == again * 2 + RELEASE
    await resume(shared)


async def test_an_engine_that_does_not_become_idle_is_killed_and_starts_after_the_step(
    turned: TurnedClock, tmp_path: Path
) -> None:
    async with make_harness(tmp_path, memory="shared").started() as harness:
        harness.engine.busy_pauses = 10**9
        released = await hastened(turned, release(harness, for_s=600.0))
        assert released.status_code == 200, "a dead engine has no memory either"
        assert harness.engine.process is not None
        assert harness.engine.process.exited
        assert len(harness.engine.boots) == 1
        await resume(harness)
        await harness.until_ready()
        assert len(harness.engine.boots) == 2
        assert harness.engine.deaths == []


async def test_a_trainer_that_dies_gives_the_memory_back_after_its_time(
    turned: TurnedClock, shared: Harness
) -> None:
    """It keeps the memory as long as it asks again."""
    await release(shared, for_s=60)
    for _ in range(4):
        turned.turn(20)
        assert (await release(shared, for_s=60)).json()["renewed"]
    turned.turn(20)
    await asyncio.sleep(0.05)  # the server takes the memory back within this time if it may
    assert (await shared.status())["released"]
    turned.turn(41)
    await shared.until_ready()
    assert shared.engine.calls == RELEASE + RESUME
    assert (await resume(shared)).status_code == 200, "the trainer was only slow"


async def test_memory_has_one_holder_and_the_next_one_waits_for_the_end_of_its_time(
    turned: TurnedClock, shared: Harness
) -> None:
    """A trainer that starts again after a crash is another holder; an operator need not wait."""

    async def refused(asked: Awaitable[httpx.Response]) -> str:
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "memory_refused")
        assert (await shared.status())["released"]
        return str(answer.json()["error"]["message"])

    await release(shared, for_s=60, holder="former")
    said = await refused(release(shared, holder="newer"))
    assert "former has the engine's memory for" in said
    assert "/memory/resume" in said
    await refused(resume(shared, holder="newer"))
    assert (await release(shared, for_s=30, holder="former")).json()["renewed"], "it is still the holder"
    turned.turn(31)
    await wait_until_async(lambda: not shared.server.engine.withheld)
    assert not (await release(shared, holder="newer")).json()["renewed"]
    await refused(resume(shared, holder="former"))
    await refused(release(shared, holder="former"))
    assert (await resume(shared, holder=None)).status_code == 200
    await shared.until_ready()
    assert (await release(shared, holder="former")).status_code == 200
    await resume(shared, holder="former")


async def pushing(harness: Harness) -> "asyncio.Task[httpx.Response]":
    """A push of version 1 that waits for the memory."""
    pushed = asyncio.create_task(harness.reload(1, harness.policy(1)))
    await wait_until_async(lambda: harness.server.reloader.waits is not None)
    assert not pushed.done()
    return pushed


async def test_a_version_that_is_pushed_meanwhile_is_what_the_engine_resumes_with(shared: Harness) -> None:
    await release(shared)
    pushed = await pushing(shared)
    shared.engine.calls.clear()
    assert (await resume(shared)).json() == {"version": 1}
    answer = await pushed
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    assert shared.engine.calls == RESUME, "it is loaded once"
    assert (await shared.status())["version"] == 1


async def test_a_push_of_the_version_that_is_served_waits_and_a_lower_one_is_refused(shared: Harness) -> None:
    first, second = shared.policy(1), shared.policy(2)
    await shared.reload(2, second)
    await release(shared)
    same = asyncio.create_task(shared.reload(2, second))
    assert (await shared.reload(1, first)).status_code == 409
    assert not same.done()
    await resume(shared)
    assert (await same).status_code == 200
    assert (await shared.status())["version"] == 2


async def test_a_push_that_waits_for_the_memory_can_be_ended(shared: Harness) -> None:
    await release(shared)
    pushed = await pushing(shared)
    ended = (await shared.http.delete("/reload/1")).json()
    assert (ended["version"], ended["aborted"], ended["loading"]) == (0, True, None)
    assert (await pushed).status_code == 409
    assert (await resume(shared)).json() == {"version": 0}


async def test_a_release_waits_for_the_version_that_is_loading(shared: Harness) -> None:
    shared.engine.load_gate.clear()
    pushed = asyncio.create_task(shared.reload(1, shared.policy(1)))
    await wait_until_async(lambda: "/update_weights_from_disk" in shared.engine.calls)
    asked = asyncio.create_task(release(shared))
    await asyncio.sleep(0.05)  # it could release now
    assert not shared.engine.released
    shared.engine.load_gate.set()
    assert (await pushed).status_code == 200
    assert (await asked).json() == {"version": 1, "renewed": False}
    await resume(shared)


async def test_an_engine_that_dies_released_starts_when_the_memory_is_back(shared: Harness) -> None:
    await shared.reload(1, shared.policy(1))
    await release(shared)
    await shared.kill_engine()
    await wait_until_async(lambda: shared.server.engine.restarts == 1)
    assert (await release(shared)).json()["renewed"], "the trainer goes on"
    await asyncio.sleep(0.1)  # ten times the pause before a start
    assert len(shared.engine.boots) == 1
    await resume(shared)
    await shared.until_ready()
    assert [policy.version for policy in shared.engine.boots] == [0, 1]


async def test_an_engine_that_starts_gives_way_to_the_trainer(tmp_path: Path) -> None:
    """As after a restart of the rollout server: the trainer asks again before its time is over."""
    harness = make_harness(tmp_path, memory="shared")
    harness.engine.boot_gate.clear()
    await harness.server.open()
    await wait_until_async(lambda: len(harness.engine.boots) == 1)
    first = harness.engine.process
    assert first is not None
    assert not (await release(harness)).json()["renewed"]
    assert first.exited
    harness.engine.boot_gate.set()
    await asyncio.sleep(0.1)  # ten times the pause before a start
    assert len(harness.engine.boots) == 1
    await resume(harness)
    await harness.until_ready()
    await harness.http.aclose()
    await harness.server.close()


async def test_weights_that_do_not_come_back_end_the_engine_and_it_starts_with_its_version(
    shared: Harness,
) -> None:
    await shared.reload(1, shared.policy(1))
    await release(shared)
    shared.engine.on_load = lambda: httpx.Response(200, json={"success": True, "message": ""})
    assert (await resume(shared)).status_code == 200
    shared.engine.on_load = lambda: None
    await wait_until_async(lambda: len(shared.engine.boots) == 2)
    await shared.until_ready()
    assert shared.engine.boots[1].version == 1
    assert "/continue_generation" not in shared.engine.calls[-4:], "garbage is not sampled with"


async def test_a_waiting_version_whose_files_are_lost_ends_the_engine_and_it_starts_with_its_own(
    shared: Harness,
) -> None:
    await release(shared)
    pushed = await pushing(shared)
    waiting = shared.server.reloader.waits
    assert waiting is not None
    shutil.rmtree(waiting.directory)
    assert (await resume(shared)).status_code == 200
    assert (await pushed).status_code == 200, "it is fetched again"
    assert [policy.version for policy in shared.engine.boots] == [0, 0]
    assert (await shared.status())["version"] == 1


async def test_memory_that_is_not_shared_is_not_given_away(harness: Harness) -> None:
    answer = await release(harness)
    assert answer.status_code == 409
    assert "rollout_server.memory" in answer.json()["error"]["message"]
    assert (await harness.status())["state"] == "ready"


async def test_a_time_without_bounds_is_refused(shared: Harness) -> None:
    for for_s in (0, -1, 601, "long"):
        answer = await shared.http.post("/memory/release", json={"holder": "trainer", "for_s": for_s})
        assert answer.status_code == 400, for_s
    assert (await shared.status())["state"] == "ready"
