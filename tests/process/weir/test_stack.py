"""The stack starts everything, says what it waits for, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until
from weir.errors import ServiceDied, StackError
from weir.stack import state
from weir.stack.probes import http_ready
from weir.stack.process import Service
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

FakeService = Callable[..., Service]


def alive(pid: int) -> bool:
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_everything_starts_and_stops_in_the_order_of_dependence(
    settings: StackSettings, fake_service: FakeService, notes: Path
) -> None:
    services = [fake_service(name) for name in ("redis", "rollout_server", "gateway", "trainer_service")]
    with Stack(settings, services) as stack:
        stack.wait_ready()
        pids = [process.pid for process in stack.processes.values()]
        assert stack.gateway_url == services[2].url
        found = state.read(settings.run_dir)
        assert found is not None
        assert found.phase == "up"
    assert notes.read_text().split() == ["trainer_service", "gateway", "rollout_server", "redis"]
    assert not any(alive(pid) for pid in pids)
    assert state.read(settings.run_dir) is None


def test_what_is_waited_for_is_told_with_its_reason(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    told: list[str] = []

    def on_wait(sentence: str) -> None:
        told.append(sentence)
        if "the gate is shut" in sentence:
            gate.touch()

    with Stack(settings, [fake_service("gateway", gate=gate)]) as stack:
        stack.wait_ready(on_wait=on_wait)
        assert stack.waiting_for() == ""
    assert told[-1] == "gateway: the gate is shut"


def test_a_service_that_never_gets_ready_is_named_with_its_reason(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path, turned: TurnedClock
) -> None:
    def on_wait(sentence: str) -> None:
        if "the gate is shut" in sentence:
            turned.turn(601)

    with (
        Stack(settings, [fake_service("gateway", gate=tmp_path / "never")]) as stack,
        pytest.raises(
            StackError, match=r"not ready after 600 s: gateway: the gate is shut; logs: .*/run/logs"
        ),
    ):
        stack.wait_ready(timeout_s=600, on_wait=on_wait)


def test_a_taken_port_is_named_with_the_setting_to_change(
    settings: StackSettings, fake_service: FakeService
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(
                StackError, match=rf"port {port}, which gateway needs, is in use.*change gateway\.port"
            ),
            Stack(settings, [fake_service("gateway", port=port)]),
        ):
            pass


def test_a_dead_service_is_one_sentence_with_the_end_of_its_log(
    settings: StackSettings, fake_service: FakeService
) -> None:
    command = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    broken = Service("gateway", command, {}, "http://127.0.0.1:9", http_ready("http://127.0.0.1:9"))
    with Stack(settings, [fake_service("redis"), broken]) as stack:
        pid = stack.processes["redis"].pid
        with pytest.raises(ServiceDied, match=r"gateway ended with exit code 3; .*gateway\.log:\n +no such"):
            stack.wait_ready()
    assert not alive(pid)


def test_a_killed_service_takes_its_orphans_along(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    with Stack(settings, [fake_service("rollout_server", child=child)]) as stack:
        stack.wait_ready()
        grandchild = int(child.read_text())
        stack.check()
        os.kill(stack.processes["rollout_server"].pid, signal.SIGKILL)
        wait_until(lambda: stack.processes["rollout_server"].exit_code is not None)
        with pytest.raises(ServiceDied, match="was killed by SIGKILL"):
            stack.check()
        assert alive(grandchild)
    assert not alive(grandchild)


def test_a_deaf_service_is_killed_after_its_deadline(settings: StackSettings, tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    # The service sleeps until it is killed.
    script += "print('deaf', flush=True); time.sleep(600)"
    deaf = Service("gateway", (sys.executable, "-c", script), {}, "", lambda: None)
    impatient = settings.model_copy(update={"stop_timeout_s": 0.2})
    with Stack(impatient, [deaf]) as stack:
        process = stack.processes["gateway"]
        wait_until(lambda: "deaf" in process.log_path.read_text())
    assert process.exit_code == -signal.SIGKILL


def test_a_second_stack_in_the_same_run_directory_is_refused(
    settings: StackSettings, fake_service: FakeService
) -> None:
    with (
        Stack(settings, [fake_service("gateway")]),
        pytest.raises(StackError, match=rf"is in use by pid {os.getpid()}"),
        Stack(settings, [fake_service("gateway")]),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_stops_the_services_in_order(
    tmp_path: Path, notes: Path, unused_ports: list[int], number: signal.Signals
) -> None:
    script = Path(__file__).parents[2] / "support" / "weir" / "parent.py"
    command = [sys.executable, str(script), str(tmp_path / "run"), str(notes), *map(str, unused_ports)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.send_signal(number)
    try:
        parent.wait(300)
    finally:
        parent.terminate()  # ends the services if the tested signal had no effect
        parent.stdout.close()
    assert notes.read_text().split() == ["gateway", "redis"]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_the_ports_of_services_are_read_where_the_services_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "weir.yaml"
    file.write_text("gateway: {port: 9001}\nrollout_server: {engine_port: 9002}\nstack: {redis_port: 9003}\n")
    monkeypatch.setenv("WEIR_CONFIG", str(file))
    monkeypatch.setenv("WEIR_TRAINER__PORT", "9004")
    found = StackSettings()
    assert (found.gateway_port, found.engine_port, found.redis_port, found.trainer_port) == (
        9001,
        9002,
        9003,
        9004,
    )
    assert StackSettings(gateway_port=9005).gateway_port == 9005
