"""Watches the running system over its REST face: what the live view shows and the plot needs."""

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

POLL_EVERY_S = 0.5


@dataclass
class Snapshot:
    """The last answer of `GET /admin/status`, and what each optimizer step said."""

    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    staleness_at: list[tuple[float, float]] = field(default_factory=list)
    """Mean staleness of each step's tokens, in versions, by seconds since the episodes began."""

    @property
    def trainer(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status.get("trainer", {})
        return found

    @property
    def serving(self) -> int | None:
        version: int | None = self.status.get("policy", {}).get("serving")
        return version

    @property
    def waiting_for(self) -> str:
        """What the system waits for, in the trainer's words or the gateway's."""
        warnings = self.status.get("warnings") or []
        return str(warnings[0] if warnings else self.trainer.get("waiting_for") or "nothing")


class Observer:
    """Polls the gateway, and reads the trainer's steps as they are written."""

    def __init__(self, gateway_url: str, admin_key: str, metrics_path: Path) -> None:
        self.snapshot = Snapshot()
        self._gateway_url = gateway_url
        self._headers = {"authorization": f"Bearer {admin_key}"}
        self._metrics_path = metrics_path
        self._read_bytes = 0

    async def watch(self) -> None:
        """Poll until cancelled; a gateway that is busy is asked again later."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self._gateway_url, headers=self._headers) as rest:
            while True:
                with suppress(httpx.HTTPError, ValueError):
                    reply = await rest.get("/admin/status", timeout=5)
                    reply.raise_for_status()
                    self.snapshot.status = reply.json()
                for step in self._new_steps():
                    self.snapshot.steps.append(step)
                    staleness = (time.monotonic() - began, float(step.get("staleness/total_mean", 0.0)))
                    self.snapshot.staleness_at.append(staleness)
                await asyncio.sleep(POLL_EVERY_S)

    def _new_steps(self) -> list[dict[str, Any]]:
        """The complete lines that the trainer wrote since the last look."""
        if not self._metrics_path.exists():
            return []
        with self._metrics_path.open("rb") as file:
            file.seek(self._read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
        if whole:
            self._read_bytes += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]
