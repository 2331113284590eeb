"""The demo's task with a recipe that collapses, with and without guards (`make test-presets`).

The recipe has a learning rate of 1e-3, a step for every group, and rollouts that are four steps old. Without
guards the mean reward falls from almost 1 to almost 0. With guards the training goes back to its best
checkpoint by itself: in the end it still trains, and what was served lately has learned the task.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.results import Trial
from bench.trial import GROUP_SIZE, groups_in_flight, settings_of
from trainer_service.settings import GuardSettings
from weir.demo.demo_episodes import EpisodeLog, EpisodeRunner
from weir.demo.make_model import model_for
from weir.demo.observer import Observation, Observer
from weir.demo.run_demo import watched
from weir.stack.services import merged
from weir.stack.settings import StackSettings
from weir.stack.stack import Stack

SEEDS = [0, 1, 2, 3, 4]
LAG = 4
RECIPE = {"optimizer": {"lr": 1e-3}, "algorithm": {"min_live_rows": 1}}
GUARDS = [
    name for name, field in GuardSettings.model_fields.items() if type(None) in get_args(field.annotation)
]
LEARNED, LOST = 0.7, 0.2
"""Mean rewards of the last 128 episodes: a fall from above `LEARNED` to below `LOST` is a collapse."""
EPISODES, LONGEST_S = 6000, 600.0
"""A run of this length collapses without guards. With guards it may fall again and again, so it goes on until
its mean reward is above `LEARNED`, or it is twice as long."""


@dataclass
class TrialCourse:
    """Ends a run when a guard holds the training, when the run is long enough, or, if `may_collapse`, when
    the reward has collapsed."""

    snapshot: Observation
    began: float
    may_collapse: bool
    reward: float = 0.0
    best: float = 0.0
    collapsed: bool = False

    @property
    def held(self) -> bool:
        return self.snapshot.trainer.state == "paused"

    def enough(self, record: EpisodeLog) -> bool:
        self.reward = record.moving_average or 0.0
        self.best = max(self.best, self.reward)
        self.collapsed = self.collapsed or (self.best > LEARNED and self.reward < LOST)
        length = max(len(record.episodes) / EPISODES, (time.monotonic() - self.began) / LONGEST_S)
        long_enough = length > (1 if self.may_collapse or self.reward > LEARNED else 2)
        return self.held or (self.collapsed and self.may_collapse) or long_enough


def settings_with(guards: Mapping[str, Any], seed: int, run_dir: Path) -> StackSettings:
    model, _ = model_for(Path("run/models"), seed)
    settings = settings_of(Trial("tool", LAG, seed), run_dir, model)
    recipe = {"trainer": {**RECIPE, "guards": dict(guards)}}
    return settings.model_copy(update={"services": merged(settings.services, recipe)})


async def played(stack: Stack, settings: StackSettings, seed: int, may_collapse: bool = False) -> TrialCourse:
    episodes = EpisodeRunner(
        stack.gateway_url,
        settings.client_keys[0],
        group_size=GROUP_SIZE,
        groups_in_flight=groups_in_flight(LAG),
        seed=seed,
    )
    observer = Observer(stack.gateway_url, settings.admin_keys[0], settings.run_dir / "metrics.jsonl")
    course = TrialCourse(observer.snapshot, time.monotonic(), may_collapse)
    record = await watched(stack, episodes, observer, course.enough)
    print(f"{len(record.episodes)} episodes, {len(course.snapshot.steps)} steps, at best {course.best:.2f}")
    return course


def test_without_guards_it_collapses(tmp_path: Path) -> None:
    """One run that collapses is enough. A run that learns the whole task has nothing left to train on."""
    for seed in SEEDS:
        settings = settings_with(dict.fromkeys(GUARDS), seed, tmp_path / f"seed{seed}")
        with Stack(settings) as stack:
            stack.wait_ready(timeout_s=1200)
            course = asyncio.run(played(stack, settings, seed, may_collapse=True))
        assert max(step["staleness/total_max"] for step in course.snapshot.steps) >= 2
        if course.collapsed:
            return
    pytest.fail("no run collapsed, so the guards have nothing to prevent")


@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
def test_with_guards_it_ends_well_and_still_trains(tmp_path: Path, seed: int) -> None:
    settings = settings_with({}, seed, tmp_path)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=1200)
        course = asyncio.run(played(stack, settings, seed))
    assert not course.held
    assert course.reward > LEARNED
