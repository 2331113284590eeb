"""prime-rl's orchestrator pauses the engine, gives it the weights of a directory, and lets it go on."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_queue.contract.published_policy import MANIFEST, STABLE
from tests.support.rollout_server.harness import Harness, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, write_safetensors
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until_async

KEEP = "/pause?mode=keep&clear_cache=false"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Harness]:
    async with make_harness(tmp_path, admin_keys=["key"], pause_limit_s=1e-9).started() as harness:
        yield harness


def given(harness: Harness, name: str, fill: float = 5.0) -> Path:
    """A directory as a trainer writes it: weights, config, no manifest."""
    directory = harness.directory / "policies" / name
    directory.mkdir(parents=True)
    write_safetensors(directory / WEIGHTS, float32_tensors(fill))
    (directory / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
    (directory / "notes.txt").write_text("not a part of a version")
    (directory / STABLE).touch()
    return directory


async def update(harness: Harness, directory: Any, **more: Any) -> httpx.Response:
    named = str(directory) if isinstance(directory, Path) else directory
    return await harness.http.post("/update_weights", json={"weight_dir": named, **more})


async def test_new_weights_are_loaded_and_proved_within_the_pause_of_the_orchestrator(
    harness: Harness,
) -> None:
    harness.engine.running = 2
    assert (await harness.http.post(KEEP)).json() == {"status": "ok", "version": 0}
    assert (harness.engine.paused, harness.engine.retracted) == (True, 2)
    harness.engine.calls.clear()
    answer = await update(harness, given(harness, "step_7"), skip_prefix_cache_reset=True)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "version": 7})
    assert harness.engine.calls == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/weights_checker",
    ]
    assert harness.engine.paused  # the orchestrator has not said that the engine may go on
    assert (await harness.status())["version"] == 7
    assert (await harness.http.post("/resume")).status_code == 200
    assert (harness.engine.paused, harness.engine.running) == (False, 2)


async def test_without_a_pause_an_update_pauses_by_itself_and_a_manifest_stays(harness: Harness) -> None:
    directory = given(harness, "weights-of-today")
    assert (await update(harness, directory)).json()["version"] == 1
    assert not harness.engine.paused
    text = (directory / MANIFEST).read_bytes()
    assert [file["name"] for file in json.loads(text)["files"]] == ["config.json", WEIGHTS]
    other = given(harness, "step_3", 6.0)
    assert (await update(harness, other)).json()["version"] == 3
    harness.engine.calls.clear()
    assert (await update(harness, other)).json()["version"] == 3
    assert harness.engine.calls == []
    assert (directory / MANIFEST).read_bytes() == text


@pytest.mark.parametrize(
    "breaks",
    [
        lambda directory: (directory / STABLE).unlink(),
        lambda directory: (directory / WEIGHTS).unlink(),
        lambda directory: (directory / WEIGHTS).write_bytes(b"\0" * 99),
        lambda directory: write_safetensors(directory / WEIGHTS, float32_tensors(float("nan"))),
        lambda directory: (directory / MANIFEST).write_text("{}"),
    ],
)
async def test_a_directory_that_is_not_sound_leaves_the_former_version(harness: Harness, breaks: Any) -> None:
    directory = given(harness, "step_4")
    breaks(directory)
    await harness.http.post(KEEP)
    answer = await update(harness, directory)
    assert answer.status_code == 422, answer.text
    assert ((await harness.status())["version"], harness.engine.paused) == (0, True)
    await harness.http.post("/resume")
    assert (harness.engine.paused, harness.engine.version, harness.engine.boots[1:]) == (False, "0", [])


async def test_a_place_that_no_weights_may_come_from_is_refused(harness: Harness) -> None:
    for directory in (None, "", "step_1", "/etc", "/", "step\0", "http://x/step_1"):
        answer = await update(harness, directory)
        assert answer.status_code == 400, directory
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await harness.status())["version"] == 0


async def test_an_older_step_is_a_conflict(harness: Harness) -> None:
    assert (await update(harness, given(harness, "step_5"))).status_code == 200
    assert (await update(harness, given(harness, "step_4"))).status_code == 409
    assert (await harness.status())["version"] == 5


async def test_a_pause_that_does_not_keep_the_calls_is_refused_by_name(harness: Harness) -> None:
    for query in ("", "?mode=abort", "?mode=wait&clear_cache=false", "?clear_cache=false"):
        answer = await harness.http.post(f"/pause{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported"), query
        assert "mode" in answer.json()["error"]["message"]
    assert not harness.engine.paused


async def test_a_pause_empties_the_cache_if_asked(harness: Harness) -> None:
    harness.engine.calls.clear()
    assert (await harness.http.post("/pause?mode=keep&clear_cache=true")).status_code == 200
    assert harness.engine.calls == ["/pause_generation", "/flush_cache"]
    harness.engine.busy_pauses, harness.engine.running = 1, 1
    assert (await harness.http.post("/pause?mode=keep&clear_cache=true")).status_code == 503
    assert not harness.engine.paused


async def test_a_pause_that_nobody_ends_ends_by_itself(turned: TurnedClock, guarded: Harness) -> None:
    key = {"authorization": "Bearer key"}
    assert (await guarded.http.post(KEEP, headers=key)).status_code == 200
    turned.turn(1.0)
    await wait_until_async(lambda: not guarded.engine.paused)


async def test_an_engine_that_dies_in_a_pause_comes_back_without_it(harness: Harness) -> None:
    await harness.http.post(KEEP)
    harness.engine.boot_gate.clear()  # the next engine is not there before this is set
    await harness.kill_engine()
    assert (await harness.http.get("/health")).status_code == 503
    assert (await harness.http.post(KEEP)).status_code == 503
    harness.engine.boot_gate.set()
    await harness.until_ready()
    assert (await harness.http.get("/health")).json() == {"status": "ok"}
    assert (await update(harness, given(harness, "step_1"))).status_code == 200
    assert not harness.engine.paused


async def test_the_end_of_a_pause_does_not_bring_a_drained_server_back(harness: Harness) -> None:
    await harness.http.post("/drain")
    await harness.http.post(KEEP)
    assert (await harness.http.post("/resume")).json()["state"] == "draining"
    assert (await harness.http.post("/resume")).json()["state"] == "ready"


async def test_the_routes_need_the_admin_key_except_health(guarded: Harness) -> None:
    for path in (KEEP, "/resume", "/update_weights", "/load_lora_adapter"):
        assert (await guarded.http.post(path, json={})).status_code == 401, path
    assert (await guarded.http.get("/health")).status_code == 200


async def test_a_server_without_a_gateway_takes_no_adapter(harness: Harness) -> None:
    body = {"lora_name": "mine", "lora_path": str(given(harness, "step_1"))}
    answer = await harness.http.post("/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_supported")
