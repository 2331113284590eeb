"""The trainer's metrics: counters and gauges for Prometheus, one point per step for every sink, and how many
seconds each phase of a step takes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollout_queue import clock
from rollout_queue.starting import show_spans
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.groups.evaluation import ENDS, EvaluationScore
from trainer_service.groups.tally import TASK_METRIC
from trainer_service.sinks import PointKind, Sink

logger = logging.getLogger(__name__)


class TrainerMetrics:
    """A metric such as `mismatch/abs_logp` is called `weir_trainer_mismatch_abs_logp` in Prometheus."""

    def __init__(self, registry: CollectorRegistry, sinks: Sequence[Sink] = ()) -> None:
        self._registry = registry
        show_spans(registry)
        self._sinks = sinks
        self._gauges: dict[str, Gauge] = {}
        self._steps = Counter("weir_trainer_steps", "Optimizer steps of this process", registry=registry)
        self._tokens = Counter("weir_trainer_tokens", "Tokens that this process trained", registry=registry)
        self._sessions = Counter(
            "weir_trainer_sessions",
            "Sessions that the trainer ended, by verdict",
            ["verdict"],
            registry=registry,
        )
        self._pushes = Counter(
            "weir_trainer_pushes",
            "Pushes of a version to a rollout server, by success (ok)",
            ["ok"],
            registry=registry,
        )
        self._refusals = Counter(
            "weir_trainer_disk_refusals", "Writes that the disk refused", ["what"], registry=registry
        )
        self._sink_failures = Counter(
            "weir_trainer_sink_failures", "Calls of a sink that failed", ["sink"], registry=registry
        )
        self._alarms = Counter("weir_trainer_guard_alarms", "Alarms of guards", ["guard"], registry=registry)
        self._recoveries = Counter(
            "weir_trainer_recoveries",
            "Times that the training went back to an older version",
            ["by"],
            registry=registry,
        )
        self._paused = Gauge("weir_trainer_paused", "1 while the training is paused", registry=registry)
        self._task_reward = Gauge(
            "weir_trainer_task_reward",
            "Mean reward of a task's sessions, of the last step that has some",
            ["task"],
            registry=registry,
        )
        self._reward = Gauge(
            "weir_trainer_eval_reward",
            "Mean reward of the evaluations of each of the 16 versions that were evaluated last",
            ["version"],
            registry=registry,
        )
        self._evaluated = Gauge(
            "weir_trainer_eval_sessions",
            "Evaluation sessions, by version and end: rewarded, unrewarded, failed",
            ["version", "end"],
            registry=registry,
        )

    def resume(self, step: int) -> None:
        """Tell every sink that the training continues after `step`."""
        self._each("resume", lambda sink: sink.resume(step))

    def close(self) -> None:
        self._each("end", lambda sink: sink.close())

    def stepped(self, values: Mapping[str, float]) -> None:
        self._steps.inc()
        self._tokens.inc(values["tokens"])
        for name, value in values.items():
            if name.startswith(TASK_METRIC):
                self._task_reward.labels(name.removeprefix(TASK_METRIC)).set(value)
            elif name not in ("tokens", "time"):
                self.gauge(name, value)
        self._write("step", values)

    def evaluated(self, score: EvaluationScore, step: int) -> None:
        """Write a version's evaluation score, which has changed. `step` made the version."""
        self.show_evaluations([score])
        place = {"step": step, "version": score.version, "time": clock.now()}
        self._write("evaluation", place | score.metrics())

    def show_evaluations(self, scores: Iterable[EvaluationScore]) -> None:
        for each in scores:
            version = str(each.version)
            for end in ENDS:
                self._evaluated.labels(version, end).set(getattr(each, end))
            if each.rewarded:
                self._reward.labels(version).set(each.reward)

    def forget_evaluations(self, versions: Iterable[int]) -> None:
        """Remove the series of old versions. Otherwise each version would add series for ever."""
        for version in map(str, versions):
            self._reward.remove(version)
            for end in ENDS:
                self._evaluated.remove(version, end)

    def acknowledged(self, acknowledgement: Acknowledgement) -> None:
        for verdict in acknowledgement.sessions.values():
            self._sessions.labels(verdict.code).inc()

    def pushed(self, ok: bool) -> None:
        self._pushes.labels(str(ok).lower()).inc()

    def disk_refused(self, what: str) -> None:
        self._refusals.labels(what).inc()

    def alarmed(self, guard: str) -> None:
        self._alarms.labels(guard).inc()

    def recovered(self, automatic: bool) -> None:
        self._recoveries.labels("guard" if automatic else "operator").inc()

    def paused(self, paused: bool) -> None:
        self._paused.set(paused)

    def gauge(self, name: str, value: float) -> None:
        if name not in self._gauges:
            exported = f"weir_trainer_{name.replace('/', '_')}"
            self._gauges[name] = Gauge(exported, f"{name} of the last step", registry=self._registry)
        self._gauges[name].set(value)

    def _write(self, kind: PointKind, values: Mapping[str, float]) -> None:
        self._each(f"write {kind} {values['step']:g}", lambda sink: sink.write(kind, values))

    def _each(self, action: str, call: Callable[[Sink], None]) -> None:
        """Call every sink. A failed call is counted and logged, and the training goes on."""
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as error:  # the sinks' libraries raise exceptions of many types
                self._sink_failures.labels(sink.name).inc()
                logger.warning("sink %s could not %s: %s", sink.name, action, error)


class Stopwatch:
    """Adds up seconds by phase until they are read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = clock.monotonic()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = clock.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + clock.monotonic() - started

    def laps(self, tokens: float) -> dict[str, float]:
        """Metrics since the last call: seconds by phase, and tokens per second of the phase `train`; and the
        seconds since the start, by which a restart is seen in a curve."""
        seconds, self._seconds = self._seconds, {}
        rate = tokens / seconds["train"] if seconds.get("train") else 0.0
        phases = {f"seconds/{phase}": value for phase, value in seconds.items()}
        return {"tokens_per_s": rate, "seconds/uptime": clock.monotonic() - self._began} | phases
