"""The metrics that Prometheus reads from a rollout server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_queue.starting import show_spans
from rollout_server.engine.engine import Engine, ServerState
from rollout_server.errors import ReloadError

RELOAD_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class RolloutMetrics:
    """One registry per server, because tests run two servers in one process."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        show_spans(self.registry)
        self._gauge("engine_restarts", "Times that the engine was started again", lambda: engine.restarts)
        self._gauge("policy_version", "Version that the engine serves", lambda: engine.policy.version)
        states = Gauge(
            "weir_rollout_state", "1 for the state that the server is in", ["state"], registry=self.registry
        )
        for state in ServerState:
            states.labels(state.value).set_function(partial(_is_in, engine, state))
        self._reload_seconds = Histogram(
            "weir_rollout_reload_seconds",
            "Whole time of successful reloads",
            buckets=RELOAD_BUCKETS_S,
            registry=self.registry,
        )
        self._failures = Counter(
            "weir_rollout_reload_failures", "Reloads refused or failed", ["status"], registry=self.registry
        )
        self._paused_seconds = Counter(
            "weir_rollout_paused_seconds", "Time that generation stood still", registry=self.registry
        )

        self._released_seconds = Counter(
            "weir_rollout_released_seconds",
            "Time that a trainer had the engine's memory",
            registry=self.registry,
        )

    @contextmanager
    def reload(self) -> Iterator[None]:
        """Counts one reload if it fails."""
        try:
            yield
        except ReloadError as error:
            self._failures.labels(str(error.status)).inc()
            raise

    def loaded(self, whole_s: float, paused_s: float) -> None:
        self._reload_seconds.observe(whole_s)
        self._paused_seconds.inc(paused_s)

    def released(self, seconds: float) -> None:
        self._released_seconds.inc(seconds)

    def _gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        Gauge(f"weir_rollout_{name}", help_text, registry=self.registry).set_function(value)


def _is_in(engine: Engine, state: ServerState) -> float:
    return float(engine.state is state)
