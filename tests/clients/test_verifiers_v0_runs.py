"""Environments of verifiers 0.1 through the runner, in a Python environment of their own, against a real
gateway.

`make test-clients` installs the library. The engine is scripted.
"""

import json
import re
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from environments.errors import UnknownEnvironment
from environments.settings import RunSettings
from environments.start_run import RunPlace, play_run
from tests.support.clients.stack import CLIENT_KEY, RunningStack
from tests.support.environments.running import RunTest

TOYS = Path(__file__).with_name("verifiers_v0")


async def play(running: RunTest, **given: Any) -> Any:
    given = {"concurrency": 16} | given
    return await running.play_library("verifiers_v0:doubles", toys=TOYS, **given)


def answer(prompt: str) -> str:
    """Doubles even numbers at once, and odd ones when it is asked again."""
    number = int(re.findall(r"double of (\d+)", prompt)[-1])
    return str(2 * number) if number % 2 == 0 or "no, double" in prompt else "?"


async def test_every_turn_has_the_tokens_that_weir_has_recorded(stack: RunningStack, tmp_path: Path) -> None:
    """The engine is the real one."""
    record = tmp_path / "rollouts.jsonl"
    settings = RunSettings(
        environment="verifiers_v0:doubles",
        options={"record": str(record)},
        group_size=4,
        episodes=256,
        concurrency=16,
        max_turns=2,
        sampling={"max_tokens": 8, "temperature": 1.0},
    )
    place = RunPlace(tmp_path / "run", stack.url, CLIENT_KEY, directory=TOYS)
    summary = await play_run(settings, place, lambda line: None)
    assert sum(summary["by_status"].values()) == 256
    assert "failed" not in summary["by_status"], summary["reasons"]
    rollouts = {each["id"]: each for each in map(json.loads, record.read_text().splitlines())}
    exported = stack.exported()
    groups = Counter[str]()
    for session_id, rollout in rollouts.items():
        view = stack.http.get(f"/sessions/{session_id}").raise_for_status().json()
        groups[view["group_id"]] += 1
        assert view["reward"] == pytest.approx(rollout["right"] + 0.25 / (1 + rollout["length"]))
        recorded, whole = exported[session_id], list[int]()
        for turn, known in zip(rollout["turns"], recorded, strict=True):
            assert turn, "every turn has tokens"
            whole += known["context_ids"]
            assert turn["prompt_ids"] == whole
            assert turn["ids"] == known["output_ids"]
            assert array("f", turn["logprobs"]) == array("f", known["logprobs"])
            whole += known["output_ids"]
    assert sorted(groups.values()) == [4] * 64
    assert {len(rollout["turns"]) for rollout in rollouts.values()} == {2}


async def test_a_group_has_the_rewards_of_its_rollouts(running: RunTest) -> None:
    summary = await play(running, group_size=2, episodes=16)
    assert summary["by_status"] == {"completed": 16}
    for session in running.sessions():
        right = len(session["turns"]) == 1
        first = len(session["turns"][0]["output_text"].removesuffix("<|im_end|>"))
        assert session["reward"] == pytest.approx(right + 0.25 / (1 + first))


@pytest.mark.parametrize("how", ["raises", "none"])
async def test_a_reward_function_without_a_number_is_no_reward_of_zero(running: RunTest, how: str) -> None:
    options = {"how": how, "fails": 1, "count": 2}
    summary = await play(running, mode="eval", group_size=1, tasks=2, options=options)
    assert summary["by_status"] == {"failed": 1, "completed": 1}
    (failed,) = running.sessions(verdict="failed")
    assert failed["verdict"]["detail"].startswith("the reward 'right': ")
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
