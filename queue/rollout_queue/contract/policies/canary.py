"""A canary: a version that answers a share of the new groups, until its gates say whether it is served.

new group ── hash ──▶ canary     a few servers, with the version that is tried ┐
                 └──▶ baseline   the other ones, with the served version       ┴─▶ gates ─▶ promoted
                                                                                       └──▶ rolled back
"""

import hashlib
from typing import Literal

import msgspec

Arm = Literal["canary", "baseline"]
Sticky = Literal["group", "session"]
CanaryState = Literal["opening", "open", "promoted", "rolled_back", "superseded"]
GateName = Literal["kl", "reward", "errors", "length"]
ReadingState = Literal["holds", "broken", "undecided", "missing"]
"""`undecided`: there are too few numbers yet; `missing`: there are none."""


class CanaryGates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds that a version has to keep. A bound of None is not looked at."""

    min_groups: int = 10
    """How many groups have to end before the version can be promoted."""
    max_kl: float | None = 0.1
    """The mean KL divergence from the served version, in nats a token."""
    max_reward_drop: float | None = 0.1
    """How much lower the mean reward may be."""
    max_error_increase: float | None = 0.05
    """How much higher the share of failed calls may be."""
    max_length_change: float | None = 0.5
    """By which factor, above 1, answers may become longer or shorter."""
    deadline_s: float = 3600.0
    """How long it may take to load, and then be open. Then it is rolled back."""


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
