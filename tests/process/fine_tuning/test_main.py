"""The service as a process: what a kill interrupts goes on, and one service has a directory."""

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import fine_tuning.__main__
from environments.results.journal import EpisodeEnded, entries_of
from tests.support.environments.running import RunTest
from tests.support.fine_tuning.running import RunningJobs, client_of, sums
from tests.support.fine_tuning.running import fine_tuning as jobs_service
from tests.support.serving import free_port
from tests.support.waiting import wait_until

SIZES = {"group_size": 4, "concurrency": 8}
ROOT = Path(__file__).parents[3]


class Gate:
    """Answers so many calls, and the others once it is opened."""

    def __init__(self, open_for: int) -> None:
        self.left, self.opened = open_for, threading.Event()

    def answer(self, prompt: str) -> str:
        self.left -= 1
        if self.left < 0:
            self.opened.wait(180)
        return str(2 * int(re.findall(r"double of (\d+)", prompt)[-1]))


def configuration(directory: Path, gateway_url: str) -> tuple[Path, str]:
    """The file of a service, and its URL."""
    port = free_port()
    section: dict[str, Any] = {
        "port": port,
        "directory": str(directory / "jobs"),
        "gateway_url": gateway_url,
        **SIZES,
        "poll_every_s": 0.1,
        "settle_s": 0.1,
    }
    file = directory / f"weir-{port}.yaml"
    file.write_text(yaml.safe_dump({"fine_tuning": section}))
    return file, f"http://127.0.0.1:{port}"


def started(directory: Path, gateway_url: str) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and its URL."""
    file, url = configuration(directory, gateway_url)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "queue", ROOT / "deploy"])),
        "WEIR_ADMIN_KEYS": "",
        "WEIR_CLIENT_KEYS": "",
    }
    command = [sys.executable, "-m", "fine_tuning", "--config", str(file)]
    return subprocess.Popen(command, env=environment, cwd=directory), url


def live(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/live", timeout=120).status_code == 200
    return False


def ended(run_dir: Path) -> list[EpisodeEnded]:
    return [each for each in entries_of(run_dir) if isinstance(each, EpisodeEnded)]


def check_a_directory_in_use_is_refused(file: Path) -> None:
    """By a second service, in this process."""
    said = r"^fine_tuning: another service uses .*/jobs: set fine_tuning.directory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_CONFIG", "")  # the program sets it
        patch.setattr(sys, "argv", ["fine_tuning", "--config", str(file)])
        patch.setattr("rollout_queue.http.starting.begin_log", lambda _: None)
        patch.setattr(fine_tuning.__main__, "hide_from_children", lambda: None)
        with pytest.raises(SystemExit, match=said) as end:
            fine_tuning.__main__.main()
    assert isinstance(end.value.code, str), "Python prints it, and exits with status 1"


def test_a_killed_service_goes_on_with_its_job_and_each_episode_ends_once(
    running: RunTest, tmp_path: Path
) -> None:
    gate = Gate(open_for=16)
    running.engine.answer = gate.answer
    first, url = started(tmp_path, running.url)
    try:
        wait_until(lambda: live(url), 180)
        check_a_directory_in_use_is_refused(configuration(tmp_path, running.url)[0])
        with client_of(url, "none") as client:
            job = RunningJobs(url, client).start(sums(6))
            queued = RunningJobs(url, client).start(sums(1))
        run_dir = tmp_path / "jobs" / "jobs" / job.id / "run"
        wait_until(lambda: len(ended(run_dir)) >= 6, 180)
    finally:
        first.kill()
        first.wait()
    before = len(ended(run_dir))
    assert before < 24
    gate.opened.set()
    with jobs_service(tmp_path / "jobs", running.url, **SIZES) as service:
        assert service.ended(job.id).status == "succeeded"
        assert service.ended(queued.id).status == "succeeded"
        assert service.messages(job.id).count("The job goes on") == 1
    places = Counter((each.group, each.member) for each in ended(run_dir))
    assert set(places.values()) == {1}
    # One answer alone is not played again: there is nothing to compare it with.
    assert all(each.reward == 1.0 for each in ended(run_dir) if each.status != "abandoned")
    codes = Counter(each["verdict"]["code"] for each in running.sessions())
    assert codes["abandoned"] > 0, "half-played sessions are abandoned"
    assert codes["open"] == codes["waiting_reward"] == 0


def test_a_service_that_is_stopped_leaves_its_job_to_the_next_one(running: RunTest, tmp_path: Path) -> None:
    gate = Gate(open_for=2)
    running.engine.answer = gate.answer
    first, url = started(tmp_path, running.url)
    try:
        wait_until(lambda: live(url), 180)
        with client_of(url, "none") as client:
            job = RunningJobs(url, client).start(sums(3))
            wait_until(lambda: RunningJobs(url, client).job(job.id).status == "running")
            wait_until(lambda: gate.left < 0)
    finally:
        first.terminate()
        gate.opened.set()
        assert first.wait(180) == 0
    assert {each["state"] for each in running.sessions()} == {"finished"}
    with jobs_service(tmp_path / "jobs", running.url, **SIZES) as service:
        assert service.ended(job.id).status == "succeeded"
