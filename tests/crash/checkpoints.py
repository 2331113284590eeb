"""The moments of a checkpoint, by its files and by Redis.

a directory newer than CURRENT ─▶ shards ─▶ the lease is confirmed ─▶ STATE ─▶ CURRENT ─▶ acknowledge
"""

import msgspec
from redis import Redis

from rollout_queue.redis import key_names
from tests.crash.system import CrashSystem
from tests.crash.waits import NeverCame, until
from trainer_service.storage.checkpoint import CURRENT, STATE
from trainer_service.storage.run_state import RunState

LONGEST_STOP_S = 5.0
"""How long Redis takes no writes at most."""


def current(system: CrashSystem) -> str:
    path = system.checkpoints / CURRENT
    return path.read_text() if path.exists() else ""


def current_state(system: CrashSystem) -> RunState:
    """The state in the checkpoint that a restart loads."""
    return msgspec.json.decode((system.checkpoints / current(system) / STATE).read_bytes(), type=RunState)


def newest(system: CrashSystem) -> str:
    """The name of the newest checkpoint, finished or not; empty if there is none."""
    return max((path.name for path in system.checkpoints.glob("*-step-*")), default="")


def unfinished_checkpoint(system: CrashSystem) -> bool:
    """Whether there is a checkpoint directory newer than the one that CURRENT names."""
    return newest(system) > current(system)


def in_checkpoint(system: CrashSystem) -> None:
    until(lambda: not unfinished_checkpoint(system))
    until(lambda: unfinished_checkpoint(system))


def moved(system: CrashSystem) -> None:
    """Wait until CURRENT has just moved, when the trainer is about to acknowledge."""
    before = current(system)
    until(lambda: current(system) != before)


def before_acknowledge(system: CrashSystem) -> None:
    """Stop Redis' writes at the end of a checkpoint; return when it is complete and not yet acknowledged.

    Before STATE, the trainer confirms its lease, for which Redis has to take writes.
    """
    in_checkpoint(system)
    before = current(system)
    until(lambda: (system.checkpoints / newest(system) / STATE).exists())
    system.redis.client_pause(int(LONGEST_STOP_S * 1000), all=False)
    until(lambda: current(system) != before)
    if not _owed(system):
        system.redis.client_unpause()
        raise NeverCame


def owed(system: CrashSystem) -> bool:
    """Let Redis take writes; return whether the newest checkpoint has entries that are not acknowledged."""
    system.redis.client_unpause()
    return _owed(system)


def _owed(system: CrashSystem) -> bool:
    pending = {entry["message_id"].decode() for entry in _pending(system.redis)}
    return any(entry_id in pending for entry_id in current_state(system).owed.entry_ids)


def _pending(redis: Redis) -> list[dict[str, bytes]]:
    found: list[dict[str, bytes]] = redis.xpending_range(key_names.STREAM, "trainer", "-", "+", 100_000)  # type: ignore[assignment]
    return found
