"""A gateway of several workers on one port behaves as one gateway, and its workers may die or hang."""

import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_queue.http.worker_processes import run_workers
from tests.support.gateway.calls import Call
from tests.support.gateway.gated_engine import GatedEngine, NumberingEngine, asked, let_on
from tests.support.gateway.mortal_engine import POISON
from tests.support.gateway.processes import Processes
from tests.support.gateway.running import ADMIN_KEY, CLIENT_KEY, RunningGateway
from tests.support.serving import free_port
from tests.support.waiting import wait_until

WORKERS = 2
CONNECTIONS = 12
"""Fresh connections, of which one worker gets all with a probability of 1 in 2,048."""
ATTEMPTS = 5
"""Of one call: one worker gets all of them in one of sixteen runs, in which a test shows less."""


@pytest.fixture
def engine(processes: Processes) -> GatedEngine:
    """A fresh engine that gives each answer its own number."""
    processes.backends.engine = engine = NumberingEngine(processes.backends.tokenizer)
    engine.numbers = itertools.count()
    engine.stall_after = 3
    return engine


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text("keys: []\n")
    return file


@pytest.fixture(scope="module")
def shared(processes: Processes, keys_file: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A gateway that all short tests share. The last of them ends it."""
    with processes.gateway(workers=WORKERS, keys_file=keys_file) as (process, gateway):
        wait_until(lambda: up(gateway) == [1.0] * WORKERS)
        yield process, gateway.url


@pytest.fixture
def gateway(
    processes: Processes, shared: tuple[subprocess.Popen[bytes], str], engine: GatedEngine
) -> Iterator[RunningGateway]:
    with httpx.Client(timeout=120) as http:
        gateway = RunningGateway(shared[1], engine, processes.backends.redis, http)
        yield gateway
        let_on(gateway)


def samples(gateway: RunningGateway, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of a metric, by their labels."""
    lines = httpx.get(f"{gateway.url}/metrics", timeout=120).text.splitlines()
    own = "\n".join([each for each in lines if each.startswith(name)])  # reading all metrics takes long
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(own + "\n")
        for sample in family.samples
        if sample.name == name
    }


def up(gateway: RunningGateway) -> list[float]:
    try:
        return list(samples(gateway, "weir_worker_up").values())
    except httpx.TransportError:  # the connection was one of a worker that was killed
        return []


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [each for each in psutil.Process(process.pid).children() if runs(each)]


def runs(process: psutil.Process) -> bool:
    """Whether the process runs: its parent may not have noticed yet that it ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fresh(gateway: RunningGateway, method: str, path: str, key: str = CLIENT_KEY, **more: Any) -> list[int]:
    """The statuses of the same request over fresh connections."""
    headers = {"authorization": f"Bearer {key}"}
    return [
        httpx.request(method, gateway.url + path, headers=headers, timeout=120, **more).status_code
        for _ in range(CONNECTIONS)
    ]


def serves(gateway: RunningGateway) -> bool:
    """Whether every fresh connection is served."""
    try:
        return set(fresh(gateway, "GET", "/v1/models")) == {200}
    except httpx.TransportError:  # the kernel gave the connection to a killed worker whose threads still end
        return False


# One gateway


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_retry_joins_its_call_at_whatever_worker(gateway: RunningGateway, stream: bool) -> None:
    session = gateway.session()
    before = joined(gateway)
    calls = attempts(gateway, session, stream=stream)
    wait_until(lambda: joined(gateway) == before + ATTEMPTS - 1)
    let_on(gateway)
    heard = [call.answer() for call in calls]
    assert {status for status, _ in heard} == {200}
    assert len({content(body) for _, body in heard}) == 1
    assert len(gateway.engine.requests) == 1
    assert len(gateway.turns(session)) == 1


def attempts(gateway: RunningGateway, session: dict[str, Any], **body: Any) -> list[Call]:
    """A call, and its retries one after the other, each over a fresh connection."""
    calls = [Call(gateway, session, **body)]
    asked(gateway, 1)
    for attempt in range(1, ATTEMPTS):
        calls.append(Call(gateway, session, attempt, **body))
        wait_until(lambda: in_flight(gateway) == len(calls))
    return calls


def in_flight(gateway: RunningGateway) -> float:
    """Calls of agents. The worker that has a call's client counts the call."""
    found = samples(gateway, "weir_calls_in_flight")
    return sum(count for labels, count in found.items() if dict(labels)["dialect"] == "chat")


