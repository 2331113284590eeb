"""A stack starts and stops its services, restarts those that die, and is found by other processes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from rollout_queue import clock
from rollout_queue.protocol.gateway_messages import QueueReport, ServingShape
from rollout_queue.protocol.trainer_messages import TrainerReport
from tests.support.long_cases import cases
from tests.support.system_status import server_shape, system_status
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import PATIENCE_S, wait_until
from tests.support.weir.commands import weir
from weir import status
from weir.errors import ServiceDied, StackError
from weir.stack import stack_control, stack_state
from weir.stack.service_process import Service, http_ready
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.stack_control import LogEnd
from weir.stack.stack_state import Phase, ProcessState, StackState
from weir.stack.supervisor import FIRST_BACKOFF_S, STAY, WATCH_EVERY_S, Backoff, Supervisor, wait_up

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
        found = stack_state.read(settings.run_dir)
        assert found is not None
        assert found.phase == "up"
    assert notes.read_text().split() == ["trainer_service", "gateway", "rollout_server", "redis"]
    assert not any(alive(pid) for pid in pids)
    assert stack_state.read(settings.run_dir) is None


def test_what_is_waited_for_is_told_with_its_reason(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path
) -> None:
    gate, told = tmp_path / "gate", list[str]()

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

    said = r"not ready after 600 s: gateway: the gate is shut; logs: .*/run/logs"
    with (
        Stack(settings, [fake_service("gateway", gate=tmp_path / "never")]) as stack,
        pytest.raises(StackError, match=said),
    ):
        stack.wait_ready(timeout_s=600, on_wait=on_wait)


def test_a_taken_port_or_run_directory_is_named(settings: StackSettings, fake_service: FakeService) -> None:
    with Stack(settings, [fake_service("gateway")]) as stack:
        again = Stack(settings, [fake_service("gateway")])
        with pytest.raises(StackError, match=rf"is in use by pid {os.getpid()}"), again:
            pass
        port = urlsplit(stack.gateway_url).port
        said = rf"port {port}, which gateway needs, is in use.*change gateway\.port"
        other = settings.model_copy(update={"run_dir": settings.run_dir.with_name("other")})
        stack.wait_ready()
        with pytest.raises(StackError, match=said), Stack(other, [fake_service("gateway", port=port)]):
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
        with pytest.raises(ServiceDied, match=r"was killed by SIGKILL: by the system \(memory\?"):
            stack.check()
        assert alive(grandchild)
    assert not alive(grandchild)


def test_a_child_that_started_just_before_its_service_died_is_killed_too(
    settings: StackSettings, tmp_path: Path
) -> None:
    child, go = tmp_path / "child", tmp_path / "go"
    script = f"""
import pathlib, subprocess, time
while not pathlib.Path({str(go)!r}).exists():
    time.sleep(0.01)
pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
raise SystemExit(3)
"""
    late = Service("rollout_server", (sys.executable, "-c", script), {}, "", lambda: None)
    with Stack(settings, [late]) as stack:
        stack.wait_ready()
        go.touch()
        wait_until(lambda: stack.processes["rollout_server"].exit_code is not None)
        orphan = int(child.read_text())
        assert alive(orphan)
    assert not alive(orphan)


def test_the_table_of_processes_is_read_seldom_and_once_for_all_services(
    settings: StackSettings, fake_service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[float] = []

    def noted(attributes: list[str]) -> Iterator[psutil.Process]:
        read.append(clock.monotonic())
        return process_iter(attributes)

    process_iter = psutil.process_iter
    with Stack(settings, [fake_service(name) for name in ("redis", "gateway", "trainer_service")]) as stack:
        stack.wait_ready()
        monkeypatch.setattr(psutil, "process_iter", noted)
        with clock.using(stopped := TurnedClock(stopped=True)):
            supervisor = Supervisor(stack)
            for _ in range(120):  # a minute
                stopped.turn(WATCH_EVERY_S)
                supervisor.check()
        monkeypatch.undo()
    assert len(read) == 12


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


@pytest.mark.parametrize("number", cases([signal.SIGTERM], long=[signal.SIGINT, signal.SIGHUP]))
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


# Services that die, and other processes


def written(settings: StackSettings) -> StackState:
    found = stack_state.read(settings.run_dir)
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
        assert not alive(orphan)
        assert written(settings).services["rollout_server"].restarts == 1


def test_one_service_is_restarted_and_its_log_is_read(
    settings: StackSettings, fake_service: FakeService, notes: Path, turned: TurnedClock
) -> None:
    run_dir = ["--run-dir", str(settings.run_dir)]
    with Stack(settings, [fake_service("redis"), fake_service("gateway")]) as stack:
        stack.wait_ready()
        supervisor, first = Supervisor(stack), stack.processes["gateway"].pid
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(weir, "restart", "gateway", *run_dir)
            while not told.done():
                turned.turn(FIRST_BACKOFF_S)
                supervisor.check()
        assert told.result().status == 0, told.result().err
        second = stack.processes["gateway"].pid
        assert second != first
        assert stack.processes["gateway"].restarts == 0, "nothing has failed"
        assert told.result().out.splitlines()[-1] == f"gateway is ready again, pid {second}"
        assert notes.read_text().split() == ["gateway"], "it was asked to end, and nothing else was"
        unknown = weir("restart", "gatway", *run_dir)
        assert (unknown.status, "no service 'gatway'" in unknown.err) == (1, True)
        assert "did you mean gateway?" in unknown.err
    for name in ("redis", "gateway"):
        (settings.logs_dir / f"{name}.log").write_text("".join(f"{name} {line}\n" for line in range(30)))
    assert weir("logs", "gateway", "-n", "2", *run_dir).out.splitlines() == ["gateway 28", "gateway 29"]
    both = weir("logs", *run_dir).out.splitlines()
    assert len(both) == 40
    assert both[-1] == f"{'redis':16} redis 29"


def test_a_log_is_followed_also_when_it_is_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("before\nand bef")
    end = LogEnd(log)
    assert end.last(7) == ["before"]
    with log.open("a") as file:
        file.write("ore\none\ntw")
        file.flush()
        assert end.new() == ["and before", "one"]
        file.write("o\n")
    assert end.new() == ["two"]
    log.rename(tmp_path / "engine.log.1")
    assert end.new() == []
    log.write_text("new\n")
    assert end.new() == ["new"]


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
    said = stack_control.stop(settings.run_dir, timeout_s=PATIENCE_S)
    assert "no longer runs" in said[0]
    assert [sentence.split()[0] for sentence in said[1:]] == ["gateway", "redis"]
    assert notes.read_text().split() == ["gateway", "redis"]
    assert stack_control.stop(settings.run_dir, timeout_s=PATIENCE_S) == [
        f"no services run in {settings.run_dir}"
    ]
    stack.stop()


def test_down_never_touches_a_process_that_only_shares_the_pid(settings: StackSettings) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        then = ProcessState.of(stranger.pid)
        then.started_at -= 100
        StackState(parent=then, services={"gateway": then}).write(settings.run_dir)
        stack_control.stop(settings.run_dir, timeout_s=1)
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_status_tells_ready_from_unready_from_down(
    settings: StackSettings, fake_service: FakeService, tmp_path: Path
) -> None:
    services = [fake_service("gateway"), fake_service("trainer_service", gate=tmp_path / "never")]
    with Stack(settings, services) as stack:
        wait_until(lambda: "gate is shut" in stack.waiting_for())
        found = written(settings)

        def told() -> bool:
            ready, unready = status.rows_of(found, None)
            return (ready.state, unready.state, unready.detail) == ("ready", "not ready", "the gate is shut")

        wait_until(told)
    assert [row.state for row in status.rows_of(found, None)] == ["down", "down"]


def test_status_says_what_the_gateway_knows() -> None:
    details = status.details_from(
        system_status(
            policy=ServingShape(serving=3, target=4),
            trainer=TrainerReport(state="training", step=12, version=4),
            servers=(
                server_shape("rollout-0", version=3),
                server_shape("rollout-1", version=3, error="its engine gives no sign of life"),
            ),
            queue=QueueReport(
                stream_length=5, sessions=9, unfinished_sessions=2, verdicts={}, dead_letters=0
            ),
            warnings=("no reward for 60 s",),
        )
    )
    assert details == {
        "gateway": "serves version 3, target 4; no reward for 60 s",
        "rollout_server": "version 3, version 3 (its engine gives no sign of life)",
        "trainer_service": "state training, step 12, version 4",
        "redis": "5 records for the trainer, 9 sessions, 2 unfinished, 0 dead letters",
    }


def test_a_start_in_which_nothing_changes_is_not_mute(settings: StackSettings, turned: TurnedClock) -> None:
    told = list[str]()

    def write(phase: Phase) -> None:
        parent, waits = ProcessState.of(os.getpid()), "gateway: it is starting"
        StackState(parent=parent, phase=phase, detail=waits).write(settings.run_dir)

    def on_wait(sentence: str) -> None:
        told.append(sentence)
        turned.turn(20)
        if len(told) == 3:
            write("up")

    write("starting")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wait_up(child, settings, on_wait)
    first, *others = told
    assert first == "gateway: it is starting"
    assert [re.sub(r"\d+", "n", each) for each in others] == ["gateway: it is starting (n s so far)"] * 2


def test_a_supervisor_that_ends_while_weir_up_waits_says_why_and_nothing_else(
    settings: StackSettings,
) -> None:
    """Python cannot end while a thread waits in a buffer, and would write a fatal error."""
    command = [sys.executable, "-m", "weir.stack.supervisor"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(settings.model_dump_json().encode() + b"\n")
        process.stdin.flush()
        said = process.stderr.read().decode()  # until it ends
    assert process.returncode == 1
    assert len(said.splitlines()) == 1, said
    assert "no model is set" in said


def test_no_line_of_the_status_is_cut() -> None:
    warning = "w" * 300
    row = status.ServiceStatus("gateway", 7, "ready", "http://127.0.0.1:8000", f"serves version 3; {warning}")
    assert [line.plain for line in status.lines_of([row])] == [
        "gateway  ready      http://127.0.0.1:8000  pid 7",
        "    serves version 3",
        f"    {warning}",
    ]


@pytest.mark.parametrize("told", [b"", STAY])
def test_services_stop_if_weir_up_is_killed_at_their_start(tmp_path: Path, told: bytes) -> None:
    """The end of stdin without a word is what a killed `weir up` leaves."""
    program = (
        "import sys, threading; from weir.stack.supervisor import stop_if_abandoned; "
        "stdin = open(0, 'rb', buffering=0, closefd=False); stdin.readline();"
        "stop_if_abandoned(stdin); threading.Event().wait(600 if not sys.argv[1:] else 0.5)"
    )
    more = ["stays"] if told else []
    process = subprocess.Popen([sys.executable, "-c", program, *more], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"settings\n" + told)
    process.stdin.close()
    assert process.wait() == (0 if told else -signal.SIGTERM)
