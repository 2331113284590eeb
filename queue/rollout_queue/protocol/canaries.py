"""Canaries and pins: operators ─▶ gateway, below `/admin/policies`."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rollout_queue.protocol.message import ServiceMessage


class GatesBody(ServiceMessage):
    """The bounds that a canary has to keep. What is not sent is as in `gateway.canary`. A bound of null is
    not looked at."""

    model_config = ConfigDict(extra="forbid")

    min_groups: int = Field(10, ge=3, le=5000)
    max_kl: float | None = Field(0.1, gt=0)
    max_reward_drop: float | None = Field(0.1, ge=0)
    max_error_increase: float | None = Field(0.05, ge=0, le=1)
    max_length_change: float | None = Field(0.5, gt=0)
    deadline_s: float = Field(3600.0, gt=0)


class CanaryBody(ServiceMessage):
    """Which calls a canary answers, and what it has to show; the defaults are `gateway.canary`."""

    model_config = ConfigDict(extra="forbid")

    share: float | None = Field(None, gt=0, lt=1)
    """The share of the new groups that it answers."""
    sticky: Literal["group", "session"] | None = None
    """What is never divided between two versions."""
    gates: GatesBody = GatesBody()


class PinBody(ServiceMessage):
    """The servers that keep a version: so many, or these ones."""

    model_config = ConfigDict(extra="forbid")

    servers: (
        Annotated[int, Field(ge=1, le=10_000)]
        | Annotated[list[Annotated[str, Field(max_length=200)]], Field(min_length=1, max_length=10_000)]
    ) = 1


class GateShape(ServiceMessage):
    """What one gate shows. `low` and `high` are the interval that has the true value 19 times of 20."""

    gate: str
    """kl, reward, errors or length."""
    state: str
    """holds, broken, undecided or missing."""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float
    count: int
    """How many groups the value is made of."""


class CanaryShape(ServiceMessage):
    """A canary, open or ended, with its numbers."""

    id: int
    version: int
    baseline: int
    state: str
    """opening, open, promoted, rolled_back or superseded."""
    servers: tuple[str, ...]
    share: float
    sticky: str
    automatic: bool
    started_at: float
    opened_at: float | None = None
    ended_at: float | None = None
    min_groups: int
    groups: int
    """How many of its groups have ended."""
    baseline_groups: int
    gates: tuple[GateShape, ...]
    reason: str | None = None
    """Why it ended."""


class CanaryPage(ServiceMessage):
    """The open canary, and the last ones that ended, the newest first."""

    data: tuple[CanaryShape, ...]
    next_cursor: str | None = None


class PinShape(ServiceMessage):
    """A server that keeps a version, for calls that name it."""

    server: str
    version: int
    since: float


class Pins(ServiceMessage):
    """All pins."""

    data: tuple[PinShape, ...]
    next_cursor: str | None = None
