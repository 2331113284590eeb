"""The engine's process never outlives its server, nor holds the port after its end; its device is one that is
there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from rollout_server.engine.command import find_device
from rollout_server.engine.process import TETHER, EngineProcess
from tests.support.rollout_server.processes import ServerProcess, running
from tests.support.rollout_server.weights import write_model
from tests.support.serving import free_port
from tests.support.waiting import PATIENCE_S, wait_until

# Parent and child sleep until the test ends them.
FAMILY = "import os, time; pid = os.fork() or os.getpid(); os.write(1, b'%d\\n' % pid); time.sleep(600)"
"""Both print the child's pid, each in one write, so that the two lines never mix."""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def until_gone(pid: int) -> bool:
    return wait_until(lambda: not alive(pid))


async def start(tmp_path: Path, code: str) -> EngineProcess:
    command = [sys.executable, "-c", code]
    return await EngineProcess.start(command, os.environ, tmp_path / "logs" / "engine.log", 0.3)


def pids_in(log: Path, count: int) -> list[int]:
    wait_until(lambda: len(log.read_text().split()) >= count)
    return [int(word) for word in log.read_text().split()]


async def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    process = await start(tmp_path, FAMILY)
    pids = pids_in(tmp_path / "logs" / "engine.log", 2)
    await process.kill()
    assert process.exited
    assert all(until_gone(pid) for pid in pids)


async def test_children_that_outlive_a_dead_engine_are_ended_too(tmp_path: Path) -> None:
    process = await start(tmp_path, FAMILY)
    pids = pids_in(tmp_path / "logs" / "engine.log", 2)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await process.kill()
    assert all(until_gone(pid) for pid in pids)


async def test_stop_waits_for_a_while_and_then_kills(tmp_path: Path) -> None:
    # The engine sleeps until the test ends it.
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    process = await start(tmp_path, stubborn)
    pids_in(tmp_path / "logs" / "engine.log", 1)
    await process.stop()
    assert await process.wait() == -signal.SIGKILL


async def test_the_log_tail_and_the_former_log_are_kept(tmp_path: Path) -> None:
    process = await start(tmp_path, "print('first'); raise SystemExit(3)")
    assert await process.wait() == 3
    assert process.log_tail() == "first"
    second = await start(tmp_path, "print('second')")
    await second.wait()
    assert (tmp_path / "logs" / "engine.log.1").read_text() == "first\n"


def test_servers_with_one_disk_have_directories_of_their_own(tmp_path: Path) -> None:
    """Only one of them may have the id that both are given."""
    given = {"model_path": write_model(tmp_path / "model"), "engine_python": "/bin/false"}

    def server(**settings: object) -> AbstractContextManager[ServerProcess]:
        return running(tmp_path, given | {"port": free_port(), "engine_port": free_port()} | settings)

    with ExitStack() as stack:
        for settings in ({}, {}, {"id": "same"}):
            wait_until(stack.enter_context(server(**settings)).why_unready)
        locks = {each.stem for each in (tmp_path / "run" / "weights").glob("*.lock")}
        assert locks == {"server-0", "server-1", "same"}
        other = stack.enter_context(server(id="same"))
        assert other.process.wait(PATIENCE_S) == 1
        assert "another rollout server uses the weights" in other.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_an_engine_dies_with_a_server_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "pid"
    # Server and engine sleep until the test ends them.
    engine = f"import os, time; open({str(log)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    server = (
        "import os, subprocess, sys, time;"
        f"tether = [sys.executable, {str(TETHER)!r}, str(os.getpid())];"
        f"subprocess.Popen([*tether, sys.executable, '-c', {engine!r}]);"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", server])
    wait_until(lambda: log.exists() and log.read_text())
    pid = int(log.read_text())
    assert alive(pid)
    process.kill()
    process.wait()
    assert until_gone(pid)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A file such as SGLang keeps open; a process that is killed cannot remove it."""
    path = Path(f"/dev/shm/sglang_loads_{os.getpid()}_{tmp_path.name}.shm")  # noqa: S108 - where SGLang has it
    yield path
    path.unlink(missing_ok=True)


def left_in_shared_memory(shared: Path) -> bool:
    return shared.exists()


async def test_shared_memory_that_a_killed_engine_leaves_is_removed(tmp_path: Path, shared: Path) -> None:
    opened = f"import time; f = open({str(shared)!r}, 'w'); print(1, flush=True); time.sleep(600)"
    log = tmp_path / "logs" / "engine.log"
    process = await start(tmp_path, opened)
    pids_in(log, 1)
    await process.kill()
    assert not left_in_shared_memory(shared)
    left = await start(tmp_path, opened)
    pids_in(log, 1)
    left.note_memory()  # as the watch does every few seconds
    os.kill(left.pid, signal.SIGKILL)
    await left.wait()
    assert left_in_shared_memory(shared)
    again = await start(tmp_path, "pass")  # a server that was killed as well starts again
    assert not left_in_shared_memory(shared)
    await again.kill()


def test_without_a_gpu_that_its_tool_lists_the_device_is_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_device("auto") == "cpu"
    assert find_device("cuda") == "cuda"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: a fine one'\n")
    tool.chmod(0o755)
    assert find_device("auto") == "cuda"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert find_device("auto") == "cpu"
