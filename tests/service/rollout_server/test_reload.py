"""POST /reload is a transaction. The new version is served only after the server has checked that the engine
loaded it. Otherwise the engine keeps the old version, or restarts on it."""

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from tests.support.rollout_server.harness import Harness, hastened, make_harness
from tests.support.rollout_server.weights import WEIGHTS, float32_tensors, publish, write_safetensors
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until_async


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    return error


async def test_a_new_version_is_loaded_while_paused_and_proved(harness: Harness) -> None:
    harness.engine.calls.clear()
    began_at = time.monotonic()
    answer = await harness.reload(1, harness.policy(1))
    took_s = time.monotonic() - began_at
    assert answer.status_code == 200
    body = answer.json()
    assert (body["ok"], body["version"]) == (True, 1)
    assert set(body["seconds"]) == {"fetch", "verify", "load"}
    assert all(0 <= seconds <= took_s for seconds in body["seconds"].values())
    assert body["paused_s"] > 0
    assert harness.engine.calls == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/weights_checker",
        "/continue_generation",
    ]
    assert not harness.engine.paused
    assert await harness.status() | {"version": 1, "state": "ready", "restarts": 0} == await harness.status()


async def test_the_same_version_again_touches_nothing(harness: Harness) -> None:
    directory = harness.policy(1)
    digest = publish(directory, 1)
    await harness.reload(1, directory)
    harness.engine.calls.clear()
    assert (await harness.reload(1, directory)).json()["paused_s"] == 0
    assert (await harness.reload(1, directory, manifest_sha256=digest.upper())).status_code == 200
    assert harness.engine.calls == []


async def test_a_lower_version_is_a_conflict_unless_forced(harness: Harness) -> None:
    """The initial version comes back without a location."""
    first, second = harness.policy(1), harness.policy(2)
    await harness.reload(2, second)
    for version, location in ((1, first), (0, None)):
        before = (await harness.status())["version"]
        assert (await harness.reload(version, location)).status_code == 409
        assert (await harness.status())["version"] == before
        assert (await harness.reload(version, location, force=True)).status_code == 200
        assert (await harness.status())["version"] == version
    assert harness.engine.directory == harness.directory / "model"
    assert (await harness.reload(5)).status_code == 400


async def test_the_same_number_with_other_content_is_a_conflict_unless_forced(harness: Harness) -> None:
    await harness.reload(1, harness.policy(1))
    other = harness.policy(2, fill=9.0)
    digest = publish(other, 1)
    assert (await harness.reload(1, other)).status_code == 409
    assert (await harness.reload(1, other, manifest_sha256=digest)).status_code == 409
    assert (await harness.reload(3, harness.policy(3), manifest_sha256=digest)).status_code == 422
    assert (await harness.reload(1, other, force=True)).status_code == 200
    assert (await harness.status())["manifest_sha256"] == digest


def reshape(directory: Path) -> None:
    tensors = float32_tensors() | {"lm_head.weight": ("F32", [2, 4], bytes(32))}
    write_safetensors(directory / WEIGHTS, tensors)
    publish(directory, 1)


def flip(directory: Path) -> None:
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(raw[:-1] + b"\x01")


BREAKS: dict[str, Callable[[Path], object]] = {
    "wrong shape": reshape,
    "wrong checksum": flip,
    "file missing": lambda directory: (directory / WEIGHTS).unlink(),
    "no manifest": lambda directory: (directory / "manifest.json").unlink(),
    "not finished": lambda directory: (directory / "STABLE").unlink(),
}


@pytest.mark.parametrize("broken", BREAKS)
async def test_a_broken_set_never_reaches_the_engine(harness: Harness, broken: str) -> None:
    directory = harness.policy(1)
    BREAKS[broken](directory)
    harness.engine.calls.clear()
    answer = await harness.reload(1, directory)
    assert answer.status_code == 422, answer.text
    assert error_of(answer)["type"] == "invalid_request_error"
    assert harness.engine.calls == []
    assert (await harness.status())["version"] == 0
    assert (await harness.status())["state"] == "ready"
    assert not list(harness.own.glob("*.part"))


