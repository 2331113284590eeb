"""The `warnings` of `GET /admin/status`: what an operator should look into, in sentences.

Redis counts how sessions have ended. The monitor reads the counters at every poll and remembers earlier
values. So it knows how sessions ended recently, although it reads no session.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from redis.asyncio import Redis

from gateway.callers.backpressure import Backpressure
from gateway.policies.push import NOT_LOADED
from gateway.settings import LimitSettings, WarningSettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.serving_plan import Push, ServerPush, ServingPlan
from rollout_queue.protocol.conditions import (
    ENDINGS,
    INTENDED,
    ConditionFacts,
    counted,
    duration,
    warnings_of,
)
from rollout_queue.protocol.trainer_messages import TrainerReport
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

Counts = Counter[str]


class CountsAt(NamedTuple):
    """How many sessions had ended by a moment, by verdict."""

    at: float
    ends: Counts


class WarningMonitor:
    """Knows how sessions ended recently, since this gateway started."""

    def __init__(self, settings: WarningSettings, limits: LimitSettings, redis: Redis) -> None:
        self._settings, self._limits, self._redis = settings, limits, redis
        self._trainer = TrainerReport()
        """What it said at the last poll."""
        self._history: deque[CountsAt] = deque()
        self._progress: tuple[int, int | None] | None = None
        """How many sessions were trained, and the trainer's step, at the last poll."""
        self._stalled = CountsAt(clock.now(), Counter())
        """The counters when the trainer last made progress."""

    async def refresh(self) -> None:
        """Read the counters."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(key_names.VERDICTS)
                pipeline.hgetall(key_names.TRAINER)
                verdicts, trainer = await stored(pipeline.execute())
        except StorageUnavailable as error:
            logger.warning("the counters of verdicts cannot be read: %s", error)
            return
        ends: Counts = Counter()
        for name, number in verdicts.items():
            what, _, code = name.decode().partition(":")
            if what == "session" and code not in INTENDED:
                ends[code] = int(number)
        self._trainer = TrainerReport.of(trainer)
        self._note(CountsAt(clock.now(), ends), self._trainer.step)

    @property
    def notice(self) -> str | None:
        """What whoever plays episodes should know of the training; None if it goes on as usual."""
        paused = self._trainer.state == "paused"
        found = ["the training is paused"] if paused else []
        return "; ".join((*found, *_set_back(self._trainer, why=False))) or None

    def _note(self, now: CountsAt, step: int | None) -> None:
        before, self._progress = self._progress, (now.ends["trained"], step)
        # A lower count is not progress: it means that sessions were deleted.
        if before is None or step != before[1] or now.ends["trained"] > before[0]:
            self._stalled = now
        if not self._history or now.ends != self._history[-1].ends:
            self._history.append(now)
        recent = self._settings.recent_sessions
        while len(self._history) > 1 and _between(self._history[1], now).total() >= recent:
            self._history.popleft()

    def sentences(
        self, trainer: TrainerReport, pressure: Backpressure, dead: int, last_error: str | None
    ) -> Iterator[str]:
        """The warnings.

        `dead` is the number of dead letters, `last_error` the error of the last one.
        """
        facts = ConditionFacts(
            now=clock.now(),
            trainer=trainer,
            trainer_silent_s=self._settings.trainer_silent_s,
            dead_letters=dead,
            dead_letter_error=last_error,
            redis=pressure.redis,
        )
        yield from warnings_of(facts)
        yield from _set_back(trainer, why=True)
        if self._history:
            yield from self._stall_warnings(self._history[-1])
            yield from self._ending_warnings(_between(self._history[0], self._history[-1]))
        yield from self._queue_warnings(pressure)

    def _stall_warnings(self, now: CountsAt) -> Iterator[str]:
        quiet_s, ended = clock.now() - self._stalled.at, _between(self._stalled, now)
        if quiet_s > self._settings.nothing_trained_s and ended:
            how = ", ".join(f"{number} {code}" for code, number in ended.most_common())
            yield (
                f"nothing was trained for {duration(quiet_s)}, though {counted(ended.total(), 'session')} "
                f"ended: {how}"
            )

    def _ending_warnings(self, ends: Counts) -> Iterator[str]:
        settings, total = self._settings, ends.total()
        if total < max(1, settings.recent_sessions // 10):  # too few to warn about
            return
        untrained = ends - Counter(trained=ends["trained"])
        code, number = next(iter(untrained.most_common(1)), ("", 0))
        if untrained.total() >= settings.untrained_share * total:
            yield (
                f"of the last {counted(total, 'session')} to end, {untrained.total()} were not trained, "
                f"{number} of them {code}: {ENDINGS.get(code, 'see GET /sessions?verdict=' + code)}"
            )
            if code == "expired":
                return
        if ends["expired"] >= settings.expired_share * total:
            yield (
                f"of the last {counted(total, 'session')} to end, {ends['expired']} expired: "
                f"{ENDINGS['expired']}"
            )

    def _queue_warnings(self, pressure: Backpressure) -> Iterator[str]:
        limits, share = self._limits, self._settings.queue_share
        if limits.queue_entries is not None and pressure.entries >= share * limits.queue_entries:
            yield (
                f"{counted(pressure.entries, 'record is', 'records are')} in the stream; from "
                f"{limits.queue_entries} on (gateway.limits.queue_entries) new sessions are refused"
            )
        if pressure.max_bytes and not pressure.full and limits.queue_memory is not None:
            used = pressure.used_bytes / pressure.max_bytes
            if used >= share * limits.queue_memory:
                yield (
                    f"Redis has used {used:.0%} of its maxmemory; from {limits.queue_memory:.0%} on "
                    "(gateway.limits.queue_memory) new sessions are refused"
                )


def _set_back(trainer: TrainerReport, *, why: bool) -> Iterator[str]:
    """When the training was last set back, if that was within the last hour; `why` adds the reason, which may
    name other clients' tasks."""
    if recent := trainer.recent_recoveries(now := clock.now()):
        last, reason = recent[-1], f": {recent[-1].reason}" if why else ""
        often = f", {counted(len(recent), 'time')} within an hour" if len(recent) > 1 else ""
        yield (
            f"the training went back to version {last.restored} {duration(now - last.at)} ago{often}, after "
            f"step {last.step}, and goes on as version {last.version}{reason}"
        )


