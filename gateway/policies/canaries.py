"""Canaries and pins: how a canary begins, what operators do with it, and how the gates end it.

weir:canary_log ─▶ evidence ◀─ sessions that have ended, with their rewards
                      └─▶ gates ─▶ report ─▶ goes on, promoted, rolled back

The gateway process that drives pushes judges. A process that takes over reads everything again.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.errors import ObjectNotFound, StateConflict
from gateway.fleet.fleet import Fleet
from gateway.policies.canary_evidence import CanaryEvidence, outcome
from gateway.policies.push import PushDriver
from gateway.settings import CanarySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import (
    Canary,
    CanaryGates,
    CanaryReport,
    CanaryState,
    Pin,
    ServingPlan,
    Sticky,
)
from rollout_queue.redis.plan_store import BEGINNING, CanaryLog, PlanEvent, ServingRegister
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


class Canaries:
    """Every method may raise StorageUnavailable."""

    def __init__(self, redis: Redis, fleet: Fleet, driver: PushDriver) -> None:
        self._serving = ServingRegister(redis, fleet.confirm, lambda: fleet.plan)
        self._log = CanaryLog(redis)
        self._fleet, self._driver = fleet, driver

    async def begin(self, version: int, share: float, sticky: Sticky, gates: CanaryGates) -> Canary:
        """Begin a canary of a registered version. Raises StateConflict if the version is served, if another
        canary is open, or if the fleet has fewer than two live servers that could be divided."""

        def event(plan: ServingPlan) -> ServingPlan:
            servers = canary_servers(self._fleet, plan, share)
            if plan.active_canary is not None:
                raise StateConflict(
                    f"version {plan.active_canary.version} has an open canary", code="canary_open"
                )
            if plan.serving is None or not servers:
                raise StateConflict("a canary needs a served version and two live rollout servers")
            if version == plan.serving:
                raise StateConflict(f"version {version} is served already", param="version")
            if plan.pushing:
                raise StateConflict("a push is under way; a canary can begin after it", code="pushing")
            return canary_begun(plan, version, servers, share, sticky, gates)

        plan = await self._changed(event)
        assert plan.canary is not None  # noqa: S101 - it has just begun
        return plan.canary

    async def end(self, version: int) -> Canary:
        """Roll the open canary of this version back. Raises ObjectNotFound if it has none."""
        canary = await self._open(version)
        report = replace(await self._log.report(), reason="ended by an operator")
        plan = await self._changed(
            lambda plan: plan.canary_ended(canary.id, "rolled_back", report, clock.now())
        )
        return plan.canary if plan.canary is not None and plan.canary.id == canary.id else canary

    async def last(self) -> list[Canary]:
        """The open canary, with its numbers so far, and the last ones that ended, the newest first."""
        ended = await self._serving.last_canaries()
        active = (await self._serving.read()).active_canary
        return [replace(active, report=await self._log.report()), *ended] if active else ended

    async def of(self, version: int) -> Canary:
        """The last canary of the version. Raises ObjectNotFound."""
        for canary in await self.last():
            if canary.version == version:
                return canary
        raise ObjectNotFound(f"version {version} had no canary", param="version")

    async def pin(self, version: int, servers: Sequence[str] | int) -> tuple[Pin, ...]:
        """Have servers keep this version: these ones, or so many. Raises StateConflict if none would be left
        for the fleet's version, and ObjectNotFound for a server that does not exist."""
        now = clock.now()

        def event(plan: ServingPlan) -> ServingPlan:
            chosen = self._pinned(plan, version, servers)
            left = {server.id for server in self._fleet.rollout_servers if server.live}
            canary = plan.active_canary
            taken = {*(canary.servers if canary else ()), *(pin.server for pin in plan.pins), *chosen}
            if not left - taken:
                raise StateConflict("a server has to be left for the version that the fleet serves")
            others = tuple(pin for pin in plan.pins if pin.server not in chosen)
            number = plan.next_id(now)
            made = (Pin(id=number, server=each, version=version, since=now) for each in chosen)
            return replace(plan, pins=(*others, *made))

        return (await self._changed(event)).pins

    async def unpin(self, version: int) -> tuple[Pin, ...]:
        """Have the servers of this version follow the fleet again. Returns the pins that are left."""

        def event(plan: ServingPlan) -> ServingPlan:
            left = tuple(pin for pin in plan.pins if pin.version != version)
            if left == plan.pins:
                raise ObjectNotFound(f"no server is pinned to version {version}", param="version")
            freed = replace(plan, pins=left)
            # Those servers accept only a push that is newer than their pin.
            return freed if plan.target is None else replace(
                freed, push=plan.begun(plan.target, clock.now(), force=True).push
            )  # fmt: skip

        return (await self._changed(event)).pins

    def _pinned(self, plan: ServingPlan, version: int, servers: Sequence[str] | int) -> list[str]:
        canary = plan.active_canary
        taken = {*(canary.servers if canary else ()), *(pin.server for pin in plan.pins)}
        if not isinstance(servers, int):
            for each in servers:
                if each not in {server.id for server in self._fleet.rollout_servers}:
                    raise ObjectNotFound(f"no rollout server {each!r}", param="servers")
                if canary is not None and each in canary.servers:
                    raise StateConflict(f"server {each} belongs to the open canary", param="servers")
            return list(servers)
        free = [each for each in self._fleet.rollout_servers if each.live and each.id not in taken]
        free.sort(key=lambda server: (server.version != version, server.id))
        if len(free) < servers:
            raise StateConflict(f"{len(free)} servers can be pinned, not {servers}", param="servers")
        return [server.id for server in free[:servers]]

    async def _open(self, version: int) -> Canary:
        canary = (await self._serving.read()).active_canary
        if canary is None or canary.version != version:
            raise ObjectNotFound(f"version {version} has no open canary", param="version")
        return canary

    async def _changed(self, event: PlanEvent) -> ServingPlan:
        plan = await self._serving.change(event)
        self._fleet.adopt(plan)
        self._driver.wake()
        return plan


