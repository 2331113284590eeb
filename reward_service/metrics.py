"""The metrics that Prometheus reads from the reward service."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

GRADING_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class RewardMetrics:
    """One registry per service, because tests run several services in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._runs = Counter(
            "weir_rewards_grader_runs",
            "Graders that ran for a request, by type and whether they gave a score",
            ["type", "outcome"],
            registry=self.registry,
        )
        self._run_seconds = Histogram(
            "weir_rewards_grader_run_seconds",
            "Time that a grader took for a request",
            ["type"],
            buckets=GRADING_BUCKETS_S,
            registry=self.registry,
        )

    def ran(self, type_: str, seconds: float, *, failed: bool) -> None:
        """A grader of this type ran for a request."""
        self._runs.labels(type_, "error" if failed else "score").inc()
        self._run_seconds.labels(type_).observe(seconds)

    def gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A figure that is read when Prometheus asks."""
        Gauge(f"weir_rewards_{name}", help_text, registry=self.registry).set_function(value)
