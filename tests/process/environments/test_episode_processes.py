"""Each episode has a process of its own: what happens to it happens to no other, and nothing is left."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import environments.hosts
from environments.results import each_episode
from tests.support.environments.running import RunTest
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until, wait_until_async

ROOT = Path(__file__).parents[3]
ENDS = {
    "raises": "IndexError: list index out of range",
    "exits": "the environment's process ended with 3: it steps / it is over",
    "leaves": "the environment's process ended with 1: it steps / it has had enough",
    "crashes": "the environment's process ended with -11 (SIGSEGV): it steps",
    "closes all": "the environment's process ended with -9 (SIGKILL): it steps",
    "says too much": "ValueError: the answer has",
}
HUNG = {
    "hangs": "the environment did not answer 'step' within 60 s",
    "stops": "the environment did not answer 'step' within 60 s",
    "hangs at its reset": "the environment did not answer 'reset' within 120 s",
}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


async def play(running: RunTest, notes: Path, fates: Sequence[str], module: str = "fates") -> Any:
    """Play an episode of each fate, and three that nothing happens to, all side by side."""
    options = {"notes": str(notes), "fates": {str(seed): fate for seed, fate in enumerate(fates)}}
    count = len(fates) + 3
    given: dict[str, Any] = {"mode": "eval", "tasks": count, "concurrency": count, "options": options}
    environment = f"python:tests.support.environments.{module}:Fates"
    return await running.play_library(environment, group_size=1, most_failed_groups=99, **given)


def noted(notes: Path, what: str) -> list[int]:
    """The processes of which the environments have noted this."""
    return [int(each.name.partition("-")[2]) for each in notes.glob(f"{what}-*")]


def over(running: RunTest) -> int:
    return sum(1 for _ in each_episode(running.run_dir))


@pytest.mark.parametrize("module", ["fates", "threaded_fates"])
async def test_what_one_step_does_fails_no_other_episode(
    turned: TurnedClock, running: RunTest, notes: Path, module: str
) -> None:
    """Also in a library that cannot be copied, which each process imports anew."""
    fates = ENDS | HUNG
    playing = asyncio.create_task(play(running, notes, [*fates], module))
    await wait_until_async(lambda: over(running) == len(ENDS) + 3 and len(noted(notes, "hangs")) == 3)
    turned.turn(60)
    await wait_until_async(lambda: over(running) == len(ENDS) + 5)
    turned.turn(60)
    summary = await playing
    assert summary["by_status"] == {"completed": 3, "failed": len(fates)}
    left = [*summary["reasons"]]
    for said in fates.values():
        assert [each for each in left if each.startswith(f"environment: {said}")], (said, left)
    assert len(noted(notes, "host")) == 1, "no host was started anew"


async def test_nothing_is_left_of_an_episode_when_it_has_ended(running: RunTest, notes: Path) -> None:
    """In whatever session it is, and whoever has started it."""
    playing = asyncio.create_task(play(running, notes, ["leaves others behind", "hangs"]))
    (session,) = await wait_until_async(lambda: noted(notes, "session"))
    await wait_until_async(lambda: over(running) == 4 and not in_session(session))
    await wait_until_async(lambda: len([*notes.glob("*/")]) == 1)  # its own directory
    assert not playing.done(), "another episode of the host is under way"
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    (host,) = noted(notes, "host")
    assert not psutil.pid_exists(host)


def in_session(number: int) -> list[int]:
    """The processes of a session that run."""
    return [
        each.pid
        for each in psutil.process_iter(["status"])
        if each.info["status"] != psutil.STATUS_ZOMBIE and _session_of(each.pid) == number
    ]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


async def test_an_episode_whose_process_does_not_close_has_ended_all_the_same(
    running: RunTest, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments.hosts, "CLOSES_WITHIN_S", 0.2)
    summary = await play(running, notes, ["hangs at its close"])
    assert summary["by_status"] == {"completed": 4}
    (pid,) = noted(notes, "hangs")
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("module", ["fates", "seeded_fates"])
async def test_no_two_episodes_draw_the_same_random_numbers(
    running: RunTest, notes: Path, module: str
) -> None:
    """Also if their module seeds the generators."""
    summary = await play(running, notes, [], module)
    assert summary["by_status"] == {"completed": 3}
    drawn = [
        re.findall(r"drew ([\d.e-]+) ([\d.e-]+)", each["turns"][0]["context_text"])[0]
        for each in running.sessions()
    ]
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))


def test_a_runner_that_is_killed_leaves_no_process(running: RunTest, notes: Path) -> None:
    options = {"notes": str(notes), "fates": {"0": "leaves others behind", "1": "hangs", "2": "stops"}}
    command = [sys.executable, "-m", "weir", "env", "eval", "python:tests.support.environments.fates:Fates"]
    command += [f"-o{name}={json.dumps(value)}" for name, value in options.items()]
    command += ["--run-dir", str(running.run_dir), "--gateway", running.url, "--tasks", "3"]
    with subprocess.Popen(command, cwd=ROOT) as runner:
        wait_until(lambda: len(noted(notes, "hangs")) == 2 and noted(notes, "session"))
        runner.kill()
    pids = noted(notes, "*")
    wait_until(lambda: not any(psutil.pid_exists(pid) or in_session(pid) for pid in pids))
