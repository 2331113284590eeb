"""Kills the containers of a compose project while agents play, lets it learn, and audits it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.compose.system import ComposeSystem, within
from tests.crash.agents import Agents

SETTLES_WITHIN_S = 600.0
CALM_LOOKS = 5


@dataclass(frozen=True)
class ComposeRun:
    """What a run has shown."""

    killed: dict[str, int]
    """Kills by container."""
    counts: dict[str, int]
    """The agents' actions and answers, counted by kind."""
    audit: str
    """The audit's report."""
    clean: bool


def kill_containers(
    system: ComposeSystem, answers: Path, kills: int, seed: int, told: Callable[[str], None]
) -> ComposeRun:
    """Kill each container about equally often, in an order that the seed determines."""
    draw, count = random.Random(seed), len(system.containers())
    killed: dict[str, int] = {}
    order: list[str] = []
    agents = Agents(system.url, system.keys["client"], answers, seed)
    with agents:
        for _ in range(kills):
            order = order or draw.sample(names := [each.name for each in system.containers()], len(names))
            name = order.pop()
            time.sleep(draw.uniform(1, 5))  # kills come at any time
            heard = agents.heard
            victim = next(each for each in system.containers() if each.name == name)
            victim.kill()
            killed[name] = killed.get(name, 0) + 1
            healed_s = system.heal(count, victim)
            told(
                f"killed {name}; well again after {healed_s:.0f} s, {agents.heard - heard} answers meanwhile"
            )
    settle(system)
    system.compose("cp", str(answers), "trainer_service:/var/lib/weir/checkpoints/answers.jsonl")
    script = "weir audit --answers /var/lib/weir/checkpoints/answers.jsonl 2>&1; echo exit code $?"
    report = system.compose("exec", "-T", "trainer_service", "sh", "-c", script)
    return ComposeRun(killed, agents.counts, report, report.rstrip().endswith("exit code 0"))


def settle(system: ComposeSystem) -> None:
    """Wait until the trainer waits and the queue is empty, for a while."""
    calm = 0

    def quiet() -> bool:
        nonlocal calm
        calm = calm + 1 if _quiet(system) else 0
        return calm == CALM_LOOKS

    within(SETTLES_WITHIN_S, quiet)


def _quiet(system: ComposeSystem) -> bool:
    try:
        status: Any = system.admin("/admin/status")
    except httpx.HTTPError:
        return False
    return bool(status["trainer"]["state"] == "waiting" and not status["queue"].get("lag"))
