"""Each window is a part and a moment. A careless system would lose or repeat data if the part died then.

A window recognises its moment by what is visible from outside: files, Redis, a status page. Right after the
kill, it looks at the files of the dead process, and so finds out whether the kill hit the moment.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil

from rollout_queue.contract.published_policy import DELTA_SUFFIX
from rollout_queue.redis import key_names
from tests.crash.checkpoints import before_acknowledge, in_checkpoint, moved, owed, unfinished_checkpoint
from tests.crash.rollbacks import in_rollback, kept, rolled_back, unanswered, unpublished
from tests.crash.system import CrashSystem
from tests.crash.waits import until

STANDS_STILL_S = 12.0
"""Longer than a gateway waits for Redis, and than the trainer's lease."""
LAG_S = 3.0
Victim = Literal[
    "gateway", "driving gateway", "redis", "engine", "rollout_server", "trainer", "trainer rank 1"
]


@dataclass(frozen=True)
class Window:
    """`wait` returns at the moment. `hit` is called after the kill, and says whether the kill hit the
    moment."""

    victim: Victim
    name: str
    wait: Callable[[CrashSystem], None]
    hit: Callable[[CrashSystem], bool] = lambda system: True
    lasting_s: float = 0.0
    """How long the moment lasts at least. The kill comes at a random time in it."""
    after: Callable[[CrashSystem], None] = lambda system: None
    """Called when all is well again."""
    stands_still_s: float = 0.0
    """The part is not killed: its process is suspended for so long, as on a machine that stands still."""

    @property
    def title(self) -> str:
        return f"{self.victim}: {self.name}"


def under_load(system: CrashSystem) -> None:
    until(lambda: system.agents.in_flight > 1)


def replica_lags(system: CrashSystem) -> None:
    """The replica stands still, so it lacks the newest records when it takes over."""
    assert system.cluster is not None
    replica = psutil.Process(system.cluster.replica.process.pid)
    replica.suspend()
    threading.Timer(LAG_S, replica.resume).start()
    until(lambda: system.agents.in_flight > 1)


def trainer_says(state: str) -> Callable[[CrashSystem], None]:
    def wait(system: CrashSystem) -> None:
        until(lambda: system.redis.hget(key_names.TRAINER, "state") != state.encode())
        until(lambda: system.redis.hget(key_names.TRAINER, "state") == state.encode())

    return wait


def in_publish(system: CrashSystem) -> None:
    until(lambda: not half_published(system))
    until(lambda: half_published(system))


def half_published(system: CrashSystem) -> bool:
    return any(system.policies.glob("v*.tmp"))


def unserved(system: CrashSystem) -> bool:
    """Whether a finished version is newer than the served one."""
    finished = [int(path.parent.name[1:]) for path in system.policies.glob("v*/STABLE")]
    return max(finished, default=0) > (system.serving() or 0)


def in_push(system: CrashSystem) -> None:
    until(lambda: not unserved(system))
    until(lambda: unserved(system))


def driven(system: CrashSystem) -> None:
    """A push begins, and a gateway drives it."""
    until(lambda: not system.plan().pushing)
    until(lambda: system.plan().pushing and system.driver() is not None)


def in_reload(system: CrashSystem) -> None:
    until(lambda: system.rollout_states()[0] == "loading")


def changes_written(system: CrashSystem) -> None:
    until(lambda: not half_changes(system))
    until(lambda: half_changes(system))


def half_changes(system: CrashSystem) -> bool:
    """Whether a version that is written has its changes against the one before, or a part of them."""
    return any(system.policies.glob(f"v*.tmp/*{DELTA_SUFFIX}*"))


def canary_open(system: CrashSystem) -> None:
    """Hold the fleet, and open a canary of the trainer's next version."""
    system.admin("POST", "/hold", {})
    newest = system.admin("GET", "")["data"][-1]["version"]
    until(lambda: system.admin("GET", "")["data"][-1]["version"] > newest)
    until(lambda: not system.plan().pushing)
    version = system.admin("GET", "")["data"][-1]["version"]
    system.admin("POST", f"/{version}/canary", {"gates": {"min_groups": 5000}})
    until(lambda: trying(system))


def trying(system: CrashSystem) -> bool:
    canary = system.plan().active_canary
    return canary is not None and canary.state == "open"


def end_canary(system: CrashSystem) -> None:
    """Promote what the canary tries, which also ends the hold."""
    if (canary := system.plan().active_canary) is not None:
        system.admin("POST", f"/{canary.version}/promote?wait=false", {})
    else:
        system.admin("POST", "/release?wait=false", {})


WINDOWS = (
    Window("gateway", "turns in flight", under_load, lasting_s=0.3),
    Window("gateway", "in a push", in_push, unserved),
    Window("gateway", "canary open", canary_open, trying, lasting_s=0.3, after=end_canary),
    Window("driving gateway", "push taken over", driven, lambda system: system.plan().pushing),
    Window("redis", "under load", under_load, lasting_s=0.3),
    Window("redis", "around an acknowledgement", moved),
    Window("engine", "sampling", under_load, lasting_s=0.3),
    Window("engine", "in a reload", in_reload),
    Window("rollout_server", "engine sampling", under_load, lasting_s=0.3),
    Window("rollout_server", "in a reload", in_reload),
    Window("rollout_server", "canary open", canary_open, trying, lasting_s=0.3, after=end_canary),
    Window("trainer", "at any time", under_load, lasting_s=0.3),
    Window("trainer", "in a step", trainer_says("training")),
    Window("trainer", "in a checkpoint", in_checkpoint, unfinished_checkpoint),
    Window("trainer", "between checkpoint and acknowledgement", before_acknowledge, owed),
    Window("trainer", "writing a version", in_publish, half_published),
    Window("trainer", "changes written", changes_written, half_changes),
    Window("trainer", "in a push", in_push, unserved),
    Window("trainer", "in a rollback", in_rollback, unanswered, after=kept),
    Window("trainer", "rollback not yet published", rolled_back, unpublished, after=kept),
    Window("trainer rank 1", "in a step", trainer_says("training")),
    Window("trainer rank 1", "in a checkpoint", in_checkpoint, unfinished_checkpoint),
    Window("trainer rank 1", "in a rollback", in_rollback, unanswered, after=kept),
    Window("gateway", "stands still", under_load, stands_still_s=STANDS_STILL_S),
    Window("rollout_server", "stands still in a reload", in_reload, stands_still_s=STANDS_STILL_S),
    Window("trainer", "stands still in a step", trainer_says("training"), stands_still_s=STANDS_STILL_S),
)
OF_CLUSTER = (Window("redis", "its replica lags", replica_lags, lasting_s=LAG_S / 2),)
"""What needs a Redis with replicas."""
