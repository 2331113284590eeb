"""The gateway's metrics, for Prometheus."""

import msgspec
from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.metrics.calls import SECONDS, CallFigures
from gateway.metrics.collector import CacheCollector, CallCollector, DistributionCollector
from gateway.metrics.deployment import DeploymentGauges
from gateway.metrics.distribution import Distribution
from gateway.metrics.fleet_figures import FleetCollector, PromptTokens
from rollout_queue.contract.records import Turn
from rollout_queue.signals.tracing.start import show_spans


class Traffic(msgspec.Struct):
    """What was recorded since the start."""

    turns: int = 0
    context_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(own + its for own, its in zip(astuple(self), astuple(other), strict=True)))


class Metrics:
    """One set of counters per application, so that tests do not share them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.deployment = DeploymentGauges(self.registry)
        show_spans(self.registry)
        self._define_turns()
        self._define_fleet()
        self._define_calls()
        self.tokens = PromptTokens()
        self.fleet = FleetCollector(self.tokens)
        self.registry.register(self.fleet)
        self.refusals = self._counter("weir_refusals_total", "Calls and sessions refused with 429", "code")
        self.forgotten = self._counter(
            "weir_sessions_forgotten_total",
            "Settled sessions forgotten, by reason: their age, or a Redis that fills up",
            "why",
        )
        self._rows = self._answers = 0
        self.traffic = Traffic()
        self._turns_of: dict[tuple[str, str], Counter] = {}
        """The counters of turns by relation and finish: `turns.labels()` costs more than the increment."""

    def _define_turns(self) -> None:
        self.turns = self._counter("weir_turns_total", "Turns recorded", "relation", "finish")
        self.drift = self._counter(
            "weir_drift_total",
            "Turns that do not extend the one before, by relation and reason",
            "relation",
            "reason",
        )
        self.merge_ratio = self._gauge(
            "weir_merge_ratio", "Training rows per turn since the start; 1 means a row for every turn"
        )
        self.merge_ratio.set_function(lambda: self._rows / self._answers if self._answers else float("nan"))
        self.context_tokens = self._counter(
            "weir_context_tokens_total", "Context tokens that turns added to their parent turns"
        )
        self.output_tokens = self._counter("weir_output_tokens_total", "Tokens sampled")
        self._turn_seconds = self._distribution(
            "weir_turn_seconds", "Seconds from the beginning of a generation to its last token"
        )
        self._record_seconds = self._distribution(
            "weir_record_seconds", "Seconds to append one turn to Redis"
        )

    def _define_fleet(self) -> None:
        self.serving_version = self._gauge(
            "weir_serving_version", "Policy version that the fleet should serve; -1 for none"
        )
        self.servers = self._gauge("weir_rollout_servers", "Rollout servers by state", "state")
        self.in_rotation = self._gauge(
            "weir_rollout_servers_in_rotation", "Rollout servers that can take a call now"
        )
        self.failovers = self._counter(
            "weir_engine_faults_total",
            "Generations that an engine failed to finish, by reason and outcome",
            "reason",
            "outcome",
        )
        self.breakers = self._gauge(
            "weir_breaker_open", "1 for a server that gets no calls because its recent ones failed", "server"
        )

    def _define_calls(self) -> None:
        self.calls: dict[str, CallFigures] = {}
        """By dialect. `of` adds the figures of a dialect at its first call."""
        self.registry.register(CallCollector(self.calls))
        self.loop_lag = self._distribution(
            "weir_loop_lag_seconds", "Seconds by which the event loop was late, sampled ten times a second"
        )
        caches = CacheCollector()
        self.caches = caches.caches
        """By name, the function that reads a cache's counts."""
        self.registry.register(caches)

    def of(self, dialect: str) -> CallFigures:
        """The figures of a dialect's calls."""
        return self.calls.setdefault(dialect, CallFigures(dialect))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _distribution(self, name: str, text: str) -> Distribution:
        found = Distribution(SECONDS)
        self.registry.register(DistributionCollector(name, text, found))
        return found

    def turn_recorded(self, turn: Turn, record_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """`prompt_tokens`: of the whole prompt; `cached_tokens`: those that the engine had in its cache."""
        self.tokens.prompt += prompt_tokens
        self.tokens.cached += cached_tokens
        kind = turn.relation, turn.finish
        if (counter := self._turns_of.get(kind)) is None:
            counter = self._turns_of[kind] = self.turns.labels(*kind)
        counter.inc()
        if turn.finish != "abort" and turn.orphan_of is None:
            self._answers += 1
            self._rows += turn.relation != "extends"
        if turn.reason is not None:
            self.drift.labels(turn.relation, turn.reason).inc()
        self.traffic.turns += 1
        self.traffic.context_tokens += len(turn.context_ids)
        self.traffic.output_tokens += len(turn.output_ids)
        self.context_tokens.inc(len(turn.context_ids))
        self.output_tokens.inc(len(turn.output_ids))
        self._turn_seconds.add(turn.finished_at - turn.started_at)
        self._record_seconds.add(record_s)
