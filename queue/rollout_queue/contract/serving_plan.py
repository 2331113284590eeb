"""Which policy versions may answer calls, and the push that changes them.

a push begins ─▶ a server has proved the version ─▶ … ─▶ every live server has ─▶ the push ends
                       └─ the version is admissible, and is served: it is the newest that a server has proved

A push carries one version to every rollout server. To *prove* a version, a server asks its engine what it has
loaded. A call may be answered by any server whose version is *admissible*: the served one, and the last ones
that it replaced. A *hold* lets the fleet keep what it serves: newer versions are registered, but not pushed.

A canary is a version that answers a share of the new groups, until its gates say whether it is served.

new group ── hash ──▶ canary     a few servers, with the version that is tried ┐
                 └──▶ baseline   the other ones, with the served version       ┴─▶ gates ─▶ promoted
                                                                                       └──▶ rolled back
"""

import hashlib
from typing import Literal

import msgspec
from msgspec.structs import replace

Arm = Literal["canary", "baseline"]
Sticky = Literal["group", "session"]
CanaryState = Literal["opening", "open", "promoted", "rolled_back", "superseded"]
GateName = Literal["kl", "reward", "errors", "length"]
ReadingState = Literal["holds", "broken", "undecided", "missing"]
"""`undecided`: there are too few numbers yet; `missing`: there are none."""


class CanaryGates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds that a version has to keep; their meaning is that of the settings `gateway.canary`."""

    min_groups: int = 10
    max_kl: float | None = 0.1
    max_reward_drop: float | None = 0.1
    max_error_increase: float | None = 0.05
    max_length_change: float | None = 0.5
    deadline_s: float = 3600.0


class GateReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one gate shows. `low` and `high` are the interval that has the true value 19 times of 20."""

    gate: GateName
    state: ReadingState
    bound: float
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    """How many groups the value is made of; calls, for errors."""


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a canary, and why it ended, if it has."""

    groups: int = 0
    """How many groups of the canary have ended."""
    baseline_groups: int = 0
    readings: tuple[GateReading, ...] = ()
    reason: str | None = None


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """One canary. Its servers load the version under `id`, which is higher than that of every push before."""

    id: int
    version: int
    baseline: int
    """The version that was served when it began."""
    servers: tuple[str, ...]
    share: float
    """The share of the new groups that its servers answer."""
    sticky: Sticky = "group"
    """What is never divided between the versions."""
    gates: CanaryGates = CanaryGates()
    automatic: bool = False
    """Whether it began because every version passes through one."""
    state: CanaryState = "opening"
    started_at: float
    opened_at: float | None = None
    """When its servers had proved the version: groups that are opened later may go to it."""
    ended_at: float | None = None
    report: CanaryReport = CanaryReport()

    @property
    def active(self) -> bool:
        return self.state in ("opening", "open")

    def arm_of(self, group: str, opened_at: float | None) -> Arm | None:
        """Where the calls of a group go; None for one that was opened before the canary, or when nobody
        knows. A hash decides, so every gateway decides alike."""
        if self.state != "open" or self.opened_at is None or opened_at is None or opened_at < self.opened_at:
            return None
        digest = hashlib.blake2b(f"{self.id} {group}".encode(), digest_size=8).digest()
        return "canary" if int.from_bytes(digest) < self.share * 2**64 else "baseline"


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A server keeps a version for calls that name it (`policy@12`), and takes no part in pushes."""

    id: int
    """The number under which the server loads the version; higher than that of every push before."""
    server: str
    version: int
    since: float


class CanaryCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A call while a canary was open."""

    canary: int
    arm: Arm
    group: str
    session: str
    tokens: int
    """How many tokens the answer has."""
    ok: bool
    """Whether a server of its arm has answered it."""


class CanaryScore(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """How far the served version is from the tried one, on one answer of the tried one."""

    canary: int
    group: str
    tokens: int
    kl: float
    """The sum over the tokens, in nats."""


CanaryRecord = CanaryCall | CanaryScore


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
    refused: bool = False
    """Whether it failed because every server refused the version itself."""
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
    canary: Canary | None = None
    """The last canary, open or ended."""
    pins: tuple[Pin, ...] = ()
    """At most one for each server."""

    @property
    def active_canary(self) -> Canary | None:
        return self.canary if self.canary is not None and self.canary.active else None

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

    @property
    def needed(self) -> frozenset[int]:
        """Every version that a server serves, or is to serve."""
        canary = self.active_canary
        tried = set() if canary is None else {canary.version, canary.baseline}
        wanted = set() if self.target is None else {self.target}
        return self.versions | wanted | tried | {pin.version for pin in self.pins}

    def own_version(self, server: str) -> Pin | Canary | None:
        """Why a server serves another version than the fleet; None if it does not."""
        pin = next((pin for pin in self.pins if pin.server == server), None)
        canary = self.active_canary
        return pin or (canary if canary is not None and server in canary.servers else None)

    @property
    def newest_id(self) -> int:
        """The newest push, canary or pin; 0 if there is none. Every change that removes one brings a newer
        one, so a plan with a smaller number is an older plan."""
        used = [each.id for each in (self.push, self.canary, *self.pins) if each is not None]
        return max(used, default=0)

    def next_id(self, now: float) -> int:
        """A number for a push, a canary or a pin. It grows with time, also after a loss of this plan."""
        return max(self.newest_id + 1, int(now * 1000))

    def begun(self, version: int, now: float, *, force: bool) -> "ServingPlan":
        """A push of `version` begins."""
        push = Push(id=self.next_id(now), version=version, force=force, started_at=now)
        return replace(self, push=push)

    def canary_opened(self, canary_id: int, now: float) -> "ServingPlan":
        """The servers of the canary have proved its version: new groups may go there."""
        canary = self.canary
        if canary is None or canary.id != canary_id or canary.state != "opening":
            return self
        return replace(self, canary=replace(canary, state="open", opened_at=now))

    def canary_closed(self, state: CanaryState, report: CanaryReport, now: float) -> "ServingPlan":
        """The canary has ended, if one is active. What its servers load next follows from the next push."""
        canary = self.active_canary
        if canary is None:
            return self
        return replace(self, canary=replace(canary, state=state, ended_at=now, report=report))

    def canary_ended(
        self, canary_id: int, state: CanaryState, report: CanaryReport, now: float
    ) -> "ServingPlan":
        """The canary has ended, and a push begins: of its version if it is promoted, else of the baseline.

        A version that is rolled back holds the fleet, unless every version passes through a canary.
        """
        canary = self.active_canary
        if canary is None or canary.id != canary_id:
            return self
        plan = self.canary_closed(state, report, now)
        if state == "promoted":
            return plan.begun(canary.version, now, force=True)
        if not canary.automatic:
            plan = replace(plan, hold=plan.hold or ServingHold(now, report.reason or "a canary ended"))
        return plan.begun(canary.baseline, now, force=True)

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
        self,
        push: int,
        state: PushState,
        now: float,
        *,
        error: str | None,
        capacity: float,
        refused: bool = False,
    ) -> "ServingPlan":
        """The push has ended, unless a newer one has begun. After a rollback, newer versions answer no
        calls."""
        if self.push is None or self.push.id != push or self.push.state != "pushing":
            return self
        ended = replace(self.push, state=state, ended_at=now, error=error, capacity=capacity, refused=refused)
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
