"""What the gateway counts, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollout_queue.records import Turn

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One set of counters per application, so that tests do not share them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter(
            "weir_turns_total", "Turns recorded", ["relation", "finish"], registry=self.registry
        )
        self.context_tokens = Counter(
            "weir_context_tokens_total", "Tokens that turns added to their parents", registry=self.registry
        )
        self.output_tokens = Counter("weir_output_tokens_total", "Tokens sampled", registry=self.registry)
        self.turn_seconds = Histogram(
            "weir_turn_seconds", "From request to recorded turn", buckets=SECONDS, registry=self.registry
        )
        self.record_seconds = Histogram(
            "weir_record_seconds", "Append of one turn to Redis", buckets=SECONDS, registry=self.registry
        )
        self.serving_version = Gauge(
            "weir_serving_version", "Policy version the fleet is to serve", registry=self.registry
        )
        self.servers = Gauge(
            "weir_rollout_servers", "Rollout servers by state", ["state"], registry=self.registry
        )

    def turn_recorded(self, turn: Turn, record_s: float) -> None:
        self.turns.labels(turn.relation, turn.finish).inc()
        self.context_tokens.inc(len(turn.context_ids))
        self.output_tokens.inc(len(turn.output_ids))
        self.turn_seconds.observe(turn.finished_at - turn.started_at)
        self.record_seconds.observe(record_s)
