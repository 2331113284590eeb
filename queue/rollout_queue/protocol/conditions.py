"""Conditions of training and Redis that operators are told of, each here once, with its bound and sentence.

The gateway's `warnings.trainer_silent_s` may set another bound for its warnings.

ConditionFacts ─▶ CONDITIONS ─▶ Problem: check, severity, sentence, advice
                      ├─▶ `warnings` of `GET /admin/status`, in the form that `in_warnings` says; the page
                      ├─▶ `weir doctor`; `weir status` and `weir top` show the warnings
                      └─▶ deploy/observe/prometheus/rules.yml, whose bounds a test compares
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rollout_queue.protocol.trainer_messages import ROOM_ON_DISK, TrainerReport

TRAINER_SILENT_S = 60.0
"""A trainer that has not reported for so long reads nothing any more, whatever its last state was."""
NOTHING_TRAINED_S = 1800.0
REDIS_NEARLY_FULL = 0.8
DISK_LEAST_FREE_SHARE = 0.05
DISK_LEAST_FREE_BYTES = 2 * 2**30
NO_EVICTION = "noeviction"
INTENDED = frozenset({"not_for_training", "deleted"})
"""Endings of sessions that are not trained, and need not be."""
ENDINGS = {
    "stale": "they were sampled by versions too far behind the trainer's",
    "skipped_for_newer": "more sessions ended than the trainer can train, and newer ones were trained",
    "too_long": "they have more tokens than algorithm.max_row_tokens, or than the trainer's memory holds",
    "zero_advantage": "all rewards of their groups are equal, or their groups have one member",
    "truncated": "they were cut off, and algorithm.shaping.truncated is mask",
    "failed": "their clients finished them with this status",
    "abandoned": "their clients finished them with this status",
    "expired": "nobody finished and rewarded them in time",
    "invalid": "their records cannot be trained; GET /sessions?verdict=invalid says why",
    "group_incomplete": "their groups were trained without them",
}
"""Why sessions with this verdict were not trained."""

Severity = Literal["error", "warning"]
"""error: something does not work, or a promise does not hold. warning: an operator should know of it."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 session`, `12 sessions`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A length of time, rounded to one unit: `40 s`, `4 min`, `3 h`, `2 days`."""
    seconds = max(0.0, seconds)
    for unit_s, name, until in ((1, "s", 100), (60, "min", 100), (3600, "h", 48)):
        if seconds < unit_s * until:
            return f"{seconds / unit_s:.0f} {name}"
    return counted(round(seconds / 86400), "day")


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with a deployment."""

    check: str
    """The name of the check or condition, such as `redis_syncs_late`."""
    severity: Severity
    sentence: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class RedisUse:
    """What Redis has of memory, and what it does when it is full."""

    used_bytes: int = 0
    max_bytes: int = 0
    """0 for a Redis without `maxmemory`."""
    full: bool = False
    """Whether it refuses writes for want of memory."""
    evicted: int = 0
    """How many keys it has removed for want of memory since it started."""
    eviction: str = NO_EVICTION
    """Its maxmemory-policy."""


@dataclass(frozen=True, kw_only=True)
class ConditionFacts:
    """What the conditions look at. What is None is not known, and no condition of it holds."""

    now: float
    trainer: TrainerReport | None = None
    trainer_silent_s: float = TRAINER_SILENT_S
    dead_letters: int = 0
    dead_letter_error: str | None = None
    """The error of the last one, if it is known."""
    redis: RedisUse | None = None


def trainer_missing(facts: ConditionFacts) -> str | None:
    missing = facts.trainer is not None and facts.trainer.last_seen is None
    return "no trainer has reported yet" if missing else None


def trainer_silent(facts: ConditionFacts) -> str | None:
    if facts.trainer is None or facts.trainer.last_seen is None:
        return None
    silent_s = facts.now - facts.trainer.last_seen
    if silent_s <= facts.trainer_silent_s:
        return None
    last = f"; it waited for {facts.trainer.waiting_for}" if facts.trainer.waiting_for else ""
    return f"the trainer has been silent for {silent_s:.0f} s{last}"


def trainer_paused(facts: ConditionFacts) -> str | None:
    if facts.trainer is None or facts.trainer.state != "paused" or _is_away(facts):
        return None
    return f"the trainer is paused and waits for {facts.trainer.waiting_for}"


def trainer_lacks_room(facts: ConditionFacts) -> str | None:
    if facts.trainer is None or facts.trainer.state == "paused":
        return None
    waits = ROOM_ON_DISK in (facts.trainer.waiting_for or "")
    return f"the trainer waits for {facts.trainer.waiting_for}" if waits else None


def disk_nearly_full(facts: ConditionFacts) -> str | None:
    disk = facts.trainer.disk if facts.trainer is not None else None
    if disk is None or _is_away(facts) or trainer_lacks_room(facts):
        return None
    if disk.free_bytes >= max(DISK_LEAST_FREE_BYTES, DISK_LEAST_FREE_SHARE * disk.total_bytes):
        return None
    return (
        f"the disk of the trainer's checkpoints is nearly full: {disk.free_bytes / 2**30:.1f} of "
        f"{disk.total_bytes / 2**30:.1f} GiB are free"
    )


def _is_away(facts: ConditionFacts) -> bool:
    return bool(trainer_missing(facts) or trainer_silent(facts))


def dead_letters(facts: ConditionFacts) -> str | None:
    if not facts.dead_letters:
        return None
    records = "1 record" if facts.dead_letters == 1 else f"{facts.dead_letters} records"
    error = f"; the last error: {facts.dead_letter_error}" if facts.dead_letter_error else ""
    return f"the trainer could not read {records}, now in weir:dead{error}"


def redis_evicts(facts: ConditionFacts) -> str | None:
    if facts.redis is None or facts.redis.eviction == NO_EVICTION:
        return None
    return f"Redis evicts sessions when it is full: its maxmemory-policy is {facts.redis.eviction}"


def redis_has_evicted(facts: ConditionFacts) -> str | None:
    if facts.redis is None or not facts.redis.evicted:
        return None
    keys = "1 key" if facts.redis.evicted == 1 else f"{facts.redis.evicted} keys"
    return f"Redis has evicted {keys} since it started"


def redis_unbounded(facts: ConditionFacts) -> str | None:
    if facts.redis is None or facts.redis.max_bytes:
        return None
    return (
        "Redis has no maxmemory: it may use all memory of its machine, and gateway.limits.queue_memory has "
        "no effect"
    )


def redis_full(facts: ConditionFacts) -> str | None:
    if facts.redis is None or not facts.redis.full:
        return None
    return (
        f"Redis is full: it uses {facts.redis.used_bytes / facts.redis.max_bytes:.0%} of its maxmemory, and "
        "refuses every write, so no call can be recorded"
    )


def redis_nearly_full(facts: ConditionFacts) -> str | None:
    if facts.redis is None or facts.redis.full or not facts.redis.max_bytes:
        return None
    share = facts.redis.used_bytes / facts.redis.max_bytes
    return f"Redis uses {share:.0%} of its maxmemory" if share >= REDIS_NEARLY_FULL else None


@dataclass(frozen=True)
class Condition:
    """What is looked at, and what it means when it holds."""

    test: Callable[[ConditionFacts], str | None]
    """The sentence if the condition holds; its name is the condition's code."""
    severity: Severity
    advice: str
    alert: str | None = None
    """The alert rule of Prometheus that says the same."""
    alert_bound: str = field(default="", kw_only=True)
    """The bound as it stands in the alert's expression."""
    in_warnings: Literal["sentence", "advised", "said earlier"] = field(default="sentence", kw_only=True)
    """What `warnings` of `GET /admin/status` say: the sentence, the sentence with the advice, or nothing,
    because a warning about the queue says it earlier, with what follows for new sessions."""

    @property
    def code(self) -> str:
        return self.test.__name__


