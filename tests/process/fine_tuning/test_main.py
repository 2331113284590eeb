"""The service as a process: what a kill interrupts goes on, and one service has a directory."""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

import fine_tuning.__main__
from environments.results import EpisodeEnded, each_episode
from tests.support.environments.answering_engine import Gate
from tests.support.environments.running import RunTest
from tests.support.fine_tuning.running import RunningJobs, client_of, sums
from tests.support.fine_tuning.running import fine_tuning as jobs_service
from tests.support.own_processes import live, started
from tests.support.serving import free_port
from tests.support.waiting import wait_until

SIZES: dict[str, Any] = {"group_size": 4, "concurrency": 8}


def doubled(prompt: str) -> str:
    return str(2 * int(re.findall(r"double of (\d+)", prompt)[-1]))


def section(directory: Path, gateway_url: str, port: int) -> dict[str, Any]:
    """The settings of a service."""
    more = {"directory": str(directory / "jobs"), "poll_every_s": 0.1, "settle_s": 0.1}
    return {"fine_tuning": {"port": port, "gateway_url": gateway_url, **SIZES, **more}}


def ended(run_dir: Path) -> list[EpisodeEnded]:
    return list(each_episode(run_dir))


def check_a_directory_in_use_is_refused(file: Path) -> None:
    """By a second service, in this process."""
    said = r"^fine_tuning: another service uses .*/jobs: set fine_tuning.directory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_CONFIG", "")  # the program sets it
        patch.setattr(sys, "argv", ["fine_tuning", "--config", str(file)])
        patch.setattr("rollout_queue.starting.begin_log", lambda *_: None)
        patch.setattr(fine_tuning.__main__, "hide_from_children", lambda: None)
        with pytest.raises(SystemExit, match=said) as end:
            fine_tuning.__main__.main()
    assert isinstance(end.value.code, str), "Python prints it, and exits with status 1"


def test_a_killed_service_goes_on_with_its_job_and_each_episode_ends_once(
    running: RunTest, tmp_path: Path
) -> None:
    gate = Gate(16, doubled)
    running.engine.answer = gate.answer
    port = free_port()
    url, sections = f"http://127.0.0.1:{port}", section(tmp_path, running.url, port)
    first = started(tmp_path, ["fine_tuning"], sections, WEIR_ADMIN_KEYS="", WEIR_CLIENT_KEYS="")
    try:
        wait_until(lambda: live(url))
        check_a_directory_in_use_is_refused(tmp_path / "weir.yaml")
        with client_of(url, "none") as client:
            job = RunningJobs(url, client).start(sums(6))
            queued = RunningJobs(url, client).start(sums(1))
        run_dir = tmp_path / "jobs" / "jobs" / job.id / "run"
        wait_until(lambda: len(ended(run_dir)) >= 6)
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


def test_a_job_with_a_python_grader_that_could_grade_nothing_is_refused_at_its_source(
    running: RunTest, tmp_path: Path
) -> None:
    grader = {"type": "python", "name": "own", "source": "def grade(sample):\n    return 1.0"}
    with jobs_service(tmp_path, running.url, key="admin") as service:
        with pytest.raises(openai.BadRequestError) as refused:
            service.start(sums(1), grader)
        assert refused.value.param == "method.reinforcement.grader.source"
        assert "TypeError" in refused.value.message
        assert not service.openai.fine_tuning.jobs.list().data
