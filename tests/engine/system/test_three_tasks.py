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
from tests.support.system.real_system import FORKING_ENGINE
from tests.support.tiny_model import make_tiny_model
from tests.support.waiting import wait_until
from weir.demo.demo_episodes import WINDOW, EpisodeLog, EpisodeRunner
from weir.demo.settings import services_of_demo
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

pytestmark = pytest.mark.long

EPISODES = 2560
"""At most so many may a task need until it is learned: four times those of a task alone, because a busy
machine makes fewer steps of them."""
GROUP_SIZE, TOKENS = 8, 8
Enough = Callable[[EpisodeLog], bool]


@dataclass(frozen=True)
class Letters:
    """The reward is the share of these letters among those of the answer. `ids` name the groups' tasks."""

    prompt: str
    """Prompts that differ in most tokens: one answer for each of them can be learned."""
    letters: str
    ids: Callable[[int], str]
    learned: float = 0.0
    """It is learned when the last WINDOW episodes are so much better than the first ones: half of what the
    task gained alone in 640 episodes, with seed 0. A game ends then, before the answers are always the same:
    where nothing is tried, nothing else is learned."""
    sign: float = 1.0
    """-1: the grader rewards the opposite."""
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
        return self.sign * fmean(found) if found else 0.0


GAMES = {
    # Alone: 0.51 to 0.90, 0.47 to 0.76, and 0.39 to 0.51.
    "repeated": Letters(
        "first " * 12, "abcdefghijklm", lambda number: f"half-{number % 10}", learned=0.39 / 2
    ),
    "single": Letters("() " * 16, "nopqrstuvwxyz", lambda number: "last", learned=0.29 / 2),
    "new": Letters("0 " * 16, "aeiou", lambda number: f"python:vowels:Vowels:0:{number}", learned=0.12 / 2),
}
GOOD = Letters("self " * 12, "aeiou", lambda number: "spoilt:good")
SPOILING = replace(GOOD, letters="bcdfghjklmnpqrstvwxyz", ids=lambda number: "spoiling:bad")
"""Whoever learns this unlearns GOOD, which has the same prompt: a share of SPOILT leaves GOOD at most 1 -
SPOILT, less than half of the 0.37 that it begins with."""
SPOILT = 0.88


@dataclass
class Learning:
    """Whether a game has been learned, or was played EPISODES times."""

    game: Letters
    start: float | None = None
    """The reward before anything was learned; None: that of the first WINDOW episodes."""
    reached: bool = False

    def __call__(self, record: EpisodeLog) -> bool:
        if record.moving_average is not None and record.reward_start is not None:
            self.start = record.reward_start if self.start is None else self.start
            self.reached |= record.moving_average >= self.start + self.game.learned
        return self.reached or len(record.episodes) >= EPISODES


@dataclass
class Deployment:
    """The stack, and what its operator asks."""

    stack: Stack
    settings: StackSettings
    seed: int
    starts: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(GAMES))
    """The reward of each game before anything was learned; None as long as it was not played."""
    known: int = 0
    """So many recoveries were expected so far."""

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

    def plays(self, *games: tuple[Letters, Enough], train: bool = True) -> list[EpisodeLog]:
        """Play the games at once, each until it has enough."""
        return asyncio.run(self._plays(games, train))

    async def _plays(self, games: Sequence[tuple[Letters, Enough]], train: bool) -> list[EpisodeLog]:
        runners = [
            EpisodeRunner(
                self.stack.gateway_url,
                self.settings.client_keys[0],
                group_size=GROUP_SIZE,
                groups_in_flight=4,
                seed=self.seed,
                game=game,
                train=train,
                retry_every_s=0.2,
            )
            for game, _ in games
        ]
        plays = (runner.play(enough) for runner, (_, enough) in zip(runners, games, strict=True))
        return list(await asyncio.gather(*plays))

    def learns(self, *names: str) -> None:
        """Play these games at once until each is learned. Nothing is undone meanwhile."""
        learning = {name: Learning(GAMES[name], self.starts[name]) for name in names}
        records = self.plays(*((each.game, each) for each in learning.values()))
        for (name, each), record in zip(learning.items(), records, strict=True):
            self.starts[name] = each.start
            print(
                f"seed {self.seed}, step {self.trainer['step']}: {name} {each.start or 0:.2f} to "
                f"{record.moving_average or 0:.2f} in {len(record.episodes)} episodes, "
                f"{record.episodes[-1].seconds:.0f} s"
            )
        assert all(each.reached for each in learning.values())
        assert len(self.recoveries) == self.known
        assert self.trainer["state"] != "paused"

    def serves_the_first_model(self, version: int) -> bool:
        wait_until(lambda: self.admin("GET", "/status")["policy"]["serving"] >= version)
        directory = self.settings.run_dir
        paths = directory / f"policies/v{version:08d}", directory.parent / "model"
        served, first = (load_file(path / "model.safetensors") for path in paths)
        return all(each.equal(served[name]) for name, each in first.items())


