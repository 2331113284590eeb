"""Gauges of the state that all gateways share: Redis, the queue, the trainer's report, the last push.

They have the values of the last poll. Every gateway, and every worker of it, shows the same ones.
"""

from collections.abc import Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

TRAINER_STATES: Final = ("waiting", "training", "publishing", "paused")
PUSH_STATES: Final = ("pushing", "serving", "failed", "superseded")
NOTHING: Final = float("nan")
"""The value of a gauge as long as nothing is known: Prometheus' comparisons leave it out."""


class DeploymentGauges:
    """Values of `nan` mean that nothing is known yet."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.redis_up = self._gauge("weir_redis_up", "1 if Redis answered at the last poll, else 0")
        self.used_bytes = self._gauge("weir_redis_used_bytes", "Memory that Redis uses")
        self.max_bytes = self._gauge("weir_redis_max_bytes", "Redis' maxmemory; 0 for none")
        self.evicted = self._gauge("weir_redis_evicted_keys", "Keys that Redis has evicted since it started")
        self.evicts = self._gauge("weir_redis_evicts", "1 if a full Redis would evict keys, else 0")
        self.entries = self._gauge("weir_queue_entries", "Records in the stream for the trainer")
        self.dead_letters = self._gauge("weir_queue_dead_letters", "Records that the trainer could not read")
        self.unfinished = self._gauge(
            "weir_sessions_unfinished", "Sessions without an outcome or without a reward"
        )
        self.waiting = self._gauge("weir_rollouts_waiting", "Rollouts that have ended and wait for a step")
        self.owed = self._gauge("weir_rollouts_owed", "Rollouts that were trained and are in no checkpoint")
        self.per_step = self._gauge("weir_rollouts_per_step", "Rollouts that a step uses up")
        self.trained_version = self._gauge("weir_trained_version", "The trainer's newest version")
        self.trainer_seen = self._gauge(
            "weir_trainer_seen_timestamp_seconds", "When the trainer last reported, since 1970"
        )
        self._trainer = self._states("weir_trainer_state", "1 for the trainer's state", TRAINER_STATES)
        self._push = self._states("weir_push_state", "1 for the state of the last push", PUSH_STATES)
        self.push_version = self._gauge("weir_push_version", "The version of the last push")
        self.held = self._gauge("weir_versions_held", "1 while the fleet keeps its version")

    def trainer_is(self, state: str | None) -> None:
        self._show(self._trainer, TRAINER_STATES, state)

    def push_is(self, state: str | None) -> None:
        self._show(self._push, PUSH_STATES, state)

    def _show(self, gauge: Gauge, states: Sequence[str], state: str | None) -> None:
        for each in states:
            gauge.labels(each).set(each == state)

    def _states(self, name: str, text: str, states: Sequence[str]) -> Gauge:
        gauge = Gauge(name, text, ["state"], registry=self._registry)
        self._show(gauge, states, None)
        return gauge

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, registry=self._registry)
        gauge.set(NOTHING)
        return gauge