@pytest.mark.parametrize(("broken", "status"), [(False, 200), (True, 422)])
async def test_files_of_another_file_system_are_copied_and_checked(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, broken: bool, status: int
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    directory = harness.policy(1)
    if broken:
        flip(directory)
    assert (await harness.reload(1, directory)).status_code == status
    copies = list(harness.own.glob(f"v00000001*/{WEIGHTS}"))
    assert [copy.read_bytes() for copy in copies] == ([] if broken else [(directory / WEIGHTS).read_bytes()])


async def test_a_location_that_is_not_allowed_is_never_opened(harness: Harness) -> None:
    for location in ("file:///etc", "http://elsewhere/weights/1", "http://u:p@127.0.0.1:8200/weights/1"):
        answer = await harness.reload(1, location)
        assert answer.status_code == 400
        assert error_of(answer)["code"] is None
    assert harness.network.requests == []


async def test_a_link_out_of_the_allowed_directories_or_a_malformed_body_is_400(harness: Harness) -> None:
    directory = harness.policy(1)
    elsewhere = harness.directory / "outside.safetensors"
    (directory / WEIGHTS).rename(elsewhere)
    (directory / WEIGHTS).symlink_to(elsewhere)
    assert (await harness.reload(1, directory)).status_code == 400
    bodies: Sequence[dict[str, Any]] = (
        {"version": "1"},
        {"version": -1},
        {"version": True},
        {},
        {"version": 1, "x": 2},
    )
    for body in bodies:
        assert (await harness.http.post("/reload", json=body)).status_code == 400, body
    packed = zstandard.compress(b'{"version": 1}')
    for content, coding, param in ((packed, "zstd", "location"), (packed[:-1], "zstd", None)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = await harness.http.post("/reload", content=content, headers=headers)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    bomb = zstandard.compress(bytes(2**21))
    assert (await harness.http.post("/reload", content=bomb, headers=headers)).status_code == 413
    assert (await harness.http.post("/reload", content=bytes(2**21))).status_code == 413


async def test_a_load_that_the_engine_refuses_restarts_it_on_the_old_version(harness: Harness) -> None:
    await harness.reload(1, harness.policy(1))
    harness.engine.on_load = lambda: httpx.Response(400, json={"success": False, "message": "no"})
    answer = await harness.reload(2, harness.policy(2))
    assert (answer.status_code, error_of(answer)["type"]) == (503, "engine_unavailable")
    await harness.until_ready()
    assert harness.engine.boots[-1].version == 1
    assert (await harness.status())["version"] == 1
    assert (await harness.status())["restarts"] == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [({"keeps_old_weights": True}, "still in the engine"), ({"says_version": "7"}, "serves version 7")],
)
async def test_an_engine_that_does_not_serve_the_new_weights_fails_the_reload(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], says: str
) -> None:
    for name, value in fault.items():
        monkeypatch.setattr(harness.engine, name, value)
    answer = await harness.reload(1, harness.policy(1))
    assert (answer.status_code, says in error_of(answer)["message"]) == (503, True)
    assert not harness.engine.calls[-1].startswith("/continue"), "its tokens must reach no client"


async def test_a_damaged_file_of_the_former_version_hinders_no_reload(harness: Harness) -> None:
    await harness.reload(1, harness.policy(1))
    (harness.server.engine.policy.directory / WEIGHTS).write_bytes(b"damaged")
    assert (await harness.reload(2, harness.policy(2))).status_code == 200
    assert (await harness.status())["version"] == 2


async def test_a_new_version_with_equal_weights_is_loaded(harness: Harness) -> None:
    assert (await harness.reload(1, harness.policy(1, fill=1.0))).status_code == 200


async def test_an_engine_that_dies_in_the_load_comes_back_on_the_old_version(harness: Harness) -> None:
    def die() -> httpx.Response:
        assert harness.engine.process is not None
        asyncio.ensure_future(harness.engine.process.kill())  # noqa: RUF006
        raise httpx.ReadError("cut")

    harness.engine.on_load = die
    assert (await harness.reload(1, harness.policy(1))).status_code == 503
    await harness.until_ready()
    assert (await harness.status())["version"] == 0