def played(episodes: int) -> Enough:
    return lambda record: len(record.episodes) >= episodes


def deployed(tmp_path: Path, seed: int) -> StackSettings:
    """The first recovery takes the learning rate to 5e-3, with which each task was learned alone."""
    model = make_tiny_model(tmp_path / "model", seed=seed, head_scale=4.0, attention_scale=8.0)
    guards = {"recovery_lr_factor": 0.7}
    trainer = {"optimizer": {"lr": 7e-3}, "algorithm": {"min_live_rows": 16}, "guards": guards}
    settings = isolated_stack(tmp_path / "run", model, merged(services_of_demo(seed), {"trainer": trainer}))
    return settings.model_copy(update={"engine_python": FORKING_ENGINE})


@pytest.mark.parametrize("mixed", [False, True], ids=["in turn", "mixed"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_tasks_are_learned_and_a_collapse_of_one_is_healed_while_the_others_go_on(
    tmp_path: Path, seed: int, mixed: bool
) -> None:
    settings = deployed(tmp_path, seed)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        deployment = Deployment(stack, settings, seed)
        _goes_back_to_the_first_by_itself(deployment)
        for names in [tuple(GAMES)] if mixed else [(name,) for name in GAMES]:
            deployment.learns(*names)
        _breaks_one(deployment)
        version = deployment.admin("POST", "/trainer/rollback", {"version": 0})["version"]
        assert deployment.serves_the_first_model(version)


def _goes_back_to_the_first_by_itself(deployment: Deployment) -> None:
    """The training begins with what makes the model worse, as evaluations show."""

    def alarmed(_: EpisodeLog) -> bool:
        return bool(deployment.recoveries)

    deployment.plays((GOOD, played(WINDOW)), train=False)
    deployment.plays((SPOILING, lambda record: (record.moving_average or 0.0) > SPOILT))
    deployment.plays((GOOD, alarmed), train=False)
    (recovery,) = deployment.recoveries
    assert (recovery["restored"], recovery["automatic"]) == (0, True)
    assert "evaluation sessions" in recovery["reason"]
    assert deployment.serves_the_first_model(recovery["version"])
    deployment.known = 1


def _breaks_one(deployment: Deployment) -> None:
    """The grader of one task rewards the opposite. The training goes back because of that task, once. Then
    all three are learned again, from there on."""
    step = deployment.trainer["step"]

    def alarmed(_: EpisodeLog) -> bool:
        return len(deployment.recoveries) > deployment.known

    games = {**GAMES, "new": replace(GAMES["new"], sign=-1.0)}
    deployment.plays(*((game, alarmed) for game in games.values()))
    assert "python:vowels:Vowels" in deployment.recoveries[-1]["reason"]
    warnings = deployment.admin("GET", "/status")["warnings"]
    assert any("the training went back" in each for each in warnings)
    deployment.known += 1
    deployment.learns(*GAMES)
    assert deployment.trainer["step"] > step
