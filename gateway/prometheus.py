"""The gateway's metrics in Prometheus' form: their names and help, and how the counters get there.

The gauges of what all gateways share have the values of the last poll. Every gateway, and every worker of it,
shows the same ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.counters import SECONDS, CacheLookups, CallFigures, Distribution, FleetFigures, PromptTokens
from gateway.errors import LimitReached
from rollout_queue.contract.records import Turn
from rollout_queue.starting import show_spans


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
        self.refusals = self._counter("weir_refusals_total", "Requests that a limit refused with 429", "code")
        self.forgotten = self._counter(
            "weir_sessions_forgotten_total",
            "Sessions removed after their verdict, by why: their age, or because Redis lacks memory",
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
            "weir_record_seconds", "Seconds of the append to Redis that follows a generation"
        )

    def _define_fleet(self) -> None:
        self.serving_version = self._gauge(
            "weir_serving_version", "The newest version that a server has proved; -1 for none"
        )
        self.servers = self._gauge("weir_rollout_servers", "Rollout servers by state", "state")
        self.in_rotation = self._gauge(
            "weir_rollout_servers_in_rotation", "Rollout servers that can take a call now"
        )
        self.failovers = self._counter(
            "weir_engine_faults_total",
            "Answers that an engine did not finish, by reason and outcome: retried, or given_up",
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

    def refused(self, refusal: LimitReached) -> LimitReached:
        """Count a refusal, which the caller raises."""
        self.refusals.labels(refusal.code).inc()
        return refusal

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


TRAINER_STATES: Final = ("waiting", "training", "publishing", "paused")
PUSH_STATES: Final = ("pushing", "serving", "failed", "superseded")
NOTHING: Final = float("nan")
"""The value of a gauge as long as nothing is known: Prometheus' comparisons leave it out."""


class DeploymentGauges:
    """Redis, the queue, the trainer's report, the last push."""

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
            "weir_sessions_unfinished", "Sessions without a verdict, which may still expire"
        )
        self.waiting = self._gauge("weir_rollouts_waiting", "Rollouts that have ended and wait for a step")
        self.owed = self._gauge("weir_rollouts_owed", "Rollouts that were trained and are in no checkpoint")
        self.per_step = self._gauge("weir_rollouts_per_step", "Rollouts that a step uses up")
        self.trained_version = self._gauge("weir_trained_version", "The trainer's newest version")
        self.trainer_seen = self._gauge(
            "weir_trainer_seen_timestamp_seconds", "When the trainer last reported, since 1970"
        )
        self._trainer = self._states("weir_trainer_state", "1 for the state of the trainer", TRAINER_STATES)
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


class CallCollector(Collector):
    """The figures of calls, by dialect."""

    def __init__(self, figures: Mapping[str, CallFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "weir_http_responses", "Responses, by dialect and HTTP status", labels=("dialect", "status")
        )
        in_flight = GaugeMetricFamily("weir_calls_in_flight", "Calls in flight", labels=["dialect"])
        ignoring = CounterMetricFamily(
            "weir_calls_with_ignored_fields",
            "Calls with fields that the gateway does not know",
            labels=["dialect"],
        )
        joined = CounterMetricFamily(
            "weir_joined_calls", "Calls that joined a call in flight, which they repeat", labels=["dialect"]
        )
        first = _histogram("weir_first_token_seconds", "Seconds from a stream's headers to its first token")
        gaps = _histogram("weir_token_gap_seconds", "Seconds between two events with tokens of a stream")
        wait = _histogram("weir_engine_wait_seconds", "Seconds until an engine accepted a call, or none did")
        parts = SummaryMetricFamily(
            "weir_part_seconds", "Seconds that each part of the calls took", labels=("dialect", "part")
        )
        for dialect, each in self._figures.items():
            for status, count in sorted(each.statuses.items()):
                responses.add_metric((dialect, str(status)), count)
            in_flight.add_metric([dialect], each.in_flight)
            ignoring.add_metric([dialect], each.ignoring)
            joined.add_metric([dialect], each.joined)
            for family, found in ((first, each.first_token), (gaps, each.gaps), (wait, each.engine_wait)):
                _add(family, found, dialect)
            for part, spent in each.parts.items():
                parts.add_metric((dialect, part), spent.runs, spent.seconds)
        yield from (responses, in_flight, ignoring, joined, first, gaps, wait, parts)


class DistributionCollector(Collector):
    """One histogram without labels."""

    def __init__(self, name: str, text: str, found: Distribution) -> None:
        self._name, self._text, self._distribution = name, text, found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=())
        _add(family, self._distribution)
        yield family


class CacheCollector(Collector):
    """The hits and misses of caches, by the cache's name."""

    def __init__(self) -> None:
        self.caches: dict[str, Callable[[], CacheLookups]] = {}

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "weir_cache_lookups", "Lookups in caches, by result", labels=("cache", "result")
        )
        for name, read in self.caches.items():
            hits, misses = read()
            lookups.add_metric((name, "hit"), hits)
            lookups.add_metric((name, "miss"), misses)
        yield lookups


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=["dialect"])


def _add(family: HistogramMetricFamily, found: Distribution, *labels: str) -> None:
    bounds = [*map(floatToGoString, found.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, found.cumulative(), strict=True)), found.total)


class FleetCollector(Collector):
    """Gives Prometheus the figures of the fleet. `read` is None until there is a fleet."""

    def __init__(self, tokens: PromptTokens) -> None:
        self.read: Callable[[], FleetFigures] | None = None
        self._tokens = tokens

    def collect(self) -> Iterator[Metric]:
        yield _counter("weir_prompt_tokens", "Tokens of the prompts of recorded turns", self._tokens.prompt)
        text = "Tokens of these prompts that the engine had in its cache"
        yield _counter("weir_cached_prompt_tokens", text, self._tokens.cached)
        if self.read is None:
            return
        found = self.read()
        placed = CounterMetricFamily(
            "weir_placements", "Calls sent to a server, by reason", labels=["reason"]
        )
        for reason, count in sorted(found.placed.items()):
            placed.add_metric([reason], count)
        yield placed
        yield _gauge("weir_calls_waiting", "Calls that wait for a server in this gateway", found.waiting)
        yield _gauge("weir_engine_running", "Requests that run in the ready engines", found.running)
        yield _gauge("weir_engine_queued", "Requests that wait in the ready engines", found.queued)
        if found.kv_usage is not None:
            text = "Mean share of the ready engines' key-value caches in use; absent if none says it"
            yield _gauge("weir_engine_kv_usage", text, found.kv_usage)
        if found.limit is not None:
            yield _gauge("weir_engine_limit", "Sum of the ready servers' limits of calls", found.limit)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
