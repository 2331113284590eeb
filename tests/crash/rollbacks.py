"""An operator sets the training back. What shows from outside how far the trainer is with it:

POST /rollback ─▶ a number is reserved ─▶ old weights are loaded ─▶ a checkpoint ─▶ publish ─▶ the answer
"""

from typing import Any

import httpx
from redis import Redis

from rollout_queue.contract.published_policy import STABLE
from rollout_queue.redis import key_names
from tests.crash.checkpoints import current, current_state
from tests.crash.system import CrashSystem
from tests.crash.waits import LONGEST_WAIT_S, NeverCame, until


def ask(system: CrashSystem) -> None:
    """Ask for the oldest version that the trainer can go back to, which undoes the most steps."""
    versions: list[int] = []

    def known() -> bool:
        versions[:] = system.trainer("GET", "/rollback").json()["versions"]
        return len(versions) > 1

    until(known)
    system.ask_trainer("POST", "/rollback", {"version": min(versions)})


def in_rollback(system: CrashSystem) -> None:
    """Ask for a rollback; return when the trainer has begun it."""
    ask(system)
    until(lambda: begun(system) or answered(system))
    if answered(system):
        raise NeverCame


def begun(system: CrashSystem) -> bool:
    """Whether a number is reserved that no version has yet. In a step, the trainer's state would be
    `training`."""
    reserved, _ = _number(system.redis, key_names.RESERVED)
    version, state = _number(system.redis, key_names.TRAINER)
    return reserved > version and state == b"waiting"


def _number(redis: Redis, key: str) -> tuple[int, bytes | None]:
    """The version in a hash, and the state if it has one."""
    found: Any = redis.hmget(key, "version", "state")
    return int(found[0] or 0), found[1]


def answered(system: CrashSystem) -> bool:
    return system.asked.done()


def unanswered(system: CrashSystem) -> bool:
    """Whether the trainer died before it succeeded. If it lost a rank, it may answer 500 first."""
    error = system.asked.exception(LONGEST_WAIT_S)
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError)


def kept(system: CrashSystem) -> None:
    """Raises AssertionError if the trainer has forgotten a rollback that it had answered."""
    if system.asked.exception(LONGEST_WAIT_S) is not None:
        return
    version = system.asked.result().json()["version"]
    done = [each["version"] for each in system.trainer("GET", "/rollback").json()["recoveries"]]
    assert version in done, f"the rollback to version {version} was answered, and is not among {done}"


def rolled_back(system: CrashSystem) -> None:
    """Ask for a rollback; return when it is in a checkpoint."""
    before = current(system)
    ask(system)
    until(lambda: unpublished(system) or answered(system))
    if current(system) == before or not unpublished(system):
        raise NeverCame


def unpublished(system: CrashSystem) -> bool:
    """Whether the last checkpoint is one of restored weights, which are not written as a version."""
    if not current(system):
        return False
    state = current_state(system)
    return (
        bool(state.recovery.done)
        and state.recovery.done[-1].version == state.version
        and not (system.policies / f"v{state.version:08d}" / STABLE).exists()
    )
