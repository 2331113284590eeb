"""The service as a process: it answers, ends on SIGTERM, and may be killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.running import ADMIN_KEY, RunningGateway
from tests.support.reward_service.running import reward_service
from tests.support.reward_service.scripted_grader import ScriptedGrader
from tests.support.serving import free_port, serving
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


def environment(**variables: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "queue", ROOT / "deploy"])),
        **variables,
    }


@pytest.mark.parametrize(
    "command", [["reward_service"], pytest.param(["weir", "rewards"], marks=pytest.mark.long)]
)
def test_it_grades_hides_its_environment_and_ends_on_sigterm(tmp_path: Path, command: list[str]) -> None:
    port = free_port()
    file = tmp_path / "weir.yaml"
    file.write_text(f"rewards: {{port: {port}, admin_keys: [hush]}}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--config", str(file)], cwd=tmp_path, env=environment()
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: live(url))
        source = (
            "import os\n"
            "def grade(sample, item):\n"
            "    return float(len(open('/proc/' + str(item['pid']) + '/environ').read()))\n"
        )
        body = {
            "grader": {"type": "python", "source": source},
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


def test_a_process_that_hides_is_not_read_by_its_children() -> None:
    asked = (
        "import ctypes; from reward_service.sandbox.secrets import hide_from_children; hide_from_children();"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    shown = subprocess.run([sys.executable, "-c", asked], env=environment(), capture_output=True, check=True)
    assert shown.stdout == b"0\n"


def test_a_killed_service_leaves_the_session_to_the_next_one(gateway: RunningGateway, tmp_path: Path) -> None:
    gateway.engine.script.append("hello")
    path = f"/sessions/{gateway.session()['session_id']}"
    assert gateway.chat("hi", f"{path}/v1/chat/completions").status_code == 200
    gateway.post(f"{path}/finish", {"status": "completed"})
    grader = ScriptedGrader(lambda body: 0.5, hang=True)

    with serving(grader) as url:
        settings = {
            "port": free_port(),
            "admin_keys": [ADMIN_KEY],
            "gateway_url": gateway.url,
            "rules": [{"name": "remote", "kind": "http", "url": url}],
            "dispatch": {"poll_every_s": 0.1},
        }
        file = tmp_path / "weir.yaml"
        file.write_text(json.dumps({"rewards": settings}))
        command = [sys.executable, "-m", "reward_service", "--config", str(file)]
        killed = subprocess.Popen(command, cwd=tmp_path, env=environment())
        assert grader.called.wait(300)
        killed.kill()
        killed.wait()
        grader.let_answer()
        assert gateway.get(path).json()["rewards"] == []
        with reward_service(**settings):
            (reward,) = wait_until(lambda: gateway.get(path).json()["rewards"])
    assert (reward["value"], reward["key"]) == (0.5, "remote")


def live(url: str) -> bool:
    try:
        return httpx.get(f"{url}/live", timeout=120).status_code == 200
    except httpx.TransportError:
        return False
