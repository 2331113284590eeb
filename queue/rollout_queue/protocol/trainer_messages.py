"""The trainer's report of itself: a Redis hash that gateways read, and its own `GET /status`.

trainer ── TrainerReport.fields ──▶ Redis ──▶ TrainerReport.of ── gateway ──▶ `GET /admin/status`
"""

import json
from collections.abc import Mapping
from typing import Self

from pydantic import ConfigDict, Field, JsonValue, ValidationError

from rollout_queue.protocol.message import ModelCheck, ServiceMessage

ROOM_ON_DISK = "room on the disk"
"""Begins what a trainer waits for whose disk is full."""
TEXTS = frozenset({"state", "waiting_for", "url", "source", "release"})
MOST_BUCKETS = 1000
"""The most points of one curve that `GET /learning` answers with."""
MOST_METRICS = 32
"""The most curves that one request reads."""
MOST_METRIC_NAMES = 2000
"""The most characters of their names."""

MOST_RECOVERIES = 8
"""The last recoveries that a report has."""
RECENT_S = 3600.0
"""So long after a recovery it is said to everybody who looks."""


class RestoreBody(ServiceMessage):
    """The version whose weights and optimizer the training goes back to."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = Field(ge=0)


class RecoveryReport(ServiceMessage):
    """One time that the training was set back to the weights of an older version."""

    version: int
    """The new number of the restored weights."""
    restored: int
    step: int
    """The last step that was made before."""
    reason: str
    automatic: bool
    """Whether a guard asked for it, and not an operator."""
    at: float
    """Unix time."""


class DiskRoom(ServiceMessage):
    """The room on the disk of the trainer's checkpoints."""

    free_bytes: int
    total_bytes: int


class TrainerReport(ServiceMessage):
    """The trainer's state. A field is None if the trainer has not reported it, or reports another type."""

    # extra="allow": the operator's page also shows fields that only a newer trainer knows.
    model_config = ConfigDict(extra="allow", json_schema_serialization_defaults_required=False)

    state: str | None = None
    """waiting, training, publishing or paused."""
    step: int | None = None
    version: int | None = None
    waiting_for: str | None = None
    last_seen: float | None = None
    """Unix time."""
    url: str | None = None
    """Where gateways reach the trainer's REST API."""
    source: str | None = None
    """What it learns from: `turns` or `commands`."""
    release: str | None = None
    """The release that it runs."""
    model_checks: tuple[ModelCheck, ...] | None = None
    """What it found out about the model when it started. Only its own `GET /status` says this."""
    max_row_tokens: int | None = None
    """Rollouts with longer rows are not trained."""
    metrics: Mapping[str, int | float | None] | None = None
    """Metrics of the last step and of the last evaluation."""
    refuses_training: bool | None = None
    """Whether new sessions for training are to be refused, because the training is paused."""
    rollouts_waiting: int | None = None
    """Sessions that have ended, and were not trained yet."""
    rollouts_owed: int | None = None
    """Sessions that were trained, and are in no checkpoint yet."""
    rollouts_per_step: float | None = None
    """Rewarded rollouts that a step uses up."""
    groups: int | None = None
    """Groups with two rewards or more that this process has read; the others cannot be compared."""
    groups_different: int | None = None
    """Those whose rewards differ. If they all are equal, most algorithms learn nothing from a group."""
    recoveries: list[RecoveryReport] | None = None
    """When the training was set back lately, the newest last."""
    disk: DiskRoom | None = None
    """The disk of its checkpoints."""

    def recent_recoveries(self, now: float) -> list[RecoveryReport]:
        """Those of the last hour, the newest last."""
        return [each for each in self.recoveries or () if now - each.at < RECENT_S]

    def fields(self) -> dict[str, str]:
        """The report as fields of a Redis hash: texts as they are, everything else as JSON."""
        given = self.model_dump(exclude_none=True)
        return {name: value if name in TEXTS else json.dumps(value) for name, value in given.items()}

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Self:
        """The report in a Redis hash, as `fields` wrote it; fields of another type are left out."""
        said = {name.decode(): _value(name.decode(), value.decode()) for name, value in fields.items()}
        try:
            return cls.model_validate(said)
        except ValidationError as error:
            wrong = {fault["loc"][0] for fault in error.errors(include_url=False)}
            return cls.model_validate({name: value for name, value in said.items() if name not in wrong})


def _value(name: str, text: str) -> JsonValue:
    if name in TEXTS:
        return text
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value
