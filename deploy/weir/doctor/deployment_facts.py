"""What `weir doctor` has read of a deployment, as frozen values without any judgement, and what one check
makes of it: a problem with its severity, its sentence and its advice.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_queue.contract.published_policy import Manifest
from rollout_queue.protocol.conditions import Problem, Severity
from rollout_queue.protocol.gateway_messages import ServerStatus, SystemStatus
from rollout_queue.protocol.trainer_messages import TrainerReport

MOST_APART_S = 2.0
"""Clocks may differ by this much; docs/reliability.md says what a larger difference changes."""
Kind = Literal["gateway", "rollout_server", "trainer", "rewards"]


@dataclass(frozen=True, kw_only=True)
class ServiceFacts:
    """What one service answered to `/ready` and to its report, which needs the admin key."""

    kind: Kind
    name: str
    url: str
    silent: str | None = None
    """Why it did not answer at all; None if it did."""
    unready: str | None = None
    """Why it cannot do its work; None if it can, or if it is silent."""
    key_refused: bool = False
    report_failed: str | None = None
    """Why it gives no report, though it answers."""
    report_unreadable: str | None = None
    """Why this build cannot read its report."""
    body: bytes = b""
    """Its report."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of this machine's, by the header `Date`, to half a second."""


@dataclass(frozen=True, kw_only=True)
class RedisFacts:
    """What Redis said of itself and of the training."""

    address: str
    silent: str | None = None
    refused: str | None = None
    """Why it refuses the doctor, if it is silent for that."""
    info: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] | None = None
    """`CONFIG GET *`; None if this Redis does not allow it."""
    has_password: bool = False
    """Whether the doctor gave a password or a user."""
    clock_ahead_s: float | None = None
    trainer: TrainerReport = field(default_factory=TrainerReport)
    verdicts: Mapping[str, int] = field(default_factory=dict)
    settled_at: float | None = None
    """The time of the last verdict, in Unix seconds."""
    waiting: int = 0
    """The length of the stream."""
    dead_letters: int = 0
    losses: tuple[str, ...] = ()
    """What gateways and the trainer have noted in the last day that Redis lost."""
    policies: int = 0
    newest_policy_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """A directory of the deployment on a disk of this machine."""

    setting: str
    path: str
    exists: bool
    free_bytes: int = 0
    largest_part_bytes: int = 0
    """The bytes of the largest checkpoint, or version, in it."""
    parts: int = 0


@dataclass(frozen=True, kw_only=True)
class LogFacts:
    """The last error in the log of a service."""

    service: str
    path: str
    line: str


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What this machine has of the deployment."""

    disks: tuple[DiskFacts, ...] = ()
    memory_bytes: int = 0
    """What processes here may use: the machine's memory, or the limit of this control group."""
    memory_free_bytes: int = 0
    models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By section, the SHA-256 of the model's files that gateway, engine and trainer must agree on."""
    errors: tuple[LogFacts, ...] = ()
    ended: tuple[str, ...] = ()
    """Services of `weir up` whose process has ended."""
    parent_ended: bool = False
    """Whether the process that restarts services has ended."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    failed: str | None = None
    """Why the machine could not be examined."""


Settings = Mapping[str, Mapping[str, Any]]
"""The settings of the services as far as they are known here: by section, by name."""


@dataclass(frozen=True, kw_only=True)
class DeploymentFacts:
    """Everything that the checks look at."""

    gateway: ServiceFacts
    redis: RedisFacts
    system: SystemStatus | None = None
    """The gateway's report; None if there is none."""
    servers: tuple[tuple[ServiceFacts, ServerStatus | None], ...] = ()
    trainer: ServiceFacts | None = None
    """None if no trainer has reported its address."""
    others: tuple[ServiceFacts, ...] = ()
    """Further services of `weir up`."""
    manifest: Manifest | None = None
    """That of the newest version on the trainer's disk."""
    public: ServiceFacts | None = None
    """The gateway at the address that agents use, if the settings name one."""
    machine: MachineFacts = MachineFacts()
    settings: Settings = field(default_factory=dict)
    now: float = 0.0

    @property
    def services(self) -> tuple[ServiceFacts, ...]:
        """Every service that was asked."""
        trainer = () if self.trainer is None else (self.trainer,)
        return (self.gateway, *(service for service, _ in self.servers), *trainer, *self.others)

    @property
    def report(self) -> TrainerReport:
        """The trainer's report: the gateway's copy, or the one in Redis."""
        return self.redis.trainer if self.system is None else self.system.trainer

    def setting(self, section: str, name: str) -> Any:
        """A setting of a service; None if it is not known here."""
        return self.settings.get(section, {}).get(name)


Found = Iterator[tuple[Severity, str, str]]
"""How bad it is, what is wrong, and what to do."""
Check = Callable[[DeploymentFacts], Found]


def problems_of(check: Check, facts: DeploymentFacts) -> list[Problem]:
    """What the check finds, under the name of its function."""
    return [Problem(check.__name__, *found) for found in check(facts)]