def failed_pushes(plan: ServingPlan, ended: Sequence[Push], servers: Iterable[ServerPush]) -> Iterator[str]:
    """What became of the last pushes, if the fleet has not what it should have. `ended` has the last pushes
    that ended, the newest first, and `servers` what each server did in the newest."""
    judged = (push for push in ended if push.state in ("serving", "failed"))
    failed = list(takewhile(lambda push: push.state == "failed", judged))
    if failed:
        refused = "was refused" if len(failed) == 1 else "were refused"
        how = refused if failed[0].refused else "failed"
        pushes = counted(len(failed), "push", "pushes")
        yield f"the last {pushes} {how}: {failed[0].error}; the fleet serves version {plan.serving}"
    elif plan.push is not None:
        yield from not_loaded(plan.push.version, servers)
    canary = plan.canary
    if canary is not None and canary.state == "rolled_back" and not failed:
        reason = canary.report.reason or ""
        if reason.startswith(NOT_LOADED):
            yield f"the canary of version {canary.version} was rolled back: {reason}"


def not_loaded(version: int, servers: Iterable[ServerPush]) -> Iterator[str]:
    """Which servers lack the version that they should have, and why. One that is away is not named here."""
    for each in servers:
        if each.state == "refused":
            yield f"server {each.server} refused version {version}: {each.error}"
        elif each.state == "failed":
            yield f"server {each.server} did not load version {version}: {each.error}; it is asked again"


def sessions_are_unknown(trainer: TrainerReport, verdicts: Mapping[str, int]) -> Iterator[str]:
    """Whether Redis has lost its data between the trainer's first step and the start of this gateway."""
    if trainer.step and not trainer.rollouts_owed and not verdicts:
        yield (
            f"the trainer is at step {trainer.step}, but Redis knows of no session that ever ended: it has "
            "lost its data, or the trainer belongs to another Redis"
        )


def _between(before: CountsAt, now: CountsAt) -> Counts:
    """How many sessions ended between the two moments. A counter that fell, because sessions were deleted or
    Redis was emptied, counts as 0."""
    return now.ends - before.ends
