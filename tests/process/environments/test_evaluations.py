"""Evaluations during a training run: when they begin, what they leave, and what of them is trained."""

import asyncio
import itertools
import json
import logging
from typing import Any

import httpx
import pytest

from environments.settings import RunSettings
from tests.support.environments.running import RunTest
from tests.support.waiting import wait_until_async


def advance(running: RunTest, calls_a_version: int) -> None:
    """The engine has a new version after so many calls of the training, whose temperature is not 0. A newer
    version doubles more numbers."""
    calls = iter(range(1_000_000))

    def answer(prompt: str) -> str:
        if running.engine.asked["temperature"]:
            running.engine.version = str(next(calls) // calls_a_version)
        number = int(prompt.rpartition("double of ")[2][0])
        return str(2 * number) if number < int(running.engine.version) else "?"

    running.engine.answer = answer


async def test_the_model_is_judged_at_the_start_and_after_each_so_many_versions(running: RunTest) -> None:
    advance(running, calls_a_version=5)
    summary = await running.play(
        "Double",
        group_size=2,
        episodes=32,
        concurrency=2,
        eval_every=3,
        eval_tasks=4,
        eval_samples=2,
        eval_sampling={"temperature": 0.0},
    )
    found = summary["evaluations"]
    began = [each["version"] for each in found]
    assert began[0] == 0
    assert len(began) >= 2
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(began))
    assert all(each["reward"]["low"] <= each["reward"]["mean"] <= each["reward"]["high"] for each in found)
    assert found[-1]["reward"]["mean"] > found[0]["reward"]["mean"]
    assert all(sum(each["versions"].values()) >= 8 for each in found), "each episode says its versions"
    assert (running.run_dir / "evaluations.png").exists()
    judged = running.sessions(verdict="not_for_training")
    assert len(judged) == 8 * len(began)
    assert len(running.sessions()) == len(judged) + 32
    temperatures = {turn["sampling"]["used"]["temperature"] for each in judged for turn in each["turns"]}
    assert temperatures == {0.0}


async def test_the_evaluation_before_the_training_is_of_one_version(running: RunTest) -> None:
    """Though each call of the training makes a new one, and episodes of both share `concurrency`."""
    advance(running, calls_a_version=1)
    running.engine.version = "3"
    at_once = [0]
    generate = running.engine.generate

    async def counted(request: Any) -> Any:
        at_once.append(at_once[-1] + 1)
        try:
            await asyncio.sleep(0.01)  # so that others come meanwhile, if they may
            return await generate(request)
        finally:
            at_once.append(at_once[-1] - 1)

    running.engine.generate = counted  # type: ignore[method-assign]
    await wait_until_async(lambda: version_of(running) == 3)
    summary = await running.play(
        "Double",
        group_size=2,
        episodes=24,
        concurrency=4,
        eval_every=1,
        eval_samples=2,
        eval_sampling={"temperature": 0.0},
    )
    before, *later = summary["evaluations"]
    assert (before["version"], before["versions"]) == (3, {"3": 20})
    assert later, "the others are beside the training, and of the versions of their time"
    assert sum(len(each["versions"]) > 1 for each in later)
    temperatures = [request["sampling_params"]["temperature"] for request in running.engine.requests]
    assert temperatures.index(1.0) == 20
    assert max(at_once) <= 4
    pinned = [each for each in running.sessions() if each["policy"] == "policy@3"]
    assert len(pinned) == 20


def version_of(running: RunTest) -> int | None:
    found: int | None = httpx.get(f"{running.url}/v1/models", timeout=60).json()["data"][0]["version"]
    return found


async def test_an_evaluation_that_a_killed_runner_left_is_ended_first(running: RunTest) -> None:
    running.engine.answer = lambda prompt: "0"
    settings: dict[str, Any] = {"group_size": 2, "eval_every": 2, "eval_tasks": 5}
    await running.play("Double", episodes=4, **settings)
    left = running.run_dir / "evaluations" / "00000"
    lines = (left / "journal.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "group" in line.partition(",")[0]] + lines[-1:]
    (left / "journal.jsonl").write_text("".join(kept))
    (left / "summary.json").unlink()
    answers = iter(range(1_000_000))

    def answer(prompt: str) -> str:
        running.engine.version = "7" if next(answers) > 5 else "0"
        return "0"

    running.engine.answer = answer
    summary = await running.play("Double", episodes=40, concurrency=1, resume=True, **settings)
    assert [each["version"] for each in summary["evaluations"]] == [0, 7]
    assert summary["evaluations"][0]["versions"] == {"0": 5}
    assert len(running.sessions(verdict="not_for_training")) == 10, "no episode twice"
    assert json.loads((left / "summary.json").read_text())["judged"] == 5


def test_an_evaluation_plays_every_episode() -> None:
    settings = RunSettings(environment="python:a:B", stop_uniform_after=4, episodes=9, eval_samples=8)
    assert settings.evaluation.stop_uniform_after == 0
    assert (settings.evaluation.episodes, settings.evaluation.group_size) == (None, 8)


@pytest.mark.parametrize(
    ("toy", "given", "error", "logged"),
    [
        ("Double", {"eval_options": {"unknown": 1}}, "cannot be made with the options unknown", ""),
        (
            "Faulty",
            {"options": {"how": "raises", "fails": 0}, "eval_options": {"fails": 9999}},
            "the sandbox is gone",
            "ended early",
        ),
    ],
    ids=["cannot be made", "cannot be played"],
)
async def test_a_training_run_goes_on_if_its_evaluation_cannot_be_made_or_played(
    running: RunTest,
    caplog: pytest.LogCaptureFixture,
    toy: str,
    given: dict[str, Any],
    error: str,
    logged: str,
) -> None:
    running.engine.answer = lambda prompt: "0"
    with caplog.at_level(logging.WARNING):
        summary = await running.play(toy, group_size=2, episodes=8, eval_every=1, **given)
    assert summary["by_status"] == {"completed": 8}
    assert error in summary["evaluations"][0]["error"]
    assert logged in caplog.text
