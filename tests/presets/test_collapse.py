"""The demo's task with a recipe that collapses: a rate of 1e-3, a step for every group, rollouts four steps
old. With guards on, what is served stays better than what it began as. `make test-presets`."""

import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from bench.kinds import KINDS
from bench.shelf import Trial
from bench.trial import evaluated, groups_in_flight, settings_of
from weir.demo.episodes import Episodes, Record
from weir.demo.make_model import model_for
from weir.services import merged
from weir.settings import StackSettings
from weir.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

TRIAL = Trial("tool", 4, 0)
RECIPE = {"trainer": {"optimizer": {"lr": 1e-3}, "algorithm": {"min_live_rows": 1}}}
EPISODES, LONGEST_S = 6000, 600.0


def recipe(run_dir: Path) -> StackSettings:
    model, _ = model_for(Path("run/models"), TRIAL.seed)
    settings = settings_of(TRIAL, run_dir, model)
    return settings.model_copy(update={"services": merged(settings.services, RECIPE)})


async def played(stack: Stack, settings: StackSettings) -> Record:
    """Until the trainer holds by itself, or for long enough to have collapsed."""
    headers = {"authorization": f"Bearer {settings.admin_keys[0]}"}
    began, held = time.monotonic(), asyncio.Event()

    async def watch() -> None:
        async with httpx.AsyncClient(base_url=stack.trainer_url, headers=headers) as rest:
            while not held.is_set():
                said = (await rest.get("/status")).raise_for_status().json()
                if said["state"] == "paused":
                    print(f"paused at step {said['step']}: {said['waiting_for']}")
                    held.set()
                await asyncio.sleep(0.5)

    def enough(so_far: Record) -> bool:
        return held.is_set() or len(so_far.episodes) > EPISODES or time.monotonic() - began > LONGEST_S

    watching = asyncio.create_task(watch())
    try:
        return await Episodes(
            stack.gateway_url,
            settings.client_keys[0],
            group_size=8,
            groups_in_flight=groups_in_flight(TRIAL.max_staleness),
            seed=TRIAL.seed,
        ).play(enough)
    finally:
        watching.cancel()


def test_a_recipe_that_collapses_is_held(tmp_path: Path) -> None:
    settings = recipe(tmp_path)
    with Stack(settings) as stack:
        stack.wait_ready(timeout_s=300)
        warm = asyncio.run(evaluated(stack, settings, KINDS["tool"]))
        record = asyncio.run(played(stack, settings))
        served = asyncio.run(evaluated(stack, settings, KINDS["tool"]))
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    print(f"warm start {warm:.2f}, served {served:.2f}; {len(record.episodes)} episodes, {len(steps)} steps")
    assert len(steps) > 1
    assert max(step["staleness/total_max"] for step in steps) >= 2
    assert served >= warm
