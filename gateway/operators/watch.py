"""What an operator should worry about, in sentences: the `warnings` of `GET /admin/status`.

Redis counts how sessions end, ever since. This remembers what the counters said before, so that it can tell
how they end lately; it reads them with every poll, and looks at no session.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from redis.asyncio import Redis

from gateway.admission.pressure import Pressure
from gateway.operators.words import count, span
from gateway.settings import LimitSettings, WarningSettings
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.protocol.trainer import TrainerReport
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

INTENDED = ("not_for_training", "deleted")
"""Ends that nobody worries about."""
REASONS = {
    "stale": "sampled by versions too far behind the trainer's",
    "zero_advantage": "all rewards of their groups are equal, or they are alone",
    "truncated": "cut off, and algorithm.shaping.truncated is mask",
    "failed": "their clients finished them so",
    "abandoned": "their clients finished them so",
    "expired": "nobody finished and rewarded them in time",
    "invalid": "their records cannot be trained; GET /sessions?verdict=invalid says why",
    "group_incomplete": "their groups were trained without them",
}

Counts = Counter[str]


class Seen(NamedTuple):
    """How many sessions had ended how, and when that was."""

    at: float
    ends: Counts


class Watch:
    """Knows how sessions ended lately, as far back as this gateway runs."""

    def __init__(self, settings: WarningSettings, limits: LimitSettings, redis: Redis) -> None:
        self._settings, self._limits, self._redis = settings, limits, redis
        self._seen: deque[Seen] = deque()
        self._progress: tuple[int, bytes | None] | None = None
        """How many sessions were trained, and the trainer's step, when either last changed."""
        self._stalled = Seen(time.time(), Counter())
        """What was counted at that time."""

    async def refresh(self) -> None:
        """Read the counters."""
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(keys.VERDICTS)
                pipeline.hget(keys.TRAINER, "step")
                counted, step = await stored(pipeline.execute())
        except StorageUnavailable as error:
            logger.warning("the counters of verdicts cannot be read: %s", error)
            return
        ends: Counts = Counter()
        for name, number in counted.items():
            what, _, code = name.decode().partition(":")
            if what == "session" and code not in INTENDED:
                ends[code] = int(number)
        self._note(Seen(time.time(), ends), step)

    def _note(self, seen: Seen, step: bytes | None) -> None:
        before, self._progress = self._progress, (seen.ends["trained"], step)
        # Fewer than before: some were deleted, which is no progress.
        if before is None or step != before[1] or seen.ends["trained"] > before[0]:
            self._stalled = seen
        if not self._seen or seen.ends != self._seen[-1].ends:
            self._seen.append(seen)
        while len(self._seen) > 1 and _between(self._seen[1], seen).total() >= self._settings.recent_sessions:
            self._seen.popleft()

    def warnings(
        self, trainer: TrainerReport, pressure: Pressure, dead: int, last_error: str | None
    ) -> Iterator[str]:
        """`trainer` is what that said of itself; `dead` and `last_error` are of the dead letters."""
        yield from self._of_the_trainer(trainer)
        if self._seen:
            yield from self._of_silence(self._seen[-1])
            yield from self._of_ends(_between(self._seen[0], self._seen[-1]))
        yield from self._of_the_queue(pressure)
        if dead:
            yield (
                f"{count(dead, 'record')} that this build cannot read, in {keys.DEAD_LETTERS}; of the last: "
                f"{last_error}"
            )

    def _of_the_trainer(self, trainer: TrainerReport) -> Iterator[str]:
        if trainer.last_seen is None:
            yield "no trainer has reported yet"
        elif (silent_s := time.time() - trainer.last_seen) > self._settings.trainer_silent_s:
            yield f"the trainer has been silent for {silent_s:.0f} s"
        elif trainer.state == "paused":
            yield f"the trainer is paused and waits for {trainer.waiting_for}"

    def _of_silence(self, now: Seen) -> Iterator[str]:
        quiet_s, ended = time.time() - self._stalled.at, _between(self._stalled, now)
        if quiet_s > self._settings.nothing_trained_s and ended:
            how = ", ".join(f"{number} {code}" for code, number in ended.most_common())
            yield (
                f"nothing was trained for {span(quiet_s)}, though {count(ended.total(), 'session')} ended: "
                f"{how}"
            )

    def _of_ends(self, ends: Counts) -> Iterator[str]:
        settings, total = self._settings, ends.total()
        if total < max(1, settings.recent_sessions // 10):  # too few to say anything
            return
        untrained = ends - Counter(trained=ends["trained"])
        code, number = next(iter(untrained.most_common(1)), ("", 0))
        if untrained.total() >= settings.untrained_share * total:
            yield (
                f"of the last {count(total, 'session')} to end, {untrained.total()} were not trained, "
                f"{number} of them {code}: {REASONS.get(code, 'see GET /sessions?verdict=' + code)}"
            )
            if code == "expired":
                return
        if ends["expired"] >= settings.expired_share * total:
            yield (
                f"of the last {count(total, 'session')} to end, {ends['expired']} expired: "
                f"{REASONS['expired']}"
            )

    def _of_the_queue(self, pressure: Pressure) -> Iterator[str]:
        limits, share = self._limits, self._settings.queue_share
        if limits.queue_entries is not None and pressure.entries >= share * limits.queue_entries:
            yield (
                f"{count(pressure.entries, 'record')} in the stream; from {limits.queue_entries} on "
                "(gateway.limits.queue_entries) new sessions are refused"
            )
        if limits.queue_memory is not None and pressure.max_bytes:
            full = pressure.used_bytes / pressure.max_bytes
            if full >= share * limits.queue_memory:
                yield (
                    f"Redis has used {full:.0%} of its maxmemory; from {limits.queue_memory:.0%} on "
                    "(gateway.limits.queue_memory) new sessions are refused"
                )


def _between(before: Seen, now: Seen) -> Counts:
    """What ended between the two. Without what was counted less: it was deleted, or Redis was emptied."""
    return now.ends - before.ends