def joined(gateway: RunningGateway) -> float:
    return sum(samples(gateway, "weir_joined_calls_total").values())


def content(body: bytes) -> bytes:
    """The text of an answer, whole or streamed."""
    return b"".join(re.findall(rb'"content":"([^"]*)"', body))


def test_a_retry_hears_the_error_of_the_call_that_it_joined(gateway: RunningGateway) -> None:
    session = gateway.session()
    calls = attempts(gateway, session)
    gateway.call("DELETE", f"/sessions/{session['session_id']}")
    let_on(gateway)
    assert {call.answer()[0] for call in calls} == {410}
    assert len(gateway.engine.requests) == 1


def test_a_joined_answer_ends_when_no_client_is_left(gateway: RunningGateway) -> None:
    session = gateway.session()
    calls = attempts(gateway, session, stream=True)
    for call in calls:
        call.hang_up()
    wait_until(lambda: in_flight(gateway) == 0)
    wait_until(lambda: [turn["finish_reason"] for turn in gateway.turns(session)] == ["abort"])


def test_sessions_change_their_worker(gateway: RunningGateway) -> None:
    let_on(gateway)
    session = gateway.session()
    history: list[dict[str, str]] = []
    for number in range(CONNECTIONS):
        history.append({"role": "user", "content": str(number)})
        call = Call(gateway, session, messages=history)
        history.append(
            {"role": "assistant", "content": call.completion()["choices"][0]["message"]["content"]}
        )
    relations = [turn["relation"] for turn in gateway.turns(session)]
    assert relations == ["root", *["extends"] * (CONNECTIONS - 1)]


def test_metrics_and_status_count_the_calls_of_all_workers(gateway: RunningGateway) -> None:
    let_on(gateway)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    turns, samplings = sum(samples(gateway, "weir_turns_total").values()), sampled(gateway)
    assert set(fresh(gateway, "POST", "/v1/chat/completions", json=chat)) == {200}
    for _ in range(3):  # whichever worker answers
        counted = samples(gateway, "weir_turns_total")
        assert sum(counted.values()) == turns + CONNECTIONS
        assert {dict(labels)["worker"] for labels in counted} == {"0", "1"}
        assert sampled(gateway) == samplings + CONNECTIONS


def sampled(gateway: RunningGateway) -> int:
    """How often the workers sampled an answer, as the status says."""
    status = httpx.get(
        f"{gateway.url}/admin/status", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=120
    )
    parts = {part["part"]: part["runs"] for part in status.json()["slowest_parts"]}
    return int(parts.get("sample", 0))


def test_all_workers_know_a_new_key_when_the_operator_hears_of_it(gateway: RunningGateway) -> None:
    made = gateway.post("/admin/keys", {"name": "one", "role": "client"}, key=ADMIN_KEY).json()
    assert set(fresh(gateway, "GET", "/v1/models", key=made["api_key"])) == {200}
    assert gateway.call("DELETE", "/admin/keys/one", key=ADMIN_KEY).status_code == 200
    assert set(fresh(gateway, "GET", "/v1/models", key=made["api_key"])) == {401}


def test_sighup_reaches_every_worker(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway, keys_file: Path
) -> None:
    secret = "a-new-secret-of-32-characters-000"
    keys_file.write_text(f"keys:\n- {{name: new, role: client, secrets: [{secret}]}}\n")
    shared[0].send_signal(signal.SIGHUP)
    wait_until(lambda: set(fresh(gateway, "GET", "/v1/models", key=secret)) == {200})
    assert shared[0].poll() is None


# Workers that end


def test_metrics_say_which_worker_hangs(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway
) -> None:
    hung = workers_of(shared[0])[0]
    hung.suspend()
    with ThreadPoolExecutor(4 * CONNECTIONS) as scrapes:  # the kernel chooses each one's worker
        asked = [scrapes.submit(up, gateway) for _ in range(4 * CONNECTIONS)]
        found = any(sorted(each.result()) == [0.0, 1.0] for each in as_completed(asked))
        with suppress(psutil.NoSuchProcess):  # on a busy machine it was killed meanwhile
            hung.resume()
    assert found
    wait_until(lambda: up(gateway) == [1.0] * WORKERS)


