"""Watches the running system over REST, for the live view and for the plot."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rollout_queue import clock
from rollout_queue.http.callers import bearer
from rollout_queue.protocol.gateway_messages import SystemStatus
from rollout_queue.protocol.message import MalformedMessage
from rollout_queue.protocol.trainer_messages import TrainerReport

POLL_EVERY_S = 0.5


@dataclass
class Observation:
    """The last answer of `GET /admin/status`, and the metrics of each optimizer step."""

    status: SystemStatus | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    staleness_at: list[tuple[float, float]] = field(default_factory=list)
    """For each step: seconds since the episodes began, and the mean staleness of its tokens in versions."""

    @property
    def trainer(self) -> TrainerReport:
        return self.status.trainer if self.status else TrainerReport()

    @property
    def serving(self) -> int | None:
        return self.status.policy.serving if self.status else None

    @property
    def waiting_for(self) -> str:
        """What the system waits for: the gateway's first warning, else the trainer's own report."""
        warnings = self.status.warnings if self.status else ()
        return warnings[0] if warnings else self.trainer.waiting_for or "nothing"


class Observer:
    """Polls the gateway, and reads the trainer's metrics file as it grows."""

    def __init__(self, gateway_url: str, admin_key: str, metrics_path: Path) -> None:
        self.snapshot = Observation()
        self._gateway_url = gateway_url
        self._headers = bearer(admin_key)
        self._metrics_path = metrics_path
        self._read_bytes = 0

    async def watch(self) -> None:
        """Poll until cancelled. Failed requests are skipped."""
        began = clock.monotonic()
        async with httpx.AsyncClient(base_url=self._gateway_url, headers=self._headers) as rest:
            while True:
                with suppress(httpx.HTTPError, MalformedMessage):
                    reply = await rest.get("/admin/status", timeout=5)
                    self.snapshot.status = SystemStatus.read(reply.raise_for_status().content)
                for step in self._new_steps():
                    self.snapshot.steps.append(step)
                    staleness = (clock.monotonic() - began, float(step.get("staleness/total_mean", 0.0)))
                    self.snapshot.staleness_at.append(staleness)
                await clock.sleep(POLL_EVERY_S)

    def _new_steps(self) -> list[dict[str, Any]]:
        """The complete lines that the trainer wrote since the last call."""
        if not self._metrics_path.exists():
            return []
        with self._metrics_path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read_bytes += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]
