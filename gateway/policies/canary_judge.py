"""Decides about the canary: reads what all gateways noted, asks the gates, and promotes or rolls back.

weir:canary_log ─▶ evidence ◀─ sessions that have ended, with their rewards
                      └─▶ gates ─▶ report ─▶ goes on, promoted, rolled back

The gateway process that drives pushes runs it. A process that takes over reads everything again.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.fleet.fleet import Fleet
from gateway.policies.canary_evidence import CanaryEvidence
from gateway.policies.canary_plan import (
    canary_begun,
    canary_servers,
    known_policies,
    newest_policy,
    untried,
)
from gateway.settings import CanarySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.serving_plan import (
    Canary,
    CanaryGates,
    CanaryReport,
    CanaryState,
    GateReading,
    ServingPlan,
)
from rollout_queue.redis.plan_store import BEGINNING, CanaryLog, ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister

logger = logging.getLogger(__name__)

LOOKED_AT_ONCE = 100
"""How many sessions that have not ended are read in one step."""
LoadHead = Callable[[str], Awaitable[SessionHead | None]]


class CanaryJudge:
    """`step` is called again and again, in the gateway process that drives pushes."""

    def __init__(
        self,
        redis: Redis,
        fleet: Fleet,
        load: LoadHead,
        defaults: CanarySettings,
        *,
        automatic: bool,
    ) -> None:
        """`load` reads a session without its turns. With `automatic`, every version begins as a canary."""
        self._serving = ServingRegister(redis, fleet.confirm, lambda: fleet.plan)
        self._register = PolicyRegister(redis, fleet.confirm)
        self._log = CanaryLog(redis)
        self._fleet, self._load = fleet, load
        self._defaults, self._automatic = defaults, automatic
        self._canary_id = 0
        self._evidence, self._cursor = CanaryEvidence(), BEGINNING
        self._report = CanaryReport()

    async def step(self) -> bool:
        """Look at the canary, or begin the next one. Returns whether the plan has changed."""
        try:
            canary = self._fleet.plan.active_canary
            if canary is None:
                return self._automatic and await self._begin_next()
            if canary.opened_at is None:
                return await self._end_if_it_cannot_open(canary)
            return await self._judge(canary, clock.now() - canary.opened_at)
        except StorageUnavailable as error:
            logger.warning("the canary waits for Redis: %s", error)
            return False

    async def _end_if_it_cannot_open(self, canary: Canary) -> bool:
        """Roll back a canary whose servers take too long to load it, or are not in the fleet any more."""
        deadline_s = canary.gates.deadline_s
        if not self._fleet.servers.keys() & set(canary.servers):
            reason = "its servers have left the fleet"
        elif clock.now() - canary.started_at >= deadline_s:
            reason = f"not loaded within {deadline_s:g} s"
        else:
            return False
        await self._end(canary, "rolled_back", CanaryReport(reason=reason))
        return True

    async def _judge(self, canary: Canary, open_s: float) -> bool:
        if canary.id != self._canary_id:
            self._canary_id, self._cursor = canary.id, BEGINNING
            self._evidence, self._report = CanaryEvidence(), CanaryReport()
        records, self._cursor = await self._log.read(self._cursor)
        for record in records:
            if record.canary == canary.id:
                self._evidence.add(record)
        await self._look_at_sessions(canary.gates)
        report = self._evidence.report(canary.gates)
        if report != self._report:
            await self._log.store_report(report)
            self._report = report
        if (ended := outcome(report, canary.gates, open_s)) is None:
            return False
        state, reason = ended
        await self._end(canary, state, replace(report, reason=reason))
        return True

    async def _look_at_sessions(self, gates: CanaryGates) -> None:
        for session_id in list(self._evidence.waiting)[:LOOKED_AT_ONCE]:
            head = await self._load(session_id)
            if head is None or _has_ended(head, gates):
                size = head.spec.group_size if head is not None else None
                self._evidence.session_ended(session_id, head.reward if head is not None else None, size)
            else:  # the last one to be looked at again
                self._evidence.waiting[session_id] = self._evidence.waiting.pop(session_id)

    async def _end(self, canary: Canary, state: CanaryState, report: CanaryReport) -> None:
        plan = await self._serving.change(
            lambda plan: plan.canary_ended(canary.id, state, report, clock.now())
        )
        self._fleet.adopt(plan)
        logger.info("the canary of version %d is %s: %s", canary.version, state, report.reason)
        if state == "promoted" and not self._automatic:
            await self._push_newest(canary.version)

    async def _push_newest(self, promoted: int) -> None:
        """Push a version that waited for the end of the canary. Read after that end, so none is missed."""
        newest = newest_policy(await known_policies(self._register, self._serving))
        if newest is not None and newest.version > promoted:
            self._fleet.adopt(await self._serving.change(lambda plan: _pushed(plan, newest.version)))

    async def _begin_next(self) -> bool:
        """Begin the canary of the newest version that was never served or tried. A fleet that is too small to
        be divided, or that serves nothing yet, gets the version by a push."""
        plan = self._fleet.plan
        if plan.hold is not None or plan.pushing:
            return False
        found = untried(await known_policies(self._register, self._serving), plan)
        if found is None:
            return False
        servers = canary_servers(self._fleet, plan, self._defaults.share)
        if servers and plan.serving is not None:
            gates = self._defaults.gates()
            after = await self._serving.change(
                lambda plan: canary_begun(
                    plan,
                    found.version,
                    servers,
                    self._defaults.share,
                    self._defaults.sticky,
                    gates,
                    automatic=True,
                )
            )
        else:
            why = "that needs two live servers and a served version"
            logger.warning("version %d is pushed without a canary: %s", found.version, why)
            after = await self._serving.change(lambda plan: _pushed(plan, found.version))
        self._fleet.adopt(after)
        return True


def _pushed(plan: ServingPlan, version: int) -> ServingPlan:
    """The version is pushed, unless the fleet is held or has a newer target."""
    if plan.hold is not None or plan.active_canary is not None:
        return plan
    if plan.target is not None and plan.target >= version:
        return plan
    return plan.begun(version, clock.now(), force=False)


def _has_ended(head: SessionHead, gates: CanaryGates) -> bool:
    """Whether the gates have all that they need of a session."""
    return head.state == "finished" or (head.outcome is not None and gates.max_reward_drop is None)


def outcome(report: CanaryReport, gates: CanaryGates, open_s: float) -> tuple[CanaryState, str] | None:
    """How the canary ends now, and why; None if it goes on. It is promoted if all gates hold, so
    never while a number is missing."""
    broken = [reading for reading in report.readings if reading.state == "broken"]
    if broken:
        return "rolled_back", f"{sentences(broken)} (after {report.groups} groups)"
    counted = f"{report.groups} of {gates.min_groups} groups"
    if report.groups >= gates.min_groups and all(each.state == "holds" for each in report.readings):
        return "promoted", f"{counted}; {sentences(report.readings)}"
    if open_s >= gates.deadline_s:
        return (
            "rolled_back",
            f"not decided within {gates.deadline_s:g} s: {counted}; {sentences(report.readings)}",
        )
    return None


def sentences(readings: Sequence[GateReading]) -> str:
    """The readings in words."""
    return "; ".join(map(_sentence, readings)) or "no gate is set"


def _sentence(reading: GateReading) -> str:
    if reading.value is None:
        return f"{reading.gate} is {reading.state}"
    interval = ""
    if reading.low is not None and reading.high is not None:
        interval = f" (from {reading.low:.4g} to {reading.high:.4g})"
    return (
        f"{reading.gate} {reading.state}: {reading.value:.4g}{interval}, bound {reading.bound:g}, "
        f"{reading.count} groups"
    )