def canary_servers(fleet: Fleet, plan: ServingPlan, share: float) -> tuple[str, ...]:
    """The servers that answer this share of the calls: at least one, and never all; none if the fleet cannot
    be divided."""
    pinned = {pin.server for pin in plan.pins}
    live = sorted(each.id for each in fleet.rollout_servers if each.live and each.id not in pinned)
    count = min(max(1, round(share * len(live))), len(live) - 1)
    return tuple(live[: max(0, count)])


def canary_begun(
    plan: ServingPlan,
    version: int,
    servers: tuple[str, ...],
    share: float,
    sticky: Sticky,
    gates: CanaryGates,
    *,
    automatic: bool = False,
) -> ServingPlan:
    """The plan with a new canary against the served version; the same plan while something else goes on."""
    if plan.active_canary is not None or plan.pushing or plan.serving is None:
        return plan
    now = clock.now()
    canary = Canary(
        id=plan.next_id(now),
        version=version,
        baseline=plan.serving,
        servers=servers,
        share=share,
        sticky=sticky,
        gates=gates,
        automatic=automatic,
        started_at=now,
    )
    return replace(plan, canary=canary)


def untried(records: Iterable[PolicyRecord], plan: ServingPlan) -> PolicyRecord | None:
    """The newest version after the served one, unless it was pushed or tried before."""
    newest = max(records, key=lambda record: record.version, default=None)
    served = -1 if plan.serving is None else plan.serving
    if newest is None or newest.version <= served or newest.state != "published":
        return None
    tried = {each.version for each in (plan.push, plan.canary) if each is not None}
    return None if newest.version in tried else newest


def newest_policy(records: Iterable[PolicyRecord]) -> PolicyRecord | None:
    """The newest version that no canary has rolled back."""
    sound = (record for record in records if record.state != "failed")
    return max(sound, key=lambda record: record.version, default=None)


async def known_policies(register: PolicyRegister, serving: ServingRegister) -> list[PolicyRecord]:
    """Every registered version, ascending. One that was never served, or is newer than what the servers are
    to serve, is `failed` if its last canary was rolled back."""
    records = await register.records()
    plan = await serving.read()
    failed = _rolled_back(await serving.last_canaries())  # read last, so that no end is missed
    target = -1 if plan.target is None else plan.target
    return [_judged(records[version], failed, target) for version in sorted(records)]


def _judged(record: PolicyRecord, failed: Collection[int], target: int) -> PolicyRecord:
    judged = record.state == "published" or record.version > target
    return replace(record, state="failed") if judged and record.version in failed else record


def _rolled_back(canaries: Sequence[Canary]) -> set[int]:
    """The versions whose last canary with a decision was rolled back. `canaries`: the newest first."""
    ends = {each.version: each.state for each in reversed(canaries) if each.state != "superseded"}
    return {version for version, state in ends.items() if state == "rolled_back"}