async def test_an_engine_that_was_killed_is_told_in_a_sentence(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.kill_engine()
    await harness.until_ready()
    (failed,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert failed == (
        "engine failed: it was killed by SIGKILL: by the system (memory? `dmesg` says so) or by hand"
    )


async def test_an_idle_engine_that_is_killed_boots_into_the_current_policy(harness: Harness) -> None:
    """But not with weights that have changed on disk."""
    await harness.reload(1, harness.policy(1))
    await harness.kill_engine()
    await harness.until_ready()
    booted = harness.engine.boots[-1]
    assert booted.version == 1
    assert (booted.directory / "tokenizer.json").exists(), "a directory that SGLang can start from"
    assert (await harness.status())["restarts"] == 1
    flip(harness.server.engine.policy.directory)
    await harness.kill_engine()
    await harness.until_ready()
    assert (await harness.status())["version"] == 0


async def test_a_reload_waits_for_an_engine_that_is_starting(tmp_path: Path) -> None:
    async with make_harness(tmp_path, engine_wait_s=1e6).started() as harness:
        harness.engine.boot_gate.clear()
        await harness.kill_engine()
        reload = asyncio.create_task(harness.reload(1, harness.policy(1)))
        await asyncio.sleep(0.05)  # the reload would end within this time if it did not wait
        assert not reload.done()
        harness.engine.boot_gate.set()
        assert (await reload).status_code == 200
        assert (await harness.status())["version"] == 1


async def test_a_reload_fails_if_the_engine_does_not_start_in_time(
    turned: TurnedClock, harness: Harness
) -> None:
    harness.engine.boot_gate.clear()
    await harness.kill_engine()
    answer = await hastened(turned, harness.reload(1, harness.policy(1)))
    assert (answer.status_code, error_of(answer)["type"]) == (503, "engine_unavailable")


async def test_the_load_of_a_push_does_not_wait_for_an_engine_that_has_died(tmp_path: Path) -> None:
    """Its place among the servers that load is another server's."""
    async with make_harness(tmp_path, engine_wait_s=1e6).started() as harness:
        first = harness.policy(1)
        harness.engine.boot_gate.clear()
        await harness.kill_engine()
        async with asyncio.timeout(PATIENCE_S):
            answer = await harness.reload(1, first, push=7)
        assert (answer.status_code, error_of(answer)["type"]) == (503, "engine_unavailable")
        harness.engine.boot_gate.set()
        await harness.until_ready()
        assert (await harness.reload(1, first, push=7)).status_code == 200


async def test_reloads_run_one_at_a_time(harness: Harness) -> None:
    first, second = harness.policy(1), harness.policy(2)
    harness.engine.load_gate.clear()
    running = asyncio.create_task(harness.reload(1, first))
    await wait_until_async(lambda: "/update_weights_from_disk" in harness.engine.calls)
    waiting = asyncio.create_task(harness.reload(2, second))
    await asyncio.sleep(0.05)  # the second reload would fetch within this time if it did not wait
    assert "v00000002" not in harness.kept(), "the second has not even fetched"
    harness.engine.load_gate.set()
    assert [(await running).status_code, (await waiting).status_code] == [200, 200]
    assert (await harness.status())["version"] == 2


async def test_only_the_current_and_the_former_version_stay_on_disk(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does not remove the other files itself."""
    threads, rmtree = [], shutil.rmtree

    def noting(path: Path, *, ignore_errors: bool) -> None:
        threads.append(threading.current_thread())
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", noting)
    for version in (1, 2, 3):
        await harness.reload(version, harness.policy(version))
    broken = harness.policy(4)
    flip(broken)
    assert (await harness.reload(4, broken)).status_code == 422
    await wait_until_async(lambda: len(threads) >= 2)
    assert threading.main_thread() not in threads
    await wait_until_async(lambda: len(list(harness.own.iterdir())) == 2)
    assert harness.kept() == ["v00000002", "v00000003"]


async def test_a_version_that_is_prepared_while_another_one_loads_stays_on_disk(harness: Harness) -> None:
    first, second = harness.policy(1), harness.policy(2)
    digest = publish(second, 2)
    harness.engine.load_gate.clear()
    loading = asyncio.create_task(harness.reload(1, first))
    await wait_until_async(lambda: harness.server.reloader.loading == 1)
    assert (await harness.reload(2, second, prepare=True)).status_code == 200
    harness.engine.load_gate.set()
    assert (await loading).status_code == 200
    (second / WEIGHTS).unlink()
    assert (await harness.reload(2, second, manifest_sha256=digest)).status_code == 200
    assert harness.kept() == ["v00000001", "v00000002"]


async def test_a_rollback_uses_the_files_that_are_still_on_disk(harness: Harness) -> None:
    first, second = harness.policy(1), harness.policy(2)
    digest = publish(first, 1)
    await harness.reload(1, first)
    await harness.reload(2, second)
    (first / "STABLE").unlink()
    answer = await harness.reload(1, first, manifest_sha256=digest, force=True)
    assert answer.status_code == 200
    assert harness.engine.version == "1"


async def test_a_failed_reload_is_counted(harness: Harness) -> None:
    await harness.reload(1, harness.directory / "policies" / "absent")
    await harness.reload(1, harness.policy(1))
    metrics = (await harness.http.get("/metrics")).text
    assert 'weir_rollout_reload_failures_total{status="422"} 1.0' in metrics
    assert "weir_rollout_reload_seconds_count 1.0" in metrics
    assert "weir_rollout_policy_version 1.0" in metrics
    assert 'weir_rollout_state{state="ready"} 1.0' in metrics


async def test_a_version_is_prepared_while_the_engine_goes_on(harness: Harness) -> None:
    directory = harness.policy(1)
    digest = publish(directory, 1)
    harness.engine.calls.clear()
    answer = await harness.reload(1, directory, prepare=True)
    assert answer.status_code == 200
    assert (answer.json()["version"], answer.json()["prepared"]) == (0, 1)
    assert harness.engine.calls == []
    assert (await harness.status())["version"] == 0
    (directory / WEIGHTS).unlink()  # the files are here already
    assert (await harness.reload(1, directory, manifest_sha256=digest)).status_code == 200
    assert (await harness.status())["version"] == 1
    broken = harness.policy(2)
    flip(broken)
    assert (await harness.reload(2, broken, prepare=True)).status_code == 422


async def test_a_reload_that_waits_is_ended_and_one_that_loads_is_not(harness: Harness) -> None:
    harness.engine.load_gate.clear()
    loading = asyncio.create_task(harness.reload(1, harness.policy(1)))
    await wait_until_async(lambda: harness.server.reloader.loading == 1)
    waiting = asyncio.create_task(harness.reload(2, harness.policy(2)))
    await wait_until_async(lambda: 2 in harness.server.reloads.versions)
    told = [(await harness.http.delete(f"/reload/{version}")).json() for version in (1, 2, 3)]
    assert [(each["version"], each["aborted"], each["loading"]) for each in told] == [
        (0, False, 1),
        (0, True, 1),
        (0, False, 1),
    ]
    ended = await waiting
    assert (ended.status_code, error_of(ended)["code"]) == (409, "reload_aborted")
    harness.engine.load_gate.set()
    assert (await loading).status_code == 200
    assert (await harness.http.delete("/reload/1")).json() == {
        "version": 1,
        "aborted": False,
        "loading": None,
        "adapters": [],
    }
    assert (await harness.reload(2, harness.policy(3))).status_code == 422, "another version's files"


async def test_a_push_older_than_one_that_the_server_has_seen_is_refused(harness: Harness) -> None:
    one, two = harness.policy(1), harness.policy(2)
    assert (await harness.reload(2, two, push=8)).status_code == 200
    refused = await harness.reload(1, one, push=7, force=True)
    assert (refused.status_code, error_of(refused)["code"]) == (409, "push_replaced")
    assert (await harness.reload(1, one, push=8, force=True)).status_code == 200
    by_operator = await harness.reload(2, two)
    assert by_operator.status_code == 200, "it has no push"


async def test_a_forced_push_ends_what_an_older_one_prepares(harness: Harness) -> None:
    harness.engine.load_gate.clear()
    loading = asyncio.create_task(harness.reload(1, harness.policy(1), push=1))
    await wait_until_async(lambda: harness.server.reloader.loading == 1)
    waiting = asyncio.create_task(harness.reload(2, harness.policy(2), push=2))
    await wait_until_async(lambda: 2 in harness.server.reloads.versions)
    back = asyncio.create_task(harness.reload(0, None, push=3, force=True))
    assert error_of(await waiting)["code"] == "reload_aborted"
    harness.engine.load_gate.set()
    assert [(await each).status_code for each in (loading, back)] == [200, 200]
    assert (await harness.status())["version"] == 0
