"""Services that die are restarted, and another process can find and stop the running services."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout_queue.protocol.policies import ServingShape
from rollout_queue.protocol.status import QueueReport
from rollout_queue.protocol.trainer import TrainerReport
from tests.support.system_status import server_shape, system_status
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from weir import status
from weir.errors import StackError
from weir.stack import down, state
from weir.stack.process import Service
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.state import ProcessState, StackState
from weir.stack.supervisor import FIRST_BACKOFF_S, STAY, Backoff, Supervisor

FakeService = Callable[..., Service]


def written(settings: StackSettings) -> StackState:
    found = state.read(settings.run_dir)
    assert found is not None
    return found


def test_a_service_that_dies_is_started_again_without_its_orphans(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path, turned: TurnedClock
) -> None:
    child = tmp_path / "child"
    with Stack(settings, [fake_service("rollout_server", child=child)]) as stack:
        stack.wait_ready()
        supervisor, process = Supervisor(stack), stack.processes["rollout_server"]
        supervisor.check()
        first, orphan = process.pid, int(child.read_text())
        os.kill(first, signal.SIGKILL)

        def is_back() -> bool:
            turned.turn(FIRST_BACKOFF_S)
            supervisor.check()
            return process.restarts == 1

        wait_until(is_back)
        stack.wait_ready()
        assert process.pid != first
        assert not psutil.pid_exists(orphan)
        assert written(settings).services["rollout_server"].restarts == 1


def test_a_service_that_keeps_dying_waits_longer_each_time() -> None:
    backoff = Backoff(started_at=0.0)
    waits: list[float] = []
    for _ in range(7):
        backoff.died(now=10.0)
        waits.append((backoff.due_at or 0.0) - 10.0)
        backoff.started(now=10.0)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    backoff.died(now=100.0)
    assert backoff.due_at == 101.0


def test_down_stops_what_a_killed_parent_left(
    settings: StackSettings, fake_service: FakeService, notes: Path
) -> None:
    stack = Stack(settings, [fake_service("redis"), fake_service("gateway")])
    stack.start()
    stack.wait_ready()
    found = written(settings)
    found.parent.started_at -= 100  # as if another process now had the parent's pid
    found.write(settings.run_dir)
    with pytest.raises(
        StackError, match="services of an earlier run still run: redis, gateway; stop them with `weir down"
    ):
        Stack(settings, [fake_service("gateway")]).start()
    said = down.stop(settings.run_dir, timeout_s=5)
    assert "no longer runs" in said[0]
    assert [sentence.split()[0] for sentence in said[1:]] == ["gateway", "redis"]
    assert notes.read_text().split() == ["gateway", "redis"]
    assert down.stop(settings.run_dir, timeout_s=5) == [f"no services run in {settings.run_dir}"]
    stack.stop()


def test_down_never_touches_a_process_that_only_shares_the_pid(settings: StackSettings) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        then = ProcessState.of(stranger.pid)
        then.started_at -= 100
        StackState(parent=then, services={"gateway": then}).write(settings.run_dir)
        down.stop(settings.run_dir, timeout_s=1)
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_status_tells_ready_from_unready_from_down(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path
) -> None:
    services = [fake_service("gateway"), fake_service("trainer_service", gate=tmp_path / "never")]
    with Stack(settings, services) as stack:
        wait_until(lambda: "gate is shut" in stack.waiting_for())
        found = written(settings)
        wait_until(lambda: status.rows_of(found, None)[0].state == "ready")
        _, unready = status.rows_of(found, None)
        assert (unready.state, unready.detail) == ("not ready", "the gate is shut")
    assert [row.state for row in status.rows_of(found, None)] == ["down", "down"]


def test_status_says_what_the_gateway_knows() -> None:
    details = status.details_from(
        system_status(
            policy=ServingShape(serving=3, target=4),
            trainer=TrainerReport(state="training", step=12, version=4),
            servers=(server_shape("rollout-0", version=3),),
            queue=QueueReport(
                stream_length=5, sessions=9, unfinished_sessions=2, verdicts={}, dead_letters=0
            ),
            warnings=("no reward for 60 s",),
        )
    )
    assert details == {
        "gateway": "serving 3, target 4; no reward for 60 s",
        "rollout_server": "version 3",
        "trainer_service": "state training, step 12, version 4",
        "redis": "stream_length 5, sessions 9, unfinished_sessions 2, dead_letters 0",
    }


@pytest.mark.parametrize("told", [b"", STAY])
def test_services_stop_if_weir_up_is_killed_at_their_start(tmp_path: Path, told: bytes) -> None:
    """The end of stdin without a word is what a killed `weir up` leaves."""
    program = (
        "import sys, threading; from weir.stack.supervisor import stop_if_abandoned; "
        "sys.stdin.buffer.readline();"
        "stop_if_abandoned(sys.stdin.buffer); threading.Event().wait(600 if not sys.argv[1:] else 0.5)"
    )
    more = ["stays"] if told else []
    process = subprocess.Popen([sys.executable, "-c", program, *more], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"settings\n" + told)
    process.stdin.close()
    assert process.wait() == (0 if told else -signal.SIGTERM)
