"""The gateway's metrics, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_queue.contract.records import Turn

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One set of counters per application, so that tests do not share them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter(
            "weir_turns_total", "Turns recorded", ["relation", "finish"], registry=self.registry
        )
        self.drift = Counter(
            "weir_drift_total",
            "Turns that do not extend the one before, by relation and reason",
            ["relation", "reason"],
            registry=self.registry,
        )
        self.merge_ratio = Gauge(
            "weir_merge_ratio",
            "Training rows per turn since the start; 1 means a row for every turn",
            registry=self.registry,
        )
        self.merge_ratio.set_function(lambda: self._rows / self._answers if self._answers else float("nan"))
        self._rows = self._answers = 0
        self._turns_of: dict[tuple[str, str], Counter] = {}
        self.context_tokens = Counter(
            "weir_context_tokens_total",
            "Context tokens that turns added to their parent turns",
            registry=self.registry,
        )
        self.output_tokens = Counter("weir_output_tokens_total", "Tokens sampled", registry=self.registry)
        self.turn_seconds = Histogram(
            "weir_turn_seconds",
            "Seconds from the beginning of a generation to its last token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.record_seconds = Histogram(
            "weir_record_seconds",
            "Seconds to append one turn to Redis",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refusals = Counter(
            "weir_refusals_total", "Calls and sessions refused with 429", ["code"], registry=self.registry
        )
        self.forgotten = Counter(
            "weir_sessions_forgotten_total",
            "Settled sessions forgotten, by reason: their age, or a Redis that fills up",
            ["why"],
            registry=self.registry,
        )
        self.serving_version = Gauge(
            "weir_serving_version",
            "Policy version that the fleet should serve; -1 for none",
            registry=self.registry,
        )
        self.servers = Gauge(
            "weir_rollout_servers", "Rollout servers by state", ["state"], registry=self.registry
        )
        self.failovers = Counter(
            "weir_engine_faults_total",
            "Generations that an engine failed to finish, by reason and outcome",
            ["reason", "outcome"],
            registry=self.registry,
        )
        self.breakers = Gauge(
            "weir_breaker_open",
            "1 for a server that gets no calls because its recent ones failed",
            ["server"],
            registry=self.registry,
        )

    def turn_recorded(self, turn: Turn, record_s: float) -> None:
        kind = turn.relation, turn.finish
        if (counter := self._turns_of.get(kind)) is None:
            counter = self._turns_of[kind] = self.turns.labels(*kind)
        counter.inc()
        if turn.finish != "abort" and turn.orphan_of is None:
            self._answers += 1
            self._rows += turn.relation != "extends"
        if turn.reason is not None:
            self.drift.labels(turn.relation, turn.reason).inc()
        self.context_tokens.inc(len(turn.context_ids))
        self.output_tokens.inc(len(turn.output_ids))
        self.turn_seconds.observe(turn.finished_at - turn.started_at)
        self.record_seconds.observe(record_s)
