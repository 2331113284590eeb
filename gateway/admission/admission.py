"""Who may come in: every limit of a deployment, as a 429 that says when to come again.

call    ──▶ requests and tokens per minute of its client key    counted here, shared every poll
session ──▶ open sessions · staleness budget · queue            counted in Redis; downstream read every poll

A session that exists is never refused, and neither is a call of it for what happens downstream: to refuse
work that is half done would waste it. Only the rate of its key holds a call back.
"""

import logging
import time
from collections.abc import Sequence
from typing import NoReturn

from redis.asyncio import Redis

from gateway.admission.allowances import Allowance
from gateway.admission.limits import Rate, Trend, guess, limit_reached
from gateway.admission.places import Place, Places
from gateway.admission.pressure import Pressure, read_pressure
from gateway.admission.staleness import StalenessBudget
from gateway.engines.fleet import Fleet
from gateway.errors import InvalidRequest, LimitReached
from gateway.metrics import Metrics
from gateway.settings import LimitSettings
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import SessionSpec
from rollout_queue.redis import keys

logger = logging.getLogger(__name__)


class Admission:
    """Checks the limits that are set; one that is not set costs nothing."""

    def __init__(
        self, limits: LimitSettings, redis: Redis, fleet: Fleet, metrics: Metrics, poll_every_s: float
    ) -> None:
        self._limits, self._redis = limits, redis
        self._fleet, self._metrics = fleet, metrics
        self._requests = self._allowance("requests", limits.requests_per_minute)
        self._tokens = self._allowance("tokens", limits.tokens_per_minute)
        self._places = Places(redis, poll_every_s)
        self._pressure = Pressure()
        named = {name: getattr(limits, name) for name in ("open_sessions_per_key", "open_sessions")}
        self._open_limits = {name: limit for name, limit in named.items() if limit is not None}
        self._entries, self._bytes, self._opened, self._versions = Trend(), Trend(), Trend(), Trend()

    # Calls

    def check_call(self, owner: str) -> None:
        """Count one call of this client key. Raises LimitReached when its rate or its budget is used up."""
        limits = self._limits
        if self._tokens is not None and (wait_s := self._tokens.wait_s(owner)):
            message = (
                f"this key may use {limits.tokens_per_minute} tokens a minute, prompts and answers together "
                "(gateway.limits.tokens_per_minute), and has used more"
            )
            self._refuse(limit_reached("token_budget", message, wait_s))
        if self._requests is not None:
            if wait_s := self._requests.wait_s(owner):
                message = (
                    f"this key may make {limits.requests_per_minute} calls a minute "
                    "(gateway.limits.requests_per_minute), and has made them"
                )
                self._refuse(limit_reached("rate_limited", message, wait_s))
            self._requests.use(owner, 1)

    def spend(self, owner: str, tokens: int) -> None:
        """Charge a client key for what a call used, as its `usage` says: the price is known afterwards."""
        if self._tokens is not None:
            self._tokens.use(owner, tokens)

    # Sessions

    @property
    def charges(self) -> bool:
        """Whether tokens are budgeted."""
        return self._tokens is not None

    @property
    def counts_sessions(self) -> bool:
        """Whether the number of open sessions is limited."""
        return bool(self._open_limits)

    async def check_session(self, specs: Sequence[SessionSpec]) -> None:
        """Take places for new sessions of one caller, all or none; those that exist are let in.

        Raises LimitReached while a limit stands in their way, InvalidRequest where one always will.
        """
        budget = self._budget(specs[0])
        places = self._places_of(specs, budget)
        shut = self._queue_full()
        if shut is None and budget is not None and budget.used_up:
            shut = budget.refusal(budget.trainer.rollouts_waiting, self._versions)
        if not places and shut is None:
            return
        taken = await self._places.take(specs, places, shut=shut is not None)
        if taken.refusing is not None:
            self._refuse(self._crowded(places[taken.refusing], taken.held, budget))
        if not taken.allowed and shut is not None:
            self._refuse(shut)

    def _places_of(self, specs: Sequence[SessionSpec], budget: StalenessBudget | None) -> list[Place]:
        """What the sessions need: room among the open ones, and in the line for the trainer."""
        places, number = [], len(specs)
        for name, limit in self._open_limits.items():
            if number > limit:
                message = f"{number} sessions never fit in gateway.limits.{name}, which is {limit}"
                raise InvalidRequest(message, param="size", code="sessions_limit")
            key = keys.OPEN if name == "open_sessions" else keys.open_of(specs[0].owner)
            places.append(Place(key, limit - number + 1, "outcome"))
        if budget is not None:
            # A session that a call implied may never be rewarded: it holds no place in the line.
            places.append(Place(keys.UNTRAINED, budget.bound, "verdict", holds=not specs[0].inferred))
        return places

    def _budget(self, spec: SessionSpec) -> StalenessBudget | None:
        """Whether, and against what, the session's staleness counts."""
        versions, trainer = self._limits.staleness_versions, self._pressure.trainer
        if versions is None or trainer is None or not spec.train:
            return None
        serving = self._fleet.serving
        if serving is None:  # nobody pushes to bare engines: each says itself what it serves
            known = [each.version for each in self._fleet.servers.values() if each.version is not None]
            serving = min(known, default=trainer.version)
        return StalenessBudget(versions, trainer, serving)

    def _crowded(self, place: Place, held: int, budget: StalenessBudget | None) -> LimitReached:
        if budget is not None and place.key == keys.UNTRAINED:
            return budget.refusal(held - budget.trainer.rollouts_owed, self._versions)
        name, whose = (
            ("open_sessions", "") if place.key == keys.OPEN else ("open_sessions_per_key", " of this key")
        )
        message = (
            f"{held} sessions{whose} are open, and gateway.limits.{name} is {getattr(self._limits, name)}: "
            "finish those that are done"
        )
        # Where a limit is reached, sessions end as fast as new ones are opened.
        return limit_reached("sessions_limit", message, guess(self._opened.seconds_to_move(1)))

    def _queue_full(self) -> LimitReached | None:
        limits, seen = self._limits, self._pressure
        if limits.queue_entries is not None and seen.entries >= limits.queue_entries:
            message = (
                f"{seen.entries} records wait for the trainer, and gateway.limits.queue_entries is "
                f"{limits.queue_entries}"
            )
            excess = seen.entries - limits.queue_entries + 1
            return limit_reached("queue_full", message, guess(self._entries.seconds_to_move(-excess)))
        # A Redis that is altogether full refuses by itself, which is a 503: there is nothing to prevent.
        if limits.queue_memory is not None and seen.used_bytes < seen.max_bytes:
            excess_bytes = seen.used_bytes - limits.queue_memory * seen.max_bytes
            if excess_bytes >= 0:
                message = (
                    f"the queue takes up {seen.used_bytes / seen.max_bytes:.0%} of Redis' maxmemory: what is "
                    f"beyond gateway.limits.queue_memory, {limits.queue_memory:.0%}, is for open sessions"
                )
                return limit_reached(
                    "queue_full", message, guess(self._bytes.seconds_to_move(-excess_bytes - 1))
                )
        return None

    def _refuse(self, refusal: LimitReached) -> NoReturn:
        self._metrics.refusals.labels(refusal.code).inc()
        raise refusal

    # The poll

    async def refresh(self) -> None:
        """Look downstream, and share what was used with the other gateways."""
        try:
            self._pressure = await read_pressure(self._redis)
            for allowance in (self._requests, self._tokens):
                if allowance is not None:
                    await allowance.share()
        except StorageUnavailable as error:
            logger.warning("the limits go by what was known before: %s", error)
            return
        now, seen = time.monotonic(), self._pressure
        self._entries.note(now, seen.entries)
        self._bytes.note(now, seen.used_bytes)
        self._opened.note(now, seen.sessions)
        if seen.trainer is not None:
            self._versions.note(now, seen.trainer.version)

    def _allowance(self, name: str, per_minute: int | None) -> Allowance | None:
        if per_minute is None:
            return None
        return Allowance(self._redis, name, Rate(per_minute, self._limits.burst_s))