def test_a_killed_worker_is_started_again_and_a_retry_of_its_call_samples_again(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway
) -> None:
    process, _ = shared
    session = gateway.session()
    interrupted = Call(gateway, session)
    asked(gateway, 1)
    busy = [dict(labels) for labels, count in samples(gateway, "weir_calls_in_flight").items() if count]
    (number,) = [labels["worker"] for labels in busy if labels["dialect"] == "chat"]
    (victim,) = [each for each in workers_of(process) if ["--worker", number] == each.cmdline()[3:5]]
    victim.kill()
    wait_until(lambda: not runs(victim))
    wait_until(lambda: serves(gateway))
    wait_until(lambda: up(gateway) == [1.0] * WORKERS and len(workers_of(process)) == WORKERS)
    let_on(gateway)
    assert Call(gateway, session, attempt=1).answer()[0] == 200
    interrupted.hang_up()


@pytest.mark.long
def test_a_hung_worker_is_killed_and_started_again(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway
) -> None:
    hung = workers_of(shared[0])[0]
    hung.suspend()
    wait_until(lambda: not runs(hung))
    wait_until(lambda: len(workers_of(shared[0])) == WORKERS and up(gateway) == [1.0] * WORKERS)


@pytest.mark.long
def test_workers_end_with_a_killed_parent(processes: Processes, engine: GatedEngine) -> None:
    with processes.gateway(workers=WORKERS) as (process, gateway):
        wait_until(lambda: up(gateway) == [1.0] * WORKERS)
        workers = workers_of(process)
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(runs, workers)))


def test_a_worker_ends_when_its_input_does() -> None:
    """The parent holds the other end, which the kernel closes, however the parent ends."""
    waits = "import time; from rollout_queue.http.worker_processes import end_with_parent; end_with_parent();"
    command = [sys.executable, "-c", f"{waits} print(flush=True); time.sleep(3600)  # until it is ended"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"\n"
        worker.stdin.close()
        assert worker.wait(timeout=300) == -signal.SIGTERM


# The whole gateway


def test_the_parent_ends_if_its_workers_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_queue.http.worker_processes.FIRST_PAUSE_S", 0.001)
    assert run_workers(WORKERS, "127.0.0.1", free_port(), lambda worker: ["false"], stop_within_s=60) == 1


def test_sigterm_lets_streams_of_all_workers_end(
    shared: tuple[subprocess.Popen[bytes], str], gateway: RunningGateway
) -> None:
    process, _ = shared
    calls = [Call(gateway, gateway.session(), stream=True) for _ in range(CONNECTIONS)]
    asked(gateway, CONNECTIONS)
    process.terminate()
    wait_until(lambda: not ready_at(gateway))
    let_on(gateway)
    heard = [call.answer() for call in calls]
    assert all(status == 200 and b"[DONE]" in body for status, body in heard)
    assert process.wait(timeout=300) == 0


def ready_at(gateway: RunningGateway) -> bool:
    try:
        return httpx.get(f"{gateway.url}/ready", timeout=120).status_code == 200
    except httpx.TransportError:
        return False


def test_two_engines_die_of_a_request_whichever_worker_gets_its_retries(
    processes: Processes, engine: GatedEngine
) -> None:
    """The client does not say that it repeats the call."""
    ports = [free_port() for _ in range(4)]
    command = [sys.executable, "-m", "tests.support.gateway.mortal_engine"]
    tokenizer = str(processes.backends.model_path / "tokenizer.json")
    engines = [subprocess.Popen([*command, str(port), tokenizer]) for port in ports]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    try:
        with processes.gateway(workers=WORKERS, engines=urls, engine_wait_s=60) as (_, gateway):
            wait_until(lambda: sum(server["state"] == "ready" for server in servers(gateway)) == len(ports))
            body = {"messages": [{"role": "user", "content": POISON}]}
            assert set(fresh(gateway, "POST", "/v1/chat/completions", json=body)) == {400}
            wait_until(lambda: sum(each.poll() is not None for each in engines) >= 2)
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert set(fresh(gateway, "POST", "/v1/chat/completions", json=body)) == {200}
            assert sum(each.poll() is not None for each in engines) == 2
    finally:
        for each in engines:
            each.kill()
            each.wait()


def servers(gateway: RunningGateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.admin("GET", "/rollout_servers").json()["data"]
    return found
