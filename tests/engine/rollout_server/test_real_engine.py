"""The real SGLang behind a real rollout server: pushes, released memory, deaths, and a clean end."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rollout_server.weights.locations import LocalPolicy
from tests.support.rollout_server.fakes import FakeEngine
from tests.support.rollout_server.real_server import (
    ENGINE_PYTHON,
    PATIENCE_S,
    REAL_ENGINE,
    Running,
    real_server,
)
from tests.support.rollout_server.weights import WEIGHTS, publish
from tests.support.waiting import wait_until

pytestmark = [*REAL_ENGINE, pytest.mark.long]

ENGINE_KEY = "a-key-of-the-engine"


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with real_server(
        tmp_path_factory.mktemp("rollout"), tiny_model, memory="shared", engine_key=ENGINE_KEY
    ) as server:
        yield server


def test_the_engine_answers_only_those_who_have_its_key_and_nothing_shows_it(running: Running) -> None:
    for path in ("/generate", "/update_weights_from_disk", "/abort_request", "/pause_generation"):
        assert httpx.post(running.engine_url + path, json={}, timeout=PATIENCE_S).status_code == 401, path
    for path in ("/model_info", "/server_info", "/v1/models"):
        assert httpx.get(running.engine_url + path, timeout=PATIENCE_S).status_code == 401, path
    assert len(running.generates()) == 4
    shown = [running.engine_log, running.directory / "server.log"]
    engine = psutil.Process(running.engine_pid())
    processes = [engine, *engine.children(recursive=True)]
    shown += [Path(f"/proc/{each.pid}/{file}") for each in processes for file in ("cmdline", "environ")]
    for each in shown:
        assert ENGINE_KEY not in each.read_bytes().decode(errors="replace"), each
    (file,) = (running.directory / "run" / "logs").glob("*-engine.key")
    assert file.stat().st_mode & 0o077 == 0


def test_a_push_is_served_and_a_rollback_brings_the_same_weights_back(running: Running) -> None:
    before = running.checksum()
    answer = running.reload(1, running.version(1))
    assert answer.status_code == 200, answer.text
    assert running.served() == "1"
    first = running.checksum()
    assert first != before
    assert running.reload(2, running.version(2)).status_code == 200
    assert running.checksum() not in (before, first)
    assert running.reload(1, running.version(1), force=True).status_code == 200
    assert running.checksum() == first
    assert len(running.generates()) == 4


def test_no_cached_prefix_of_an_older_version_is_reused(running: Running) -> None:
    def cached(salt: str) -> int:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": [1, *range(20, 120)], "sampling_params": sampling, "cache_salt": salt}
        answer = running.engine.post("/generate", json=body).json()
        return int(answer["meta_info"]["cached_tokens"])

    number = int(running.served()) + 1
    cached("one")
    assert cached("one") > 0
    assert cached("two") == 0  # a salt keeps prefixes apart
    assert cached("two") > 0
    assert running.reload(number, running.version(number)).status_code == 200
    assert cached("one") == cached("two") == 0


def test_an_orchestrators_pause_holds_over_an_update_and_the_calls_go_on_with_the_new_weights(
    running: Running,
) -> None:
    number = int(running.served()) + 1
    given = running.version(number).rename(running.directory / "run" / "policies" / f"step_{number}")
    (given / "manifest.json").unlink()
    before = running.checksum()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(running.generates, 1500) for _ in range(2)]
        wait_until(lambda: running.status()["running"] > 0)
        pause = httpx.post(f"{running.url}/pause?mode=keep&clear_cache=false", timeout=300)
        assert pause.status_code == 200, pause.text
        update = httpx.post(f"{running.url}/update_weights", json={"weight_dir": str(given)}, timeout=120)
        assert (update.status_code, update.json().get("version")) == (200, number), update.text
        assert (running.served(), running.checksum() != before) == (str(number), True)
        assert running.engine.get("/ready").status_code == 503  # it is paused
        assert not any(call.done() for call in calls)
        assert httpx.post(f"{running.url}/resume", timeout=300).status_code == 200
        assert [len(call.result()) for call in calls] == [1500] * 2
    assert len(running.generates()) == 4


def _truncate(directory: Path) -> None:
    raw = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def _other_shapes(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / WEIGHTS)
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    publish(directory, 50)


@pytest.mark.parametrize("breaks", [_truncate, _other_shapes])
def test_a_broken_push_leaves_the_old_version_serving(running: Running, breaks: Any) -> None:
    served, checksum, pid = running.served(), running.checksum(), running.engine_pid()
    broken = running.directory / "run" / "policies" / breaks.__name__
    shutil.copytree(running.version(1), broken)
    publish(broken, 50)
    breaks(broken)
    answer = running.reload(50, broken)
    assert answer.status_code == 422, answer.text
    assert WEIGHTS in answer.json()["error"]["message"]
    assert (running.served(), running.checksum(), running.engine_pid()) == (served, checksum, pid)
    assert len(running.generates()) == 4


def test_an_engine_killed_while_idle_comes_back_with_the_current_policy(running: Running) -> None:
    assert running.reload(3, running.version(3)).status_code == 200
    checksum, ids, pid = running.checksum(), running.generates(), running.engine_pid()
    restarts = running.status()["restarts"]
    os.kill(pid, signal.SIGKILL)
    running.until_ready(restarts + 1)
    assert running.engine_pid() != pid
    assert running.status()["version"] == 3
    assert running.served() == "3"
    assert running.checksum() == checksum
    assert running.generates() == ids


def test_memory_is_released_under_load_and_the_calls_go_on_with_the_pushed_version(running: Running) -> None:
    """On CPU, the engine frees nothing; the order of the calls is the same."""
    restarts = running.status()["restarts"]
    assert running.reload(4, running.version(4)).status_code == 200
    with ThreadPoolExecutor(9) as pool:
        calls = [pool.submit(running.generates, 1500) for _ in range(8)]
        wait_until(lambda: running.status()["running"] > 0)
        assert running.memory("release", holder="test", for_s=100).json() == {"version": 4, "renewed": False}
        assert not any(call.done() for call in calls), (running.directory / "server.log").read_text()
        assert running.memory("release", holder="test", for_s=100).json()["renewed"]
        status = running.status()
        assert (status["state"], status["released"]) == ("loading", True)
        pushed = pool.submit(running.reload, 5, running.version(5))
        checksum = running.checksum()
        wait_until(lambda: any((running.directory / "run" / "weights").glob("*/v00000005-*/manifest.json")))
        assert running.memory("resume", holder="test").json() == {"version": 5}
        assert pushed.result().status_code == 200
        assert [len(call.result()) for call in calls] == [1500] * 8
    assert running.served() == "5"
    assert running.checksum() != checksum
    assert running.memory("resume", holder="test").status_code == 200
    assert running.status()["restarts"] == restarts


ORDERS: dict[str, tuple[bool, list[str], bool]] = {
    "released and taken": (False, ["release", "take"], True),
    "released with retracted calls": (True, ["pause", "release", "take", "continue"], True),
    "taken twice": (False, ["release", "take", "take"], False),
    "released while a call runs": (True, ["release"], False),
}
"""Whether calls run, what the engine is asked, and whether it survives."""
PATHS = {
    "pause": ("/pause_generation", {"mode": "retract"}),
    "continue": ("/continue_generation", {}),
    "release": ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    "take": ("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]}),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_engine_dies_where_its_double_dies(running: Running, tmp_path: Path, order: str) -> None:
    busy, asked, survives = ORDERS[order]
    assert _double_survives(tmp_path, busy, asked) == survives
    restarts = running.status()["restarts"]
    with ThreadPoolExecutor(1) as pool:
        if busy:
            call = pool.submit(running.generates, 1500)
            wait_until(lambda: running.status()["running"] > 0)
        for each in asked:
            path, body = PATHS[each]
            with suppress(httpx.TransportError):
                running.engine.post(path, json=body)
            if each == "pause":
                wait_until(running.flushes)
        if busy and survives:
            assert len(call.result()) == 1500
    if survives:
        assert len(running.generates()) == 4
        assert running.status()["restarts"] == restarts
    else:
        running.until_ready(restarts + 1)
        former = running.engine_log.with_name(f"{running.engine_log.name}.1").read_text()
        assert "only when server is idle" in former if busy else "KeyError" in former


def _double_survives(directory: Path, busy: bool, asked: list[str]) -> bool:
    engine = FakeEngine()
    engine.running = 2 if busy else 0

    async def ask() -> None:
        await engine.start(LocalPolicy(0, directory))
        for each in asked:
            path, body = PATHS[each]
            await engine.handle(httpx.Request("POST", f"http://engine{path}", json=body))
            engine.garbage = False  # on CPU, the weights stay as they are

    with suppress(httpx.ReadError):
        asyncio.run(ask())
    return not engine.deaths


def test_sigterm_ends_server_and_engine_with_exit_code_0(running: Running) -> None:
    pid = running.engine_pid()
    running.process.terminate()
    assert running.process.wait(timeout=300) == 0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(running.engine_url, timeout=5)


def test_the_engines_environment_has_models_of_transformers_without_the_servers_path() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    imported = [str(ENGINE_PYTHON), "-c", "from transformers import LlamaForCausalLM"]
    subprocess.run(imported, env=plain, check=True, timeout=600)