LESS_IN_REDIS = "raise maxmemory, lower gateway.retention_s, or let the trainer train what waits"

CONDITIONS = (
    Condition(trainer_missing, "warning", "start the trainer, or check its redis_url"),
    Condition(
        trainer_silent,
        "error",
        "start it again: it continues from its checkpoint",
        "WeirTrainerSilent",
        alert_bound=f"> {TRAINER_SILENT_S:g}",
    ),
    Condition(
        trainer_paused, "warning", "POST /admin/trainer/resume, once you know why", "WeirTrainerPaused"
    ),
    Condition(trainer_lacks_room, "error", "free space on its disk: it goes on by itself"),
    Condition(
        disk_nearly_full,
        "warning",
        "free space there, or lower trainer.keep_checkpoints and trainer.keep_policies",
        in_warnings="advised",
    ),
    Condition(
        dead_letters,
        "warning",
        "a newer release may read more: finish the upgrade, then run `weir audit`",
        "WeirDeadLetters",
        alert_bound="> 0",
    ),
    Condition(
        redis_has_evicted,
        "error",
        "set its maxmemory-policy to noeviction, and run `weir audit`, which names what is lost",
        "WeirRedisEvicts",
        alert_bound="max(weir_redis_evicted_keys) > 0",
        in_warnings="advised",
    ),
    Condition(
        redis_evicts,
        "error",
        "set it to noeviction, so that it refuses new sessions instead",
        "WeirRedisEvicts",
        alert_bound="max(weir_redis_evicts) > 0",
        in_warnings="advised",
    ),
    Condition(
        redis_unbounded,
        "warning",
        "start it by queue/start-redis.sh, or set maxmemory to about two thirds of what it may use",
        "WeirRedisUnbounded",
        alert_bound="max(weir_redis_max_bytes) == 0",
        in_warnings="advised",
    ),
    Condition(redis_full, "error", LESS_IN_REDIS, in_warnings="advised"),
    Condition(
        redis_nearly_full,
        "warning",
        LESS_IN_REDIS,
        "WeirRedisFull",
        alert_bound=f"> {REDIS_NEARLY_FULL:g}",
        in_warnings="said earlier",
    ),
)


def problems_in(facts: ConditionFacts) -> Iterator[Problem]:
    """The conditions that hold."""
    for each in CONDITIONS:
        if sentence := each.test(facts):
            yield Problem(each.code, each.severity, sentence, each.advice)


def warnings_of(facts: ConditionFacts) -> Iterator[str]:
    """What `warnings` of `GET /admin/status` say of the conditions that hold."""
    for each in CONDITIONS:
        if each.in_warnings != "said earlier" and (sentence := each.test(facts)):
            yield f"{sentence}: {each.advice}" if each.in_warnings == "advised" else sentence
