"""Environments of verifiers 0.4 through the runner, in a Python environment of their own, against a real
gateway.

`make test-clients` installs the library. The engine is scripted, so that it is known what each episode earns.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.results.journal import EpisodeEnded, entries_of
from environments.settings import RunSettings
from environments.start import RunPlace, play_run
from tests.support.environments.running import RunTest, running_gateway

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[RunTest]:
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        running.engine.answer = summed
        yield running


async def play(running: RunTest, environment: str = "sums", **given: Any) -> Any:
    options = {"harness": None, **given.pop("options", {})}
    settings = RunSettings(
        environment=f"verifiers:{environment}", options=options, **({"concurrency": 4} | given)
    )
    place = RunPlace(
        running.run_dir,
        running.url,
        None,
        ROOT / "run" / "environments",
        ROOT / "tests" / "clients" / "verifiers",
    )
    return await play_run(settings, place, lambda line: None)


def summed(prompt: str) -> str:
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
    ended = [each for each in entries_of(running.run_dir) if isinstance(each, EpisodeEnded)]
    assert all(each.metrics["length"] == 1.0 and each.turns == 1 for each in ended)
