"""Environments of reasoning-gym, TextArena and Gymnasium, each in its own Python environment, against a real
gateway.

`make test-clients` installs the libraries. The engine is scripted: it plays well enough for each game to end.
"""

import re
from collections import Counter
from typing import Any

import pytest

from environments.errors import UnknownEnvironment
from tests.support.environments.running import RunTest


def sum_of(prompt: str) -> str:
    """The answer to a question of chain_sum with two terms."""
    one, sign, other = re.findall(r"(\d+) ([+-]) (\d+) =", prompt)[-1]
    return str(int(one) + int(sign + other))


async def test_reasoning_gym_scores_the_answers(running: RunTest) -> None:
    given: Any = {"mode": "eval", "tasks": 40, "options": {"min_terms": 2, "max_terms": 2}}
    running.engine.answer = sum_of
    right = await running.play_library("reasoning_gym:chain_sum", **given)
    assert right["reward"]["mean"] == 1.0
    running.engine.answer = lambda prompt: "0"
    wrong = await running.play_library("reasoning_gym:chain_sum", name="wrong", **given)
    assert wrong["reward"]["mean"] < 0.1
    assert [each["task_id"] for each in right["tasks"]] == [each["task_id"] for each in wrong["tasks"]]


async def test_reasoning_gym_shows_examples(running: RunTest) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return sum_of(prompt)

    options = {"min_terms": 2, "max_terms": 2, "examples": 3}
    given: Any = {"mode": "eval", "tasks": 8, "group_size": 1, "options": options}
    running.engine.answer = answer
    assert (await running.play_library("reasoning_gym:chain_sum", **given))["reward"]["mean"] == 1.0
    # Three solved questions, the same ones each time, and then the task's own.
    shown = {tuple(re.findall(r"(\d+) ([+-]) (\d+) =", each))[:-1] for each in prompts}
    (examples,) = shown
    assert len(examples) == 3
    assert all(each in prompts[0] for each in (str(int(a) + int(sign + b)) for a, sign, b in examples))


@pytest.mark.parametrize(("task", "count"), [("graph_color", 2), ("chain_sum", -1), ("chain_sum", "two")])
async def test_reasoning_gym_refuses_examples_that_there_are_not(
    running: RunTest, task: str, count: object
) -> None:
    with pytest.raises(UnknownEnvironment, match="examples"):
        await running.play_library(f"reasoning_gym:{task}", options={"examples": count}, episodes=8)


def free_cell(prompt: str) -> str:
    """The first cell of tic-tac-toe that is free on the last board."""
    moves: list[str] = re.findall(r"Available Moves: (.*)", prompt)
    return moves[-1].split("'")[1]


async def test_textarena_rewards_each_player(running: RunTest) -> None:
    running.engine.answer = free_cell
    summary = await running.play_library("textarena:TicTacToe-v0-raw", group_size=2, episodes=2)
    assert summary["by_status"] == {"completed": 4}
    rewards = Counter(each["reward"] for each in running.sessions())
    assert rewards == {1.0: 2, -1.0: 2}, "the first free cell wins for the player that begins"
    assert {each["turns"][-1]["relation"] for each in running.sessions()} == {"extends"}


async def test_textarena_plays_the_same_game_for_the_same_seed(running: RunTest) -> None:
    """Games run side by side in one process, and the library draws from process-wide random numbers."""
    running.engine.answer = lambda prompt: "[1]"
    for name in ("one", "two"):
        given: Any = {"episodes": 8, "group_size": 2, "max_turns": 2}
        await running.play_library("textarena:SimpleNegotiation-v0-raw", name=name, **given)
    begun: dict[str, set[str]] = {}
    for session in running.sessions():
        key = f"{session['task_id']}/{session['group_id'].split('.')[-1]}"
        begun.setdefault(key, set()).add(session["turns"][0]["context_text"])
    assert len(begun) == 8
    assert all(len(texts) == 1 for texts in begun.values())


async def test_gymnasium_takes_actions_and_refuses_what_is_none(running: RunTest) -> None:
    actions = iter(["go down", "1", "1", "1", "1"])
    running.engine.answer = lambda prompt: next(actions)
    summary = await running.play_library(
        "gymnasium:FrozenLake-v1", options={"is_slippery": False}, group_size=1, episodes=1
    )
    assert summary["by_status"] == {"completed": 1}, "the fourth step down falls into a hole"
    (session,) = running.sessions()
    assert "is no action of Discrete(4)" in session["turns"][1]["context_text"]
    assert session["reward"] == 0.0
