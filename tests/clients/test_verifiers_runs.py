"""Environments of verifiers 0.4 through the runner, in a Python environment of their own, against a real
gateway.

`make test-clients` installs the library. The engine is scripted, so that it is known what each episode earns.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.errors import UnknownEnvironment
from environments.results import EpisodeEnded, each_episode
from tests.support.environments.running import RunTest
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
TOYS = ROOT / "tests" / "clients" / "verifiers"
PYTHON = ROOT / "run" / "environments" / "verifiers" / "bin" / "python"


async def play(running: RunTest, environment: str = "sums", **given: Any) -> Any:
    options = {"harness": None, **given.pop("options", {})}
    asked: dict[str, Any] = {"concurrency": 4, "options": options} | given
    return await running.play_library(f"verifiers:{environment}", toys=TOYS, **asked)


async def play_each_once(running: RunTest, tasks: int, **given: Any) -> Any:
    """An evaluation of the first tasks, one after the other."""
    return await play(running, mode="eval", tasks=tasks, group_size=1, concurrency=1, **given)


def answer(prompt: str) -> str:
    """Adds even numbers, and is wrong about odd ones."""
    number = int(re.findall(r"what is (\d+) \+ 3", prompt)[-1])
    return str(number + 3 + number % 2)


async def test_named_rewards_of_groups_are_those_of_the_traces(running: RunTest, tmp_path: Path) -> None:
    record = tmp_path / "traces.jsonl"
    summary = await play(running, group_size=2, episodes=6, options={"taskset": {"record": str(record)}})
    assert summary["by_status"] == {"completed": 6}
    traces = {each["id"]: each for each in map(json.loads, record.read_text().splitlines())}
    sessions = running.sessions()
    assert {session["session_id"] for session in sessions} == set(traces)
    tasks = defaultdict(set)
    for session in sessions:
        rewards = traces[session["session_id"]]["rewards"]
        assert set(rewards) == {"right", "brief"}
        assert session["reward"] == pytest.approx(sum(rewards.values()))
        tasks[session["group_id"]].add(session["task_id"])
        assert {turn["relation"] for turn in session["turns"]} == {"root"}
    assert len(tasks) == 3
    assert all(len(each) == 1 for each in tasks.values())
    ended = ended_in(running.run_dir)
    assert all(each.metrics["length"] == 1.0 and each.turns == 1 for each in ended)


async def test_a_failure_of_scoring_is_never_a_reward(running: RunTest) -> None:
    options = {"taskset": {"count": 2, "task": {"how": "raises"}}}
    summary = await play_each_once(running, 2, options=options)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    (failed,) = running.sessions(verdict="failed")
    assert "the grader is gone" in failed["verdict"]["detail"]
    assert failed["reward"] is None
    assert len(failed["turns"]) == 1


async def test_an_answer_that_is_cut_off_is_truncated_and_rewarded(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "1 + 1 + 1 + 1 + 1 + 1"
    options = {"taskset": {"count": 1}}
    summary = await play_each_once(running, 1, sampling={"max_tokens": 4}, options=options)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert session["status"] == "truncated"
    assert session["reward"] is not None


async def test_an_episode_that_takes_too_long_is_truncated_and_cancelled_in_the_library(
    running: RunTest,
) -> None:
    options = {"taskset": {"count": 2, "task": {"how": "waits"}}}
    summary = await play_each_once(running, 2, episode_s=25.0, options=options)
    assert summary["by_status"] == {"truncated": 1, "completed": 1}
    assert summary["reasons"] == {"the episode took longer than 25 s": 1}


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_killed_or_hung_host_fails_its_episode_and_the_run_goes_on(
    running: RunTest, how: str
) -> None:
    options = {"taskset": {"count": 2, "task": {"how": how}}}
    summary = await play_each_once(running, 2, step_s=6.0, options=options)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    (failed,) = running.sessions(verdict="failed")
    told = {"dies": "ended with -9", "hangs": "did not answer 'ping' within 6 s"}[how]
    assert told in failed["verdict"]["detail"]
    assert failed["reward"] is None


async def test_what_a_killed_host_has_started_is_ended(running: RunTest) -> None:
    """The harness has a process group of its own, and waits for the model."""
    started: list[psutil.Process] = []

    def strike(prompt: str) -> str:
        if not started:
            children = psutil.Process().children()
            (host,) = [child for child in children if any("play.py" in each for each in child.cmdline())]
            started.extend(host.children(recursive=True))
            host.kill()
        return answer(prompt)

    running.engine.answer = strike
    summary = await play(running, group_size=1, episodes=2, concurrency=1)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    assert started
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive


async def test_a_group_that_can_teach_nothing_ends_early_and_frees_the_engine(running: RunTest) -> None:
    """Two members are alike; the third one is in the middle of its answer."""
    calls = itertools.count(1)

    def alike(prompt: str) -> str:
        if next(calls) == 3:
            running.engine.stall_after = 0
        return "3"

    running.engine.answer = alike
    summary = await play(
        running, group_size=3, episodes=3, stop_uniform_after=2, options={"taskset": {"count": 1}}
    )
    assert summary["by_status"] == {"completed": 2, "abandoned": 1}
    assert running.engine.stalled
    await asyncio.to_thread(wait_until, lambda: len(running.engine.aborted) == 1, 30)
    (session,) = [each for each in running.sessions() if each["status"] == "abandoned"]
    assert session["verdict"]["code"] == "abandoned"


async def test_attempts_of_one_episode_are_sessions_with_groups_of_their_own(running: RunTest) -> None:
    options = {"env": {"n": 2}, "traces": {"agent": 2}}
    summary = await play(running, "best-of-n+sums", group_size=2, episodes=2, options=options)
    assert summary["by_status"] == {"completed": 4}
    ended = ended_in(running.run_dir)
    assert sum(each.metrics["best"] for each in ended) >= 2
    assert Counter(each["group_id"] for each in running.sessions()) == {
        each["group_id"]: 2 for each in running.sessions()
    }


async def test_more_traces_than_were_announced_fail_the_episode(running: RunTest) -> None:
    given: Any = {"mode": "eval", "group_size": 1, "tasks": 1, "options": {"env": {"n": 2}}}
    summary = await play(running, "best-of-n+sums", **given)
    assert summary["by_status"] == {"failed": 1}
    (session,) = running.sessions()
    assert "more traces in an episode" in session["verdict"]["detail"]


async def test_an_agent_that_the_environment_does_not_train_is_not_trained(running: RunTest) -> None:
    said = iter(["what is 2 + 3?", "5", "###DONE###"])
    running.engine.answer = lambda prompt: next(said)
    options = {"env": {"user": {"harness": {"id": "null"}}}}
    summary = await play(running, "user-sim+sums", group_size=1, episodes=1, options=options)
    assert summary["by_status"] == {"completed": 1}
    user, assistant = sorted(running.sessions(), key=lambda each: each["reward"] is not None)
    assert user["verdict"]["code"] == "not_for_training"
    assert [len(each["turns"]) for each in (user, assistant)] == [2, 1]
    assert assistant["verdict"]["code"] != "not_for_training"


def test_a_killed_runner_is_resumed_and_its_host_ends(running: RunTest) -> None:
    opened = threading.Event()

    def held_up(prompt: str) -> str:
        if len(running.engine.requests) >= 3:
            opened.wait()
        return answer(prompt)

    running.engine.answer = held_up
    command = [sys.executable, "-m", "weir", "env", "run", "verifiers:sums", "-o", "harness=null"]
    command += ["--set", f"python={PYTHON}", "--gateway", running.url, "--run-dir", str(running.run_dir)]
    command += ["--group-size", "2", "--episodes", "6", "--concurrency", "2"]
    environment = os.environ | {"WEIR_CLIENT_KEYS": "", "PYTHONPATH": f"{ROOT}:{ROOT}/queue:{ROOT}/deploy"}
    with subprocess.Popen(command, env=environment, cwd=TOYS, start_new_session=True) as first:
        wait_until(lambda: len(ended_in(running.run_dir)) >= 2, 120)
        wait_until(lambda: len(running.sessions(state="open")) >= 1, 60)
        left = psutil.Process(first.pid).children(recursive=True)
        os.kill(first.pid, signal.SIGKILL)
    opened.set()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive, "the host ends with its runner, and what it started with it"
    subprocess.run([*command, "--resume"], env=environment, cwd=TOYS, check=True, timeout=200)
    places = Counter((each.group, each.member) for each in ended_in(running.run_dir))
    assert len(places) == 6
    assert set(places.values()) == {1}
    assert not running.sessions(state="open")


def ended_in(run_dir: Path) -> list[EpisodeEnded]:
    return list(each_episode(run_dir))


async def test_what_does_not_fit_a_library_that_plays_itself_is_told_at_once(running: RunTest) -> None:
    with pytest.raises(UnknownEnvironment, match="takes no opponent"):
        await play(running, opponent="policy@3")
    with pytest.raises(UnknownEnvironment, match="summs"):
        await play(running, "summs")
