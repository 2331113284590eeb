"""The metrics that Prometheus reads from the reward service."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_queue import clock

GRADING_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class RewardMetrics:
    """One registry per service, because tests run several services in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._runs = Counter(
            "weir_rewards_grader_runs",
            "Graders that ran for a request, by type and outcome: score, error",
            ["type", "outcome"],
            registry=self.registry,
        )
        self._run_seconds = Histogram(
            "weir_rewards_grader_run_seconds",
            "Time that a grader took for a request, by type",
            ["type"],
            buckets=GRADING_BUCKETS_S,
            registry=self.registry,
        )

        self._sessions = Counter(
            "weir_rewards_sessions",
            "Sessions that a rule took, by outcome; late: stored after the end; already: rewarded meanwhile",
            ["rule", "outcome"],
            registry=self.registry,
        )
        self._attempts = Counter(
            "weir_rewards_attempts",
            "Attempts to grade a session, by rule and outcome: answered, failed",
            ["rule", "outcome"],
            registry=self.registry,
        )
        self._attempt_seconds = Histogram(
            "weir_rewards_attempt_seconds",
            "Time of the attempts to grade a session",
            ["rule"],
            buckets=GRADING_BUCKETS_S,
            registry=self.registry,
        )
        self._readings = Counter(
            "weir_rewards_list_readings",
            "Readings of the gateway's list of sessions, by outcome: read, failed",
            ["outcome"],
            registry=self.registry,
        )

    def ran(self, type_: str, seconds: float, *, failed: bool) -> None:
        """A grader of this type ran for a request."""
        self._runs.labels(type_, "error" if failed else "score").inc()
        self._run_seconds.labels(type_).observe(seconds)

    def session(self, rule: str, outcome: str) -> None:
        """What became of a session that a rule took."""
        self._sessions.labels(rule, outcome).inc()

    @contextmanager
    def attempt(self, rule: str) -> Iterator[None]:
        """Measures one attempt to grade a session, and whether it failed."""
        started, outcome = clock.monotonic(), "failed"
        try:
            yield
            outcome = "answered"
        finally:
            self._attempts.labels(rule, outcome).inc()
            self._attempt_seconds.labels(rule).observe(clock.monotonic() - started)

    def read_list(self, *, failed: bool) -> None:
        """The gateway's list was read to its end, or could not be."""
        self._readings.labels("failed" if failed else "read").inc()

    def of_rules(
        self, name: str, help_text: str, rules: Iterable[str], value: Callable[[str], float]
    ) -> None:
        """A figure for each rule, which is read when Prometheus asks."""
        gauge = Gauge(f"weir_rewards_{name}", help_text, ["rule"], registry=self.registry)
        for rule in rules:
            gauge.labels(rule).set_function(partial(value, rule))

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A figure that is read when Prometheus asks."""
        Gauge(f"weir_rewards_{name}", help_text, registry=self.registry).set_function(value)
