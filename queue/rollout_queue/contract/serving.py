"""Which policy versions may answer calls, and the push that changes them.

a push begins ─▶ a server has proved the version ─▶ … ─▶ every live server has ─▶ the push ends
                       └─ the version is admissible, and is served: it is the newest that a server has proved

A push carries one version to every rollout server. To *prove* a version, a server asks its engine what it has
loaded. A call may be answered by any server whose version is *admissible*: the served one, and the last ones
that it replaced. A *hold* lets the fleet keep what it serves: newer versions are registered, but not pushed.
"""

from typing import Literal

import msgspec
from msgspec.structs import replace

PushState = Literal["pushing", "serving", "failed", "superseded"]
ServerPushState = Literal[
    "waiting", "preparing", "prepared", "loading", "proved", "refused", "failed", "unavailable"
]
"""What a server does, or did, in a push. `refused`: it will not load this version; `failed`: it may still, at
another attempt; `unavailable`: it is dead or drained, and takes the version when it comes back."""


class Push(msgspec.Struct, frozen=True, kw_only=True):
    """One push. A newer one has a higher `id`, and replaces it."""

    id: int
    version: int
    force: bool = False
    """Whether an operator asked for the version: servers may serve a newer one before."""
    state: PushState = "pushing"
    started_at: float
    ended_at: float | None = None
    error: str | None = None
    """Why it failed."""
    capacity: float = 1.0
    """The smallest share of the live servers that could take calls during the push."""


class ServerPush(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a push on one server."""

    push: int
    server: str
    state: ServerPushState
    version_served: int | None = None
    paused_s: float | None = None
    total_s: float = 0.0
    error: str | None = None


class Admissible(msgspec.Struct, frozen=True):
    """A version that may answer calls, and the push that a server proved it in."""

    version: int
    push: int


class ServingHold(msgspec.Struct, frozen=True):
    """Newer versions are registered, and not pushed, until an operator releases or promotes one."""

    since: float
    reason: str


class ServingPlan(msgspec.Struct, frozen=True):
    """The state that all gateways share. Its methods return the plan after an event."""

    push: Push | None = None
    """The last push, under way or ended."""
    admissible: tuple[Admissible, ...] = ()
    """The newest push first. A version comes once."""
    hold: ServingHold | None = None

    @property
    def serving(self) -> int | None:
        """The version of the newest push that a server has proved; None before the first policy."""
        return self.admissible[0].version if self.admissible else None

    @property
    def versions(self) -> frozenset[int]:
        """Every version that may answer calls."""
        return frozenset(each.version for each in self.admissible)

    @property
    def pushing(self) -> bool:
        return self.push is not None and self.push.state == "pushing"

    @property
    def target(self) -> int | None:
        """The version that every server is to serve in the end."""
        if self.push is not None and self.push.state in ("pushing", "serving"):
            return self.push.version
        return self.serving

    def begun(self, version: int, now: float, *, force: bool) -> "ServingPlan":
        """A push of `version` begins. Its id grows with time, also after a loss of this plan."""
        former = self.push.id if self.push is not None else 0
        push = Push(id=max(former + 1, int(now * 1000)), version=version, force=force, started_at=now)
        return replace(self, push=push)

    def proved(self, version: int, push: int, max_lag: int) -> "ServingPlan":
        """A server has proved `version` in this push. At most `max_lag` older versions stay admissible.

        A version that a rollback has replaced does not come back. A proof of a push that this plan does not
        know, because Redis was emptied, changes nothing.
        """
        if self.push is None or push > self.push.id:
            return self
        head = self.admissible[0] if self.admissible else None
        if head is not None and push < head.push and version > head.version:
            return self
        others = [each for each in self.admissible if each.version != version]
        pushes = [push, *(each.push for each in self.admissible if each.version == version)]
        entries = sorted([Admissible(version, max(pushes)), *others], key=lambda each: -each.push)
        return replace(self, admissible=tuple(entries[: max_lag + 1]))

    def ended(
        self, push: int, state: PushState, now: float, *, error: str | None, capacity: float
    ) -> "ServingPlan":
        """The push has ended, unless a newer one has begun. After a rollback, newer versions answer no
        calls."""
        if self.push is None or self.push.id != push or self.push.state != "pushing":
            return self
        ended = replace(self.push, state=state, ended_at=now, error=error, capacity=capacity)
        admissible = self.admissible
        if state == "serving":
            admissible = tuple(each for each in admissible if each.version <= self.push.version)
        return replace(self, push=ended, admissible=admissible)


def plan_of(packed: bytes | None) -> ServingPlan:
    """Decode the plan. Earlier builds stored the served version alone."""
    if packed is None:
        return ServingPlan()
    plan = msgspec.json.decode(packed, type=ServingPlan | int)
    return ServingPlan(admissible=(Admissible(plan, 0),)) if isinstance(plan, int) else plan
