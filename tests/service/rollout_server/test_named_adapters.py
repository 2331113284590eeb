"""Adapters that are policies of their own, as the gateway wants them beside the fleet's policy."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rollout_server.adapters import LORA, adapter, names, whole_weights, with_layers
from tests.support.rollout_server.harness import Harness
from tests.support.waiting import PATIENCE_S, wait_until_async


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with with_layers(tmp_path, lora=LORA).started() as harness:
        yield harness


async def want(harness: Harness, revision: int, **locations: str) -> list[dict[str, Any]]:
    """Have the server load version 1 of these adapters, and no others. Returns what it says of each."""
    adapters = [{"policy": name, "version": 1, "location": each} for name, each in locations.items()]
    answer = await harness.http.post("/adapters", json={"revision": revision, "adapters": adapters})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


async def test_an_adapter_with_a_name_is_loaded_beside_the_policy(harness: Harness) -> None:
    (said,) = await want(harness, 1, math=adapter(harness, 1).as_uri())
    assert (said["ok"], said["error"]) == (True, None)
    assert [version for version, _ in names(await harness.status())] == [1]
    assert await want(harness, 2) == []
    assert names(await harness.status()) == []


SLOW = "http://127.0.0.1:8200/weights/1"


def slow_source(harness: Harness) -> asyncio.Event:
    """Let the source of `SLOW` answer, with a failure, once the event is set."""
    gate = asyncio.Event()

    async def answer(_: httpx.Request) -> httpx.Response:
        await gate.wait()
        return httpx.Response(503)

    harness.network.source = answer
    return gate


async def test_a_slow_source_of_an_adapter_holds_up_no_push(harness: Harness) -> None:
    gate = slow_source(harness)
    asked = asyncio.create_task(want(harness, 1, math=SLOW))
    await wait_until_async(lambda: harness.network.requests)
    async with asyncio.timeout(PATIENCE_S):
        assert (await harness.reload(5, whole_weights(harness, 5))).status_code == 200
    assert not asked.done()
    gate.set()
    (said,) = await asked
    assert (said["ok"], "HTTP 503" in said["error"]) == (False, True)


async def test_the_fetch_of_an_adapter_ends_when_it_is_not_wanted_any_more(harness: Harness) -> None:
    slow_source(harness)
    asked = asyncio.create_task(want(harness, 1, math=SLOW))
    await wait_until_async(lambda: harness.network.requests)
    async with asyncio.timeout(PATIENCE_S):
        (said,) = await want(harness, 2, code=adapter(harness, 1).as_uri())
        assert (said["policy"], said["ok"]) == ("code", True)
        (said,) = await asked
    assert (said["ok"], said["error"]) == (False, "is not wanted any more")


async def test_an_adapter_that_does_not_come_in_time_is_given_up(tmp_path: Path) -> None:
    async with with_layers(tmp_path, lora=LORA, adapter_timeout_s=0.05).started() as harness:
        slow_source(harness)
        async with asyncio.timeout(PATIENCE_S):
            (said,) = await want(harness, 1, math=SLOW)
        assert (said["ok"], "within 0.05 s" in said["error"]) == (False, True)


async def test_the_trial_of_an_adapter_may_wait_behind_the_calls_that_run(tmp_path: Path) -> None:
    async with with_layers(
        tmp_path, lora=LORA, control_timeout_s=100, load_timeout_s=5000
    ).started() as harness:
        (said,) = await want(harness, 1, math=adapter(harness, 1).as_uri())
        assert said["ok"]
        assert harness.engine.timeouts_s["/generate"] == 5000


async def test_an_adapter_is_not_offered_if_its_base_is_replaced_while_it_is_tried(harness: Harness) -> None:
    harness.engine.sample_gate.clear()
    asked = asyncio.create_task(want(harness, 1, math=adapter(harness, 1).as_uri()))
    await wait_until_async(lambda: "/generate" in harness.engine.calls)
    assert (await harness.reload(5, whole_weights(harness, 5))).status_code == 200
    harness.engine.sample_gate.set()
    (said,) = await asked
    assert (said["ok"], "other weights" in (said["error"] or "")) == (False, True)
    assert names(await harness.status()) == []
