"""Runners, the reward service and an environment server are killed again and again on the whole system.

openenv:… ── rewards of the environment ──┐
                                          ├─▶ gateway ─▶ SGLang, trainer ─▶ verdicts ─▶ audit
python:… ─── rewards of the service ──────┘

`ENVIRONMENT_KILLS=60` kills more often than by default.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from environments.results import EpisodeEnded, each_episode
from tests.support.environments.running import TOYS
from tests.support.serving import free_port
from tests.support.system.real_system import ADMIN_KEY, CLIENT_KEY, System, running_system, system_settings
from tests.support.waiting import wait_until
from weir.audit.audit import audit
from weir.audit.audit_sources import sources_of

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("ENVIRONMENT_KILLS", "8"))
pytestmark = pytest.mark.timeout(600 + 30 * KILLS)
RULE = """
rewards:
  port: {port}
  admin_keys: [{key}]
  gateway_url: {gateway}
  dispatch: {{poll_every_s: 0.2}}
  rules:
    - name: variety
      kind: python
      task_prefix: "python:"
      source: "def grade(sample, item): return len(set(sample['output_text'])) / 100"
"""


@dataclass
class Part:
    """A process that is killed and started again. `resumes` is the directory of a run that goes on."""

    name: str
    command: list[str]
    directory: Path
    url: str | None = None
    resumes: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        again = self.resumes is not None and (self.resumes / "run.json").exists()
        command = [*self.command, "--resume"] if again else self.command
        packages = os.pathsep.join(map(str, (ROOT, ROOT / "queue", ROOT / "deploy")))
        known = os.environ | {"PYTHONPATH": packages, "WEIR_CLIENT_KEYS": CLIENT_KEY}
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=known, stdout=log, stderr=log)

    def answers(self) -> bool:
        try:
            return self.url is None or httpx.get(self.url).status_code < 500
        except httpx.TransportError:
            return False

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(120)


@pytest.fixture
def system(tiny_model: Path, tmp_path: Path) -> Iterator[System]:
    with running_system(system_settings(tmp_path / "run", tiny_model)) as system:
        yield system


@pytest.fixture
def parts(system: System, tmp_path: Path) -> Iterator[list[Part]]:
    gateway = system.stack.gateway_url
    served, rewards = free_port(), free_port()
    (tmp_path / "weir.yaml").write_text(RULE.format(port=rewards, key=ADMIN_KEY, gateway=gateway))
    program = ROOT / "tests" / "clients" / "openenv" / "serve.py"
    python = ROOT / "run" / "environments" / "openenv" / "bin" / "python"
    served_by = [str(python), str(program), "echo", str(served), "64", "20"]
    service = [sys.executable, "-m", "reward_service", "--config", str(tmp_path / "weir.yaml")]
    started = [
        Part("environments", served_by, tmp_path, f"http://127.0.0.1:{served}/health"),
        Part("rewards", service, tmp_path, f"http://127.0.0.1:{rewards}/live"),
        runner("judging", f"openenv:http://127.0.0.1:{served}", gateway, tmp_path),
        runner("judged", f"{TOYS}:Judged", gateway, tmp_path, "--set", "graded_elsewhere=true"),
    ]
    try:
        for part in started:
            part.start()
            wait_until(part.answers, 120)
        yield started
    finally:
        for part in started:
            if part.process is not None and part.process.poll() is None:
                part.end(signal.SIGKILL)


def runner(name: str, environment: str, gateway: str, directory: Path, *more: str) -> Part:
    given = ["--gateway", gateway, "--run-dir", str(directory / name), "--group-size", "4"]
    given += ["--concurrency", "8", "-s", "max_tokens=8", "--set", "most_failed_groups=1000000", *more]
    command = [sys.executable, "-m", "weir", "env", "run", environment, *given]
    return Part(name, command, directory, resumes=directory / name)


def sessions_of(system: System) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        query = f"?limit=1000&cursor={cursor}" if cursor else "?limit=1000"
        page = system.get(f"/sessions{query}")
        found += page["data"]
        if (cursor := page["next_cursor"]) is None:
            return found


def ended(run_dir: Path) -> list[EpisodeEnded]:
    return list(each_episode(run_dir))


def many(played: list[Path], enough: int) -> bool:
    return sum(len(ended(each)) for each in played) >= enough


def test_kills_of_every_part_leave_no_session_without_a_verdict(system: System, parts: list[Part]) -> None:
    luck = random.Random(1)
    killed: Counter[str] = Counter()
    played = [part.resumes for part in parts if part.resumes]
    for part in itertools.islice(itertools.cycle(parts), KILLS):
        enough = sum(len(ended(each)) for each in played) + 8
        wait_until(partial(many, played, enough), 180)
        # anywhere in an episode
        time.sleep(luck.uniform(0.0, 1.0))
        assert part.end(signal.SIGKILL) == -signal.SIGKILL, part.name
        killed[part.name] += 1
        part.start()
        wait_until(part.answers, 120)
    for part, run_dir in zip(parts[2:], played, strict=True):
        wait_until(partial(many, [run_dir], len(ended(run_dir)) + 4), 180)  # it has started
        assert part.end(signal.SIGINT) == 130, (part.directory / f"{part.name}.log").read_text()[-3000:]

    def waiting() -> list[dict[str, Any]]:
        return [each for each in sessions_of(system) if each["state"] in ("open", "waiting_reward")]

    wait_until(lambda: not waiting(), 120)
    deadline = time.monotonic() + 300
    while left := [each for each in sessions_of(system) if not each["verdict"]]:
        assert time.monotonic() < deadline, left[:3]
        system.train_one_group()  # completes the trainer's step
    sessions = [each for each in sessions_of(system) if (each["task_id"] or "").count(":")]
    codes = Counter(each["verdict"]["code"] for each in sessions)
    print(dict(killed), dict(codes), f"{len(sessions)} sessions")
    assert codes["trained"] >= 8, codes
    for each in sessions:
        if each["verdict"]["code"] == "trained":
            assert (each["status"], each["reward"] is None) == ("completed", False), each
    assert any(each["status"] == "abandoned" for each in sessions), "a runner was killed in an episode"
    for run_dir in played:
        once = Counter((each.group, each.member) for each in ended(run_dir))
        assert set(once.values()) == {1}, "each episode ends once"
    report = audit(sources_of(system.settings))
    assert report.ok, report.findings
