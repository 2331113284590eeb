"""A trainer on a disk with too little room.

RLIMIT_FSIZE makes every write of this process beyond it fail with EFBIG, in Python, in torch and in
safetensors alike.
"""

import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout_queue import clock
from rollout_queue.memory import MemoryStream
from tests.support.trainer_service.harness import FakeGateway, Harness
from tests.support.turned_clock import TurnedClock
from trainer_service.settings import TrainerSettings

SHORT = 16_384
"""The limit in bytes: less than the size of any shard or export, more than that of every other file."""
ROUNDING_S = 1e-6
"""More than the error of a difference of two times."""
PAUSES = 3
"""How many tries fail before there is room again."""


def states_while_full(root: Path, model_path: Path) -> list[dict[str, Any]]:
    """The trainer's states: one for each wait for room, and one at the end."""
    settings = TrainerSettings(
        model_path=model_path,
        checkpoint_dir=root / "checkpoints",
        policies_dir=root / "policies",
        metrics_path=None,
        threads=1,
        device="cpu",
        retry_s=0.01,
        checkpoint_every_steps=1,
    )
    settings = settings.model_copy(
        update={"algorithm": settings.algorithm.model_copy(update={"min_live_rows": 2})}
    )
    stopped = TurnedClock(stopped=True)
    with clock.using(stopped), ExitStack() as closing:
        closing.callback(limit, resource.RLIM_INFINITY)
        return fill(Harness(root, settings, MemoryStream(), FakeGateway(), closing=closing), stopped)


def fill(harness: Harness, stopped: TurnedClock) -> list[dict[str, Any]]:
    harness.start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    states: list[dict[str, Any]] = []
    room_comes_after(harness, stopped, states)
    write = harness.checkpoints.write

    def write_and_fill_the_disk_again(*arguments: Any) -> str:
        tag = write(*arguments)
        limit(SHORT)
        return tag

    harness.checkpoints.write = write_and_fill_the_disk_again  # type: ignore[assignment, method-assign]
    harness.agents.group("h", [1.0, 0.0])
    limit(SHORT)
    assert harness.trainer.run_once()
    return [*states, state_of(harness, "the end")]


def room_comes_after(harness: Harness, stopped: TurnedClock, states: list[dict[str, Any]]) -> None:
    """Make pauses take no time. After every PAUSES of them, note the state and then make room."""
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        stopped.turn(seconds + ROUNDING_S)
        slept += 1
        if slept % PAUSES == 0:
            publication = harness.trainer.publisher.waits_for
            states.append(state_of(harness, publication or harness.shared_state.snapshot.waiting_for))
            limit(resource.RLIM_INFINITY)

    harness.shared_state.sleep = sleep  # type: ignore[method-assign]


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def state_of(harness: Harness, waiting_for: str | None) -> dict[str, Any]:
    checkpoints, policies = harness.settings.checkpoint_dir, harness.settings.policies_dir
    return {
        "waiting_for": waiting_for,
        "state": harness.shared_state.snapshot.state,
        "checkpoints": sorted(path.name for path in checkpoints.iterdir() if path.is_dir()),
        "current": (checkpoints / "CURRENT").read_text(encoding="utf-8"),
        "ledger": len(harness.checkpoints.ledger(0, 10)),
        "ledger_lines": len((checkpoints / "ledger.jsonl").read_bytes().splitlines()),
        "policies": sorted(path.name for path in policies.iterdir()),
        "announced": [body["version"] for body in harness.gateway.announced],
        "pending": len(list(harness.stream.reclaim())),
        "refusals": {
            what: harness.registry.get_sample_value("weir_trainer_disk_refusals_total", {"what": what})
            for what in ("checkpoint", "publish")
        },
    }
