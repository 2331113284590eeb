"""Three tasks on the real stack: one after the other, mixed, and what happens when one of them goes wrong."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from safetensors.torch import load_file

from bench.isolated_stack import isolated_stack
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import wait_until
from weir.demo.episodes import WINDOW, EpisodeLog, EpisodeRunner
from weir.demo.settings import services_of_demo
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

pytestmark = pytest.mark.long

EPISODES = 1600
"""How many each task plays: enough for the tiny model to learn some of it."""
LEARNED = 0.08
"""So much better, at least, are the last episodes of a task than its first ones."""
GROUP_SIZE, TOKENS = 8, 8


@dataclass(frozen=True)
class Letters:
    """The reward is the share of these letters among those of the answer. `ids` name the groups' tasks."""

    prompt: str
    letters: str
    ids: Callable[[int], str]
    broken: bool = False
    """Whether the grader gives nothing any more."""
    numbers: "count[int]" = field(default_factory=count)

    def group(self, random: Random, size: int) -> Sequence[int]:
        return [next(self.numbers)] * size

    def task_id(self, task: int) -> str:
        return self.ids(task)

    async def play(self, client: AsyncOpenAI, task: int) -> float:
        messages: Any = [{"role": "user", "content": self.prompt}]
        said = await client.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)
        found = [
            each in self.letters for each in (said.choices[0].message.content or "").lower() if each.isalpha()
        ]
        return 0.0 if self.broken or not found else fmean(found)


GAMES = {
    "repeated": Letters("first half?", "abcdefghijklm", lambda number: f"half-{number % 10}"),
    "new": Letters("vowels?", "aeiou", lambda number: f"python:vowels:Vowels:0:{number}"),
    "single": Letters("last half?", "nopqrstuvwxyz", lambda number: "last"),
}


@dataclass
class Deployment:
    """The stack, and what its operator asks."""

    stack: Stack
    settings: StackSettings
    seed: int

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"authorization": f"Bearer {self.settings.admin_keys[0]}"}
        url = f"{self.stack.gateway_url}/admin{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=120).raise_for_status().json()

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.admin("GET", "/trainer/rollback")["recoveries"]
        return found

    @property
    def trainer(self) -> dict[str, Any]:
        found: dict[str, Any] = self.admin("GET", "/status")["trainer"]
        return found

    async def plays(self, *games: Letters, until: Callable[[EpisodeLog], bool]) -> list[EpisodeLog]:
        """Play the games at once until each has enough."""
        runners = [
            EpisodeRunner(
                self.stack.gateway_url,
                self.settings.client_keys[0],
                group_size=GROUP_SIZE,
                groups_in_flight=4,
                seed=self.seed,
                game=game,
                retry_every_s=0.2,
            )
            for game in games
        ]
        return list(await asyncio.gather(*(runner.play(until) for runner in runners)))


def played(record: EpisodeLog) -> bool:
    return len(record.episodes) >= EPISODES


def gain(record: EpisodeLog) -> float:
    rewards = [each.reward for each in record.episodes if each.reward is not None]
    return fmean(rewards[-WINDOW:]) - fmean(rewards[:WINDOW])


def deployed(tmp_path: Path, seed: int) -> StackSettings:
    model = make_tiny_model(tmp_path / "model", seed=seed, head_scale=4.0)
    learning = {"trainer": {"optimizer": {"lr": 1e-3}, "algorithm": {"min_live_rows": 16}}}
    return isolated_stack(tmp_path / "run", model, merged(services_of_demo(seed), learning))


@pytest.mark.parametrize("mixed", [False, True], ids=["in turn", "mixed"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_tasks_are_learned_and_a_collapse_of_one_is_healed_while_the_others_go_on(
    tmp_path: Path, seed: int, mixed: bool
) -> None:
    settings = deployed(tmp_path, seed)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        deployment = Deployment(stack, settings, seed)
        turns = [tuple(GAMES)] if mixed else [(name,) for name in GAMES]
        for names in turns:
            records = asyncio.run(deployment.plays(*(GAMES[name] for name in names), until=played))
            gains = {name: round(gain(record), 3) for name, record in zip(names, records, strict=True)}
            print(f"seed {seed}: {gains} at step {deployment.trainer['step']}")
            assert min(gains.values()) >= LEARNED
            assert not deployment.recoveries
            assert deployment.trainer["state"] != "paused"
        _breaks_one(deployment)
        _goes_back_to_the_first(deployment, tmp_path)


def _breaks_one(deployment: Deployment) -> None:
    """The grader of one task fails. The training goes back because of that task, once, and goes on."""
    step = deployment.trainer["step"]
    games = [replace(game, broken=name == "new") for name, game in GAMES.items()]

    def healed(record: EpisodeLog) -> bool:
        return len(record.episodes) >= EPISODES or bool(deployment.recoveries)

    asyncio.run(deployment.plays(*games, until=healed))
    (recovery,) = deployment.recoveries
    assert "python:vowels:Vowels" in recovery["reason"]
    assert any("the training went back" in each for each in deployment.admin("GET", "/status")["warnings"])
    before = len(deployment.recoveries)
    asyncio.run(deployment.plays(*GAMES.values(), until=lambda record: len(record.episodes) >= WINDOW))
    assert deployment.trainer["step"] > step
    assert deployment.trainer["state"] != "paused"
    assert len(deployment.recoveries) == before


def _goes_back_to_the_first(deployment: Deployment, tmp_path: Path) -> None:
    """By hand. What is served then is the model that the run began with."""
    version = deployment.admin("POST", "/trainer/rollback", {"version": 0})["version"]
    wait_until(lambda: deployment.admin("GET", "/status")["policy"]["serving"] >= version)
    (path,) = (tmp_path / "run").glob(f"policies/*{version}")
    served, first = (load_file(each / "model.safetensors") for each in (path, tmp_path / "model"))
    assert all(each.equal(served[name]) for name, each in first.items())
