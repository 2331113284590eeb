"""The real SGLang behind a real rollout server: a push, broken pushes, deaths, and a clean end."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.rollout_server.running import NEEDS_ENGINE, RunningServer, running_server
from tests.support.rollout_server.weights import WEIGHTS, publish

pytestmark = NEEDS_ENGINE


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tiny_model, tmp_path_factory.mktemp("rollout")) as server:
        yield server


def test_a_push_is_served_and_a_rollback_brings_the_same_weights_back(running: RunningServer) -> None:
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
def test_a_broken_push_leaves_the_old_version_serving(running: RunningServer, breaks: Any) -> None:
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


def test_an_engine_killed_while_idle_comes_back_with_the_current_policy(running: RunningServer) -> None:
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


def test_sigterm_ends_server_and_engine_with_exit_code_0(running: RunningServer) -> None:
    pid = running.engine_pid()
    running.process.terminate()
    assert running.process.wait(timeout=60) == 0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(running.engine_url, timeout=5)
