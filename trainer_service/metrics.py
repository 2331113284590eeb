"""What the trainer exports: one JSON line per step, and Prometheus gauges of the last one."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from trainer_service.settlement import Settlement


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
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite) + "\n")

    def settled(self, settlement: Settlement) -> None:
        for verdict in settlement.sessions.values():
            self._sessions.labels(verdict.code).inc()

    def pushed(self, ok: bool) -> None:
        self._pushes.labels(str(ok).lower()).inc()

    def gauge(self, name: str, value: float) -> None:
        if name not in self._gauges:
            exported = f"weir_trainer_{name.replace('/', '_')}"
            self._gauges[name] = Gauge(exported, f"{name} of the last step", registry=self._registry)
        self._gauges[name].set(value)
