"""What the trainer exports: one JSON line per step, and Prometheus gauges of the last one."""

import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from trainer_service.settlement import Settlement

logger = logging.getLogger(__name__)


class Metrics:
    """Writes both. A name like `mismatch/abs_logp` is `weir_trainer_mismatch_abs_logp` in Prometheus."""

    def __init__(self, registry: CollectorRegistry, path: Path | None) -> None:
        self._registry = registry
        self._path = path
        self._gauges: dict[str, Gauge] = {}
        self._steps = Counter("weir_trainer_steps", "Optimizer steps", registry=registry)
        self._tokens = Counter("weir_trainer_tokens", "Tokens trained", registry=registry)
        self._sessions = Counter(
            "weir_trainer_sessions", "Sessions that ended, by verdict", ["verdict"], registry=registry
        )
        self._pushes = Counter(
            "weir_trainer_pushes", "Servers that took a version, or did not", ["ok"], registry=registry
        )
        self._refusals = Counter(
            "weir_trainer_disk_refusals", "Writes that the disk refused", ["what"], registry=registry
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def stepped(self, values: Mapping[str, float]) -> None:
        self._steps.inc()
        self._tokens.inc(values["tokens"])
        for name, value in values.items():
            if name not in ("tokens", "time"):
                self.gauge(name, value)
        if self._path is not None:
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            try:
                _append(self._path, json.dumps(finite).encode() + b"\n")
            except OSError as error:  # a step is worth more than its line
                self.disk_refused("metrics")
                logger.warning("no line for step %g in %s: %s", values["step"], self._path, error)

    def settled(self, settlement: Settlement) -> None:
        for verdict in settlement.sessions.values():
            self._sessions.labels(verdict.code).inc()

    def pushed(self, ok: bool) -> None:
        self._pushes.labels(str(ok).lower()).inc()

    def disk_refused(self, what: str) -> None:
        self._refusals.labels(what).inc()

    def gauge(self, name: str, value: float) -> None:
        if name not in self._gauges:
            exported = f"weir_trainer_{name.replace('/', '_')}"
            self._gauges[name] = Gauge(exported, f"{name} of the last step", registry=self._registry)
        self._gauges[name].set(value)


def _append(path: Path, line: bytes) -> None:
    """The whole line or nothing of it: half a line would spoil the next one too. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(before)
            raise
