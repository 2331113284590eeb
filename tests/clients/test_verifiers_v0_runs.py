"""Environments of verifiers 0.1 through the runner, in a Python environment of their own, against a real
gateway.

`make test-clients` installs the library. The engine is scripted.
"""

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from environments.errors import UnknownEnvironment
from environments.settings import RunSettings
from environments.start import RunPlace, play_run
from tests.support.environments.running import RunTest, running_gateway

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def running(redis_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[RunTest]:
    with running_gateway(redis_url, tiny_model, tmp_path) as running:
        running.engine.answer = doubled
        yield running


async def play(running: RunTest, environment: str = "doubles", **given: Any) -> Any:
    settings = RunSettings(environment=f"verifiers_v0:{environment}", **({"concurrency": 16} | given))
    toys = ROOT / "tests" / "clients" / "verifiers_v0"
    place = RunPlace(running.run_dir, running.url, None, ROOT / "run" / "environments", toys)
    return await play_run(settings, place, lambda line: None)


def doubled(prompt: str) -> str:
    """Doubles even numbers at once, and odd ones when it is asked again."""
    number = int(re.findall(r"double of (\d+)", prompt)[-1])
    return str(2 * number) if number % 2 == 0 or "no, double" in prompt else "?"


async def test_every_turn_has_the_tokens_that_weir_has_recorded(running: RunTest, tmp_path: Path) -> None:
    record = tmp_path / "rollouts.jsonl"
    summary = await play(running, group_size=4, episodes=256, options={"record": str(record)})
    assert summary["by_status"] == {"completed": 256}
    rollouts = {each["id"]: each["turns"] for each in map(json.loads, record.read_text().splitlines())}
    sessions = running.sessions()
    assert {session["session_id"] for session in sessions} == set(rollouts)
    assert len({session["group_id"] for session in sessions}) == 64
    exported = turns_of(running)
    lengths = set()
    for session in sessions:
        turns = rollouts[session["session_id"]]
        assert all(turns), "every turn has tokens"
        recorded = exported[session["session_id"]]
        assert [turn["ids"] for turn in turns] == [turn["output_ids"] for turn in recorded]
        assert [array("f", turn["logprobs"]) for turn in turns] == [
            array("f", turn["logprobs"]) for turn in recorded
        ]
        whole: list[int] = []
        for turn, known in zip(turns, recorded, strict=True):
            whole += known["context_ids"]
            assert turn["prompt_ids"] == whole
            whole += known["output_ids"]
        lengths.add(len(turns))
        assert session["reward"] == pytest.approx((len(turns) == 1) + 0.25 / 2)
    assert lengths == {1, 2}


def turns_of(running: RunTest) -> dict[str, list[dict[str, Any]]]:
    """The exported turns of each session, the oldest first."""
    lines = httpx.get(f"{running.url}/admin/export?format=jsonl", timeout=60).raise_for_status().text
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in sorted(map(json.loads, lines.splitlines()), key=lambda turn: float(turn["created_at"])):
        found.setdefault(turn["session_id"], []).append(turn)
    return found


async def test_a_reward_function_that_raises_is_no_reward_of_zero(running: RunTest) -> None:
    options = {"how": "raises", "fails": 1, "count": 2}
    summary = await play(running, mode="eval", group_size=1, tasks=2, options=options)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    (failed,) = running.sessions(verdict="failed")
    assert "the reward 'right': RuntimeError: the grader is gone" in failed["verdict"]["detail"]
    assert failed["reward"] is None


async def test_an_episode_without_end_is_truncated(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "?"
    summary = await play(running, mode="eval", group_size=1, tasks=1, max_turns=3)
    assert summary["by_status"] == {"truncated": 1}
    (session,) = running.sessions()
    assert len(session["turns"]) == 3
    assert session["reward"] == 0.125


async def test_rewards_that_compare_a_group_are_told_at_once(running: RunTest) -> None:
    with pytest.raises(UnknownEnvironment, match="'best' compares the rollouts of a group"):
        await play(running, options={"compares": True})
