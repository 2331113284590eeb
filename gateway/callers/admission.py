"""Applies every limit of a deployment to calls and new sessions; a refusal says when to retry.

call    ──▶ requests and tokens per minute of its client key, and its token budget
write   ──▶ as many a minute as calls: sessions, rewards, ends  counted in this process, shared at every poll
session ──▶ open sessions · staleness budget · queue            counted in Redis; queue read at every poll

A poll runs every `poll_every_s`. Full queues and used-up budgets refuse new sessions only. A call of an open
session is refused only for the rates of its client key: any other refusal would waste the tokens that the
session has sampled already.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

from redis.asyncio import Redis

from gateway.callers.api_keys import ApiKeys
from gateway.callers.backpressure import Backpressure, StalenessBudget, read_backpressure
from gateway.callers.caller_limits import (
    Rate,
    RateLimiter,
    StepTrend,
    Trend,
    exhausted,
    limit_reached,
    retry_after_s,
)
from gateway.errors import InvalidRequest, LimitReached
from gateway.fleet.fleet import Fleet
from gateway.prometheus import Metrics
from gateway.settings import LimitSettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.lua import Argument, Script

logger = logging.getLogger(__name__)

PAUSED_RETRY_S = 30.0
"""When to retry while the training is paused: nobody knows when it goes on."""


OPENING_S = 60.0
"""A counted session that is not stored counts for this long, because its gateway may still be opening it."""
TAKE = Script[list[int]]("""
-- KEYS: quotas…, session…
-- ARGV: now, shut, number of quotas, (bound, add)…, id…
-- Returns {result, count}. result: 0 if the sessions are admitted, -1 if `shut` refuses them, else the number
-- of the quota that refuses them; count: how many sessions that quota counts.
local quotas = tonumber(ARGV[3])
local first_id = 3 + 2 * quotas
local new = {}
-- bounded: the sessions of one request
for index = 1, #KEYS - quotas do
    local exists = redis.call('HEXISTS', KEYS[quotas + index], 'spec')
    if exists == 0 then new[#new + 1] = ARGV[first_id + index] end
end
if #new == 0 then return {0, 0} end
if ARGV[2] == '1' then return {-1, 0} end
for quota = 1, quotas do
    local count = redis.call('ZCARD', KEYS[quota])
    if count >= tonumber(ARGV[2 + 2 * quota]) then return {quota, count} end
end
for quota = 1, quotas do
    if ARGV[3 + 2 * quota] == '1' then
        for _, id in ipairs(new) do redis.call('ZADD', KEYS[quota], ARGV[1], id) end
    end
end
return {0, 0}
""")
SWEEP = Script[list[int]]("""
-- KEYS: quota   ARGV: now, opening_s, field, first, count, prefix of session keys
-- Looks at `count` sessions of the quota from the place `first` on, and removes those that have ended: those
-- with `field` or a verdict. Returns how many it has looked at, and how many it has removed.
-- bounded: one page
local counted = redis.call('ZRANGE', KEYS[1], ARGV[4], ARGV[4] + ARGV[5] - 1, 'WITHSCORES')
local removed = 0
for index = 1, #counted, 2 do
    local session = ARGV[6] .. counted[index]
    local spec, ending, verdict = unpack(redis.call('HMGET', session, 'spec', ARGV[3], 'verdict'))
    local ended = ending or verdict
    if not spec then ended = ARGV[1] - counted[index + 1] > tonumber(ARGV[2]) end
    if ended then removed = removed + redis.call('ZREM', KEYS[1], counted[index]) end
end
return {#counted / 2, removed}
""")
PAGE, MOST_PAGES = 500, 8
"""How many sessions one script looks at, in 2 ms of Redis; and how many scripts one sweep runs. The next one
goes on where it ended."""


class Quota(NamedTuple):
    """A sorted set of counted sessions. New sessions are admitted while it has fewer than `bound` members."""

    key: str
    bound: int
    until: Literal["outcome", "verdict"]
    """`outcome`: a session counts until it has an outcome or a verdict; `verdict`: until it has a verdict."""
    counts: bool = True
    """Whether admitted sessions are added to the set. If false, the quota is only checked."""


class QuotaResult(NamedTuple):
    """Whether the sessions were admitted; if not, which quota refused them."""

    allowed: bool
    refusing: int | None = None
    """The index of the quota; None if the sessions were admitted, or if `shut` refused them."""
    used: int = 0
    """How many sessions that quota counts."""


class Quotas:
    """Counts new sessions in all quotas that apply to them, or in none if one is used up. Redis counts, so
    that all gateways together keep the limits.

    The script that checks a quota also counts the new session, before it is opened. A session that a client
    ends is subtracted at once. Those that end otherwise are found when a quota seems used up: then the
    counted ones are looked at, page by page, and those that have ended are removed.
    """

    def __init__(self, redis: Redis, sweep_every_s: float) -> None:
        self._redis = redis
        self._sweep_every_s = sweep_every_s
        self._swept: dict[str, float] = {}
        """By key, when a quota's ended sessions were last removed; dropped after `sweep_every_s`."""
        self._places: dict[str, int] = {}
        """By key, where the last sweep has ended; missing for the beginning."""

    async def take(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        """Admit sessions that exist already. Count all the new ones, or refuse them all.

        With `shut`, new sessions are refused whatever the counts are. Raises StorageUnavailable.
        """
        result = await self._try(specs, quotas, shut=shut)
        for _ in quotas:
            if result.refusing is None or not self._may_sweep(quotas[result.refusing].key):
                break
            await self._remove_ended(quotas[result.refusing])
            result = await self._try(specs, quotas, shut=shut)
        return result

    async def ended(self, session_id: str, *counted_in: str) -> None:
        """The session counts in these quotas no more. Raises StorageUnavailable."""
        for key in counted_in:
            await stored(self._redis.zrem(key, session_id))

    async def _remove_ended(self, quota: Quota) -> None:
        """Remove the ended sessions of the next pages."""
        place = start = self._places.pop(quota.key, 0)
        for _ in range(MOST_PAGES):
            arguments = [clock.now(), OPENING_S, quota.until, place, PAGE, key_names.session("")]
            seen, removed = await SWEEP.run(self._redis, [quota.key], arguments)
            place = place + seen - removed
            if seen < PAGE:  # the end
                place = 0
                if start == 0:
                    return
        self._places[quota.key] = place

    async def _try(self, specs: Sequence[SessionSpec], quotas: Sequence[Quota], *, shut: bool) -> QuotaResult:
        names = [quota.key for quota in quotas] + [key_names.session(spec.session_id) for spec in specs]
        arguments: list[Argument] = [clock.now(), int(shut), len(quotas)]
        for quota in quotas:
            arguments += [quota.bound, int(quota.counts)]
        arguments += [spec.session_id for spec in specs]
        refusing, count = await TAKE.run(self._redis, names, arguments)
        if refusing == 0:
            return QuotaResult(True)
        return QuotaResult(False, refusing - 1 if refusing > 0 else None, count)

    def _may_sweep(self, key: str) -> bool:
        """Whether the quota's ended sessions may be removed now, and note that they are: each quota waits
        `sweep_every_s` in between."""
        now = clock.monotonic()
        self._swept = {each: at for each, at in self._swept.items() if now - at < self._sweep_every_s}
        return self._swept.setdefault(key, now) == now


class Admission:
    """Checks the limits that are set; a limit that is not set costs nothing."""

    def __init__(
        self,
        limits: LimitSettings,
        api_keys: ApiKeys,
        redis: Redis,
        fleet: Fleet,
        metrics: Metrics,
        poll_every_s: float,
    ) -> None:
        self._limits, self._keys, self._redis = limits, api_keys, redis
        self._fleet, self._metrics = fleet, metrics
        self._rated = limits.requests_per_minute is not None or limits.tokens_per_minute is not None
        self._requests, self._tokens = RateLimiter(redis, "requests"), RateLimiter(redis, "tokens")
        self._writes = RateLimiter(redis, "writes")
        self._quotas = Quotas(redis, poll_every_s)
        self._downstream = Backpressure()
        self.redis_answers: bool | None = None
        """Whether Redis answered at the last poll."""
        named = {name: getattr(limits, name) for name in ("open_sessions_per_key", "open_sessions")}
        self._open_limits = {name: limit for name, limit in named.items() if limit is not None}
        self._entries, self._bytes, self._opened, self._steps = Trend(), Trend(), Trend(), StepTrend()

    def max_row_tokens(self) -> int | None:
        """The bound of the trainer's rows at the last poll; None without one."""
        trainer = self._downstream.trainer
        return trainer.max_row_tokens if trainer else None

    @property
    def backpressure(self) -> Backpressure:
        """What waited at the last poll that Redis answered."""
        return self._downstream

    @property
    def redis_bytes(self) -> int | None:
        """What Redis may use (`maxmemory`), as of the last poll; None without a bound."""
        return self._downstream.max_bytes or None

    # Calls

    def check_call(self, owner: str) -> None:
        """Count one call of a client key. Raises LimitReached if its rate or its token budget is used up."""
        if not self._rated and not self._keys.limited:
            return
        if self._keys.left(owner) == 0:
            budget = self._keys.limits_of(owner).token_budget
            self._refuse(exhausted(f"this key may use {budget} tokens in all, and has used them up"))
        tokens, requests = self._rate(owner, "tokens_per_minute"), self._rate(owner, "requests_per_minute")
        if tokens is not None and (wait_s := self._tokens.wait_s(owner, tokens)):
            message = (
                f"this key may use {tokens.per_minute} tokens a minute, prompts and answers together "
                "(tokens_per_minute of the key, or of gateway.limits), and has used them up"
            )
            self._refuse(limit_reached("token_budget", message, wait_s))
        if requests is not None:
            self._count(self._requests, owner, requests, "calls")

    def check_write(self, owner: str) -> None:
        """Count one request of a client key that stores something. Raises LimitReached if it makes more of
        them than it may make calls."""
        if (rate := self._rate(owner, "requests_per_minute")) is not None:
            self._count(self._writes, owner, rate, "writes")

    def _count(self, limiter: RateLimiter, owner: str, rate: Rate, what: str) -> None:
        if wait_s := limiter.wait_s(owner, rate):
            message = (
                f"this key may make {rate.per_minute} {what} a minute "
                "(requests_per_minute of the key, or of gateway.limits), and has made that many"
            )
            self._refuse(limit_reached("rate_limited", message, wait_s))
        limiter.use(owner, 1, rate)

    def spend(self, owner: str, tokens: int) -> None:
        """Charge a client key for the tokens of a call that has ended."""
        self._keys.spend(owner, tokens)
        if not self._rated and not self._keys.limited:
            return
        if (rate := self._rate(owner, "tokens_per_minute")) is not None:
            self._tokens.use(owner, tokens, rate)

    def rate_headers(self, owner: str) -> Mapping[str, str]:
        """What the key may still use, in the headers that OpenAI's API has; empty without limits."""
        if not self._rated and not self._keys.limited:
            return {}
        headers: dict[str, str] = {}
        for name, limiter in (("requests", self._requests), ("tokens", self._tokens)):
            if (rate := self._rate(owner, f"{name}_per_minute")) is not None:
                full_s = limiter.full_s(owner)
                headers[f"x-ratelimit-limit-{name}"] = str(rate.units_left(0.0))
                headers[f"x-ratelimit-remaining-{name}"] = str(rate.units_left(full_s))
                headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(full_s * 1000)}ms"
        if (left := self._keys.left(owner)) is not None:
            headers["x-weir-token-budget-remaining"] = str(left)
        return headers

    def _rate(self, owner: str, name: str) -> Rate | None:
        """The key's own rate, else that of the deployment; None without a limit."""
        per_minute = getattr(self._keys.limits_of(owner), name) or getattr(self._limits, name)
        return None if per_minute is None else Rate(per_minute, self._limits.burst_s)

    # Sessions

    @property
    def counts_sessions(self) -> bool:
        """Whether the number of open sessions is limited."""
        return bool(self._open_limits)

    async def check_session(self, specs: Sequence[SessionSpec]) -> None:
        """Count new sessions of one caller, all or none. Sessions that exist already are admitted.

        Raises LimitReached if a limit is reached, InvalidRequest for more sessions than may ever be open.
        """
        budget = self._budget(specs[0])
        quotas = self._applicable(specs, budget)
        shut = self._shut(specs[0])
        if shut is None and budget is not None and budget.used_up:
            shut = budget.refusal(budget.trainer.rollouts_waiting, self._steps)
        if not quotas and shut is None:
            return
        result = await self._quotas.take(specs, quotas, shut=shut is not None)
        if result.refusing is not None:
            self._refuse(self._quota_reached(quotas[result.refusing], result.used, budget))
        if not result.allowed and shut is not None:
            self._refuse(shut)

    async def session_ended(self, spec: SessionSpec) -> None:
        """The session is open no more. If this is not noted, whoever needs its place finds out."""
        try:
            counted_in = [_counted_in(name, spec.owner) for name in self._open_limits]
            await self._quotas.ended(spec.session_id, *counted_in)
        except StorageUnavailable as error:
            logger.warning("session %s counts as open until somebody looks: %s", spec.session_id, error)

    def counts_for_training(self, spec: SessionSpec) -> bool:
        """Whether the session counts in the staleness budget, once a client has opened or described it."""
        return self._budget(spec) is not None

    def _applicable(self, specs: Sequence[SessionSpec], budget: StalenessBudget | None) -> list[Quota]:
        """The quotas that apply to the sessions: of open sessions, and of sessions still to be trained."""
        quotas, number = [], len(specs)
        for name, limit in self._open_limits.items():
            if number > limit:
                message = f"{number} sessions never fit in gateway.limits.{name}, which is {limit}"
                raise InvalidRequest(message, param="size", code="sessions_limit")
            key = _counted_in(name, specs[0].owner)
            quotas.append(Quota(key, limit - number + 1, "outcome"))
        if budget is not None:
            # A call that names no session opens one, which may never be rewarded. So it is not counted.
            quotas.append(Quota(key_names.UNTRAINED, budget.bound, "verdict", counts=not specs[0].inferred))
        return quotas

    def _budget(self, spec: SessionSpec) -> StalenessBudget | None:
        """The staleness budget that applies to the session; None if no budget applies."""
        versions, trainer = self._limits.staleness_versions, self._downstream.trainer
        if versions is None or trainer is None or not spec.train:
            return None
        serving = self._fleet.serving
        if serving is None:  # all servers are bare engines (see `fleet.py`): each reports its own version
            known = [each.version for each in self._fleet.servers.values() if each.version is not None]
            serving = min(known, default=trainer.version)
        return StalenessBudget(versions, trainer, serving)

    def _quota_reached(self, quota: Quota, count: int, budget: StalenessBudget | None) -> LimitReached:
        if budget is not None and quota.key == key_names.UNTRAINED:
            return budget.refusal(count - budget.trainer.rollouts_owed, self._steps)
        name, whose = (
            ("open_sessions", "")
            if quota.key == key_names.OPEN
            else ("open_sessions_per_key", " of this key")
        )
        message = (
            f"{count} sessions{whose} are open, and gateway.limits.{name} is {getattr(self._limits, name)}: "
            "finish the sessions that are done"
        )
        # At the limit, a session opens only when another ends. So the trend of openings tells when one ends.
        return limit_reached("sessions_limit", message, retry_after_s(self._opened.seconds_to_move(1)))

    def _shut(self, spec: SessionSpec) -> LimitReached | None:
        """Why no session like this one is opened now. While the training is paused, nothing empties the queue
        of sessions for training, so a full queue refuses those alone: evaluations go on."""
        trainer = self._downstream.trainer
        if trainer is not None and trainer.paused:
            if not spec.train:
                return None
            if trainer.refuses_training:
                message = "the training is paused, and takes no new sessions (trainer.paused_traffic)"
                return limit_reached("training_paused", message, PAUSED_RETRY_S)
        return self._queue_full()

    def _queue_full(self) -> LimitReached | None:
        limits, seen = self._limits, self._downstream
        if limits.queue_entries is not None and seen.entries >= limits.queue_entries:
            message = (
                f"{seen.entries} records wait for the trainer, and gateway.limits.queue_entries is "
                f"{limits.queue_entries}"
            )
            excess = seen.entries - limits.queue_entries + 1
            return limit_reached("queue_full", message, retry_after_s(self._entries.seconds_to_move(-excess)))
        # A completely full Redis refuses the write itself; the client then gets StorageUnavailable.
        if limits.queue_memory is not None and seen.used_bytes < seen.max_bytes:
            excess_bytes = seen.used_bytes - limits.queue_memory * seen.max_bytes
            if excess_bytes >= 0:
                message = (
                    f"Redis uses {seen.used_bytes / seen.max_bytes:.0%} of its maxmemory: memory beyond "
                    f"gateway.limits.queue_memory, {limits.queue_memory:.0%}, is kept for open sessions"
                )
                return limit_reached(
                    "queue_full", message, retry_after_s(self._bytes.seconds_to_move(-excess_bytes - 1))
                )
        return None

    def _refuse(self, refusal: LimitReached) -> NoReturn:
        raise self._metrics.refused(refusal)

    # The poll

    async def refresh(self) -> None:
        """Read the backpressure, and share the counted usage with the other gateways."""
        try:
            self._downstream = await read_backpressure(self._redis)
            self.redis_answers = True
            for limiter in (self._requests, self._tokens, self._writes):
                await limiter.share()
        except StorageUnavailable as error:
            self.redis_answers = False
            logger.warning("the limits use the state of an earlier poll: %s", error)
            return
        now, seen = clock.monotonic(), self._downstream
        self._entries.note(now, seen.entries)
        self._bytes.note(now, seen.used_bytes)
        self._opened.note(now, seen.sessions)
        if seen.trainer is not None:
            self._steps.note(now, seen.trainer.version, seen.trainer.busy)


def _counted_in(limit: str, owner: str) -> str:
    """The quota of open sessions that a limit bounds."""
    return key_names.OPEN if limit == "open_sessions" else key_names.open_of(owner)
