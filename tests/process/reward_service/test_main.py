"""The service as a process, alone and in a stack: it answers, ends on SIGTERM, and may be killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.own_processes import environment, live, started
from tests.support.reward_service.running import reward_service, without_namespaces
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.reward_service.sessions import finished, reward_of, values_of
from tests.support.serving import free_port, serving
from tests.support.waiting import wait_until
from weir import status
from weir.stack import stack_state
from weir.stack.services import services_of
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack
from weir.stack.supervisor import Supervisor

HALF = {"name": "half", "kind": "python", "source": "def grade(sample, item):\n    return 0.5\n"}
PEEKING = """
def grade(sample, item):
    return float(len(open('/proc/' + str(item['pid']) + '/environ').read()))
"""


@pytest.mark.parametrize(
    "words", [["reward_service"], pytest.param(["weir", "rewards"], marks=pytest.mark.long)]
)
def test_it_grades_hides_its_environment_and_ends_on_sigterm(tmp_path: Path, words: list[str]) -> None:
    port = free_port()
    process = started(tmp_path, words, {"rewards": {"port": port, "admin_keys": ["hush"]}})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: live(url))
        body = {
            "grader": {"type": "python", "source": PEEKING},
            "model_sample": "",
            "item": {"pid": process.pid},
        }
        headers = {"authorization": "Bearer hush"}
        reply = httpx.post(f"{url}/v1/fine_tuning/alpha/graders/run", json=body, headers=headers, timeout=300)
        details = reply.json()["metadata"]["errors"]["python_grader_runtime_error_details"]
        assert "PermissionError" in details
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


@pytest.mark.parametrize("kind", ["python", "openai_grader"])
def test_a_rule_that_could_grade_nothing_stops_it_at_the_start(tmp_path: Path, kind: str) -> None:
    python = {"type": "python", "name": "own", "source": "def grade(:"}
    given = {"source": "def grade(:"} if kind == "python" else {"grader": python}
    rules = [HALF, {"name": "bad", "kind": kind, **given}]
    where = "rewards.rules.1" + (".grader" if kind == "openai_grader" else "")
    file = tmp_path / "weir.yaml"
    file.write_text(yaml.safe_dump({"rewards": {"port": free_port(), "rules": rules}}))
    command = [sys.executable, "-m", "reward_service", "--config", str(file)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"{where}.source: line 1, SyntaxError: invalid syntax"


def test_a_process_that_hides_is_not_read_by_its_children() -> None:
    asked = (
        "import ctypes; from reward_service.python_sandbox import hide_from_children; hide_from_children();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    shown = subprocess.run([sys.executable, "-c", asked], env=environment(), capture_output=True, check=True)
    assert shown.stdout == b"0\n"


def test_a_killed_service_leaves_the_session_to_the_next_one(gateway: RunningGateway, tmp_path: Path) -> None:
    session_id = finished(gateway)
    grader = ScriptedGrader(lambda body: 0.5, hang=True)
    with serving(grader) as url:
        settings = {
            "port": free_port(),
            "admin_keys": [ADMIN_KEY],
            "gateway_url": gateway.url,
            "rules": [{"name": "remote", "kind": "http", "url": url}],
            "dispatch": {"poll_every_s": 0.1},
        }
        killed = started(tmp_path, ["reward_service"], {"rewards": settings})
        assert grader.called.wait(300)
        killed.kill()
        killed.wait()
        grader.let_answer()
        assert values_of(gateway, session_id) == []
        with reward_service(**settings):
            reward = reward_of(gateway, session_id)
    assert (reward["value"], reward["key"]) == (0.5, "remote")


def test_in_a_stack_it_rewards_is_told_and_comes_back_after_a_kill(
    gateway: RunningGateway, tmp_path: Path
) -> None:
    settings = StackSettings(
        run_dir=tmp_path / "run",
        gateway_port=urlsplit(gateway.url).port or 0,
        rewards_port=free_port(),
        admin_keys=[ADMIN_KEY],
        services={"rewards": {"rules": [HALF], "dispatch": {"poll_every_s": 0.1}}},
    )
    with Stack(settings, [services_of(settings)[-1]]) as stack:
        stack.wait_ready()
        assert reward_of(gateway, finished(gateway))["value"] == 0.5
        running = stack_state.read(settings.run_dir)
        assert running is not None

        def said() -> tuple[str, str, str]:
            (row,) = status.rows_of(running, ADMIN_KEY)
            return row.name, row.state, row.detail

        # The session is in work until the service has heard that the gateway took its reward.
        wait_until(lambda: said() == ("reward_service", "ready", "0 sessions in work, 0 dead letters"))
        (unauthorised,) = status.rows_of(running, "unknown")
        assert "401" in unauthorised.detail
        supervisor = Supervisor(stack)
        process = stack.processes["reward_service"]
        os.kill(process.pid, signal.SIGKILL)

        def restarted() -> bool:
            supervisor.check()
            return process.restarts == 1 and stack.waiting_for() == ""

        wait_until(restarted)
        assert reward_of(gateway, finished(gateway))["value"] == 0.5


@pytest.mark.parametrize("section", ["rewards", "fine_tuning"])
def test_graders_of_clients_that_cannot_be_isolated_keep_the_service_from_starting(
    tmp_path: Path, section: str
) -> None:
    python = {"interpreter": without_namespaces(tmp_path), "from_clients": True}
    settings = {section: {"port": free_port(), "admin_keys": ["a"], "python": python}}
    (tmp_path / "weir.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    module = "reward_service" if section == "rewards" else section
    command = [sys.executable, "-m", module, "--config", str(tmp_path / "weir.yaml")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"{section}.python.from_clients: the system grants no namespaces")
