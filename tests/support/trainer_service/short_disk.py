"""A trainer process on a disk with too little room: python -m tests.support.trainer_service.short_disk …

RLIMIT_FSIZE makes every write beyond it fail with EFBIG, in Python, in torch and in safetensors alike. The
process prints the trainer's state as JSON: one line for each wait for room, and one at the end.
"""

import json
import resource
import sys
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


def main(root: Path, model_path: Path) -> None:
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
    with clock.using(stopped):
        fill(Harness(root, settings, MemoryStream(), FakeGateway()), stopped)


def fill(harness: Harness, stopped: TurnedClock) -> None:
    harness.start()
    harness.agents.group("g", [1.0, 0.0])
    assert harness.trainer.run_once()
    room_comes_after(harness, stopped, PAUSES)
    write = harness.checkpoints.write

    def write_and_fill_the_disk_again(*arguments: Any) -> str:
        tag = write(*arguments)
        limit(SHORT)
        return tag

    harness.checkpoints.write = write_and_fill_the_disk_again  # type: ignore[assignment, method-assign]
    harness.agents.group("h", [1.0, 0.0])
    limit(SHORT)
    assert harness.trainer.run_once()
    report(harness, "the end")


def room_comes_after(harness: Harness, stopped: TurnedClock, pauses: int) -> None:
    """Make pauses take no time. Every `pauses`th pause prints a report and then makes room."""
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        stopped.turn(seconds + ROUNDING_S)
        slept += 1
        if slept % pauses == 0:
            publication = harness.trainer.publisher.waits_for
            report(harness, publication or harness.shared_state.snapshot.waiting_for)
            limit(resource.RLIM_INFINITY)

    harness.shared_state.sleep = sleep  # type: ignore[method-assign]


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def report(harness: Harness, waiting_for: str) -> None:
    checkpoints, policies = harness.settings.checkpoint_dir, harness.settings.policies_dir
    seen = {
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
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
