"""What operators and the trainer do with policies: publish, promote, roll back, hold, release, remove.

POST /admin/policies ──▶ register ──▶ a push begins, unless the fleet is held ──▶ `PushDriver`
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from gateway.errors import ObjectNotFound, StateConflict
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.policies.canaries import known_policies, newest_policy
from gateway.policies.push import PushDriver
from rollout_queue import clock
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import (
    Admissible,
    CanaryState,
    Push,
    ServerPush,
    ServingHold,
    ServingPlan,
)
from rollout_queue.redis.plan_store import CanaryLog, PlanEvent, ServingRegister
from rollout_queue.redis.policy_register import KnownPolicies, PolicyRegister
from rollout_queue.tracing import traceparent

WAIT_POLL_S = 0.05
"""How often a caller who waits for a push looks whether it has ended."""
NAMED_VERSIONS = 20
"""How many versions an error names."""


@dataclass(frozen=True)
class PushReport:
    """A push, and what each server did in it."""

    push: Push
    servers: Sequence[ServerPush]


class Policies:
    """The registered versions, and which of them the fleet is to serve."""

    def __init__(self, redis: Redis, fleet: Fleet, driver: PushDriver, *, auto_canary: bool = False) -> None:
        self.auto_canary = auto_canary
        self._register = PolicyRegister(redis, fleet.confirm)
        self._serving = ServingRegister(redis, fleet.confirm, lambda: fleet.plan)
        self._log = CanaryLog(redis)
        self._fleet = fleet
        self._driver = driver

    async def all(self) -> list[PolicyRecord]:
        """Every version that can be served, ascending. Raises StorageUnavailable."""
        plan = await self._serving.read()
        return [_with_state(each, plan) for each in await known_policies(self._register, self._serving)]

    async def reserved(self) -> int | None:
        """As `KnownPolicies.reserved_ahead`. Raises StorageUnavailable."""
        return (await self._register.look()).reserved_ahead

    async def one(self, version: int) -> PolicyRecord:
        """Raises ObjectNotFound, StorageUnavailable."""
        for record in await self.all():
            if record.version == version:
                return record
        raise await self._unknown(version)

    async def plan(self) -> ServingPlan:
        """What all gateways agreed on. Raises StorageUnavailable."""
        return await self._serving.read()

    async def wanted_by(self, server: FleetServer) -> PolicyRecord | None:
        """The policy that a server is to serve now; None before the first one.

        A server with an admissible version keeps it: the push brings it to the next one in the rolling order.
        """
        plan = await self._serving.read()
        if (own := plan.own_version(server.id)) is not None:
            return await self._register.record(own.version)
        runs = server.state in ("ready", "loading", "draining")
        kept = runs and (server.version in plan.versions or server.ahead)
        version = server.version if kept else plan.serving
        return None if version is None else await self._register.record(version)

    async def note_initial(self, version: int) -> None:
        """Register the version that the engines started with; serve it if none is served yet."""
        record = PolicyRecord(version=version, created_at=clock.now(), state="serving")
        await self._register.register_first(record)
        plan = await self._serving.change(
            lambda plan: (
                plan
                if plan.admissible
                else msgspec.structs.replace(plan, admissible=(Admissible(version, 0),))
            )
        )
        self._fleet.adopt(plan)

    async def publish(
        self,
        version: int | None,
        location: str,
        manifest_sha256: str | None,
        step: int | None,
        *,
        size_bytes: int | None = None,
        force: bool = False,
    ) -> tuple[int, Push | None]:
        """Register a version, and begin its push. Returns the version and the push; no push if the fleet is
        held, or if the version has to wait for a canary. A `version` of None stands for the next free number.

        Raises StateConflict for a number that is lower than the newest, that has other content, that the
        trainer has reserved for another location, or, without `force`, that is not the next one.
        """
        record = await self._registered(version, location, manifest_sha256, step, size_bytes, force)
        if self.auto_canary:
            self._driver.wake()
            return record.version, None
        return record.version, await self._begin(record.version)

    async def promote(self, version: int) -> Push:
        """Push a registered version under its own number, and end a hold. Raises ObjectNotFound."""
        await self.one(version)
        return await self._begin_forced(version, None, "promoted")

    async def roll_back(self, version: int, *, hold: bool) -> Push:
        """Push a registered version under its own number. With `hold`, later versions are not pushed until an
        operator releases or promotes one. Raises ObjectNotFound."""
        await self.one(version)
        held = ServingHold(clock.now(), f"rolled back to version {version}") if hold else None
        return await self._begin_forced(version, held, "rolled_back")

    async def hold(self, reason: str) -> ServingPlan:
        """From now on, versions are registered and not pushed."""
        held = ServingHold(clock.now(), reason)
        return await self._changed(lambda plan: msgspec.structs.replace(plan, hold=plan.hold or held))

    async def release(self) -> Push | None:
        """End the hold, and push the newest version that no canary has rolled back, unless it is served, or
        has to pass through a canary. Returns the push that begins."""
        await self._changed(lambda plan: msgspec.structs.replace(plan, hold=None))
        newest = newest_policy(await known_policies(self._register, self._serving))
        if newest is None or newest.version == self._fleet.plan.target:
            return None
        if self.auto_canary and newest.state == "published":  # never served: the driver begins its canary
            return None
        return await self._begin(newest.version)

    async def remove(self, version: int) -> None:
        """Forget a version, because its files are to be removed. Raises StateConflict if it is still needed,
        and ObjectNotFound."""
        while True:
            plan, packed = await self._serving.read_packed()
            if await self._register.record(version) is None:
                if await self._register.was_removed(version):
                    return
                raise await self._unknown(version)
            if version in plan.needed:
                raise StateConflict(f"a server serves version {version}, or is to serve it", code="needed")
            if version == max(await self._register.records()):
                raise StateConflict(f"version {version} is the newest one", code="needed")
            if await self._register.remove(version, packed):
                return

    async def report(self, push: Push) -> PushReport:
        """The push as it stands now, and what each server does in it."""
        plan = await self._serving.read()
        if plan.push is not None and plan.push.id == push.id:
            servers = await self._serving.server_pushes(push.id)
            return PushReport(plan.push, [servers[name] for name in sorted(servers)])
        ended = [each for each in await self._serving.last_pushes() if each.id == push.id]
        superseded = msgspec.structs.replace(push, state="superseded")
        return PushReport(ended[0] if ended else superseded, [])

    async def last_report(self, version: int) -> PushReport | None:
        """The last push of the version, if it is among the last ones."""
        plan = await self._serving.read()
        if plan.push is not None and plan.push.version == version:
            return await self.report(plan.push)
        pushes = await self._serving.last_pushes()
        return next((PushReport(each, []) for each in pushes if each.version == version), None)

    async def last_pushes(self) -> list[Push]:
        """The last pushes that ended, the newest first. Raises StorageUnavailable."""
        return await self._serving.last_pushes()

    async def ended(self, push: Push) -> PushReport:
        """Wait until the push has ended, or no server that could load the version is alive."""
        while True:
            report, servers = await self.report(push), self._fleet.rollout_servers
            absent = {each.server for each in report.servers if each.state == "unavailable"}
            apart = {each.id for each in servers if self._fleet.plan.own_version(each.id) is not None}
            if report.push.state != "pushing" or (
                servers and {each.id for each in servers} <= absent | apart
            ):
                return report
            await clock.sleep(WAIT_POLL_S)

    # The changes

    async def _begin(self, version: int) -> Push | None:
        """Begin a push, unless the fleet is held or has a newer target. Returns the push of this version, if
        there is one; a repeated request finds the first one's push."""

        def event(plan: ServingPlan) -> ServingPlan:
            if plan.hold is not None or plan.active_canary is not None:
                return plan
            if plan.target is not None and plan.target > version:
                return plan
            if plan.target == version and plan.push is not None and plan.push.version == version:
                return plan
            return plan.begun(version, clock.now(), force=False)

        push = (await self._changed(event)).push
        return push if push is not None and push.version == version else None

    async def _begin_forced(
        self, version: int, hold: ServingHold | None, canary_becomes: CanaryState
    ) -> Push:
        """Begin a push that an operator asked for. It ends an open canary, whose numbers stay."""
        report = msgspec.structs.replace(await self._log.report(), reason="an operator chose a version")

        def event(plan: ServingPlan) -> ServingPlan:
            canary, now = plan.active_canary, clock.now()
            other = canary_becomes == "promoted" and canary is not None and canary.version != version
            plan = plan.canary_closed("superseded" if other else canary_becomes, report, now)
            return msgspec.structs.replace(plan.begun(version, now, force=True), hold=hold)

        push = (await self._changed(event)).push
        assert push is not None  # noqa: S101 - it has just begun
        return push

    async def _changed(self, event: PlanEvent) -> ServingPlan:
        plan = await self._serving.change(event)
        self._fleet.adopt(plan)
        self._driver.wake()
        return plan

    async def _registered(
        self,
        version: int | None,
        location: str,
        manifest_sha256: str | None,
        step: int | None,
        size_bytes: int | None,
        force: bool,
    ) -> PolicyRecord:
        """Register the policy. Start again if a gateway or the trainer changed the register meanwhile."""
        while True:
            known = await self._register.look()
            asked = PolicyRecord(
                version=known.next_free if version is None else version,
                location=location,
                manifest_sha256=manifest_sha256,
                step=step,
                size_bytes=size_bytes,
                created_at=clock.now(),
                trace=traceparent() or msgspec.UNSET,
            )
            record = _accepted(asked, known, force=force)
            if await self._register.register(record, known):
                return record

    async def _unknown(self, version: int) -> ObjectNotFound:
        """The error for a version that cannot be served; it names those that can."""
        known = sorted(await self._register.records())
        why = f"no policy has version {version}"
        if await self._register.was_removed(version):
            why = f"the files of version {version} were removed"
        elif (report := await self.last_report(version)) is not None and report.push.error:
            why = f"{why}, because its push failed: {report.push.error}"
        named = ", ".join(map(str, known[-NAMED_VERSIONS:])) or "none"
        return ObjectNotFound(f"{why}; versions that can be served: {named}", param="version")


def _accepted(asked: PolicyRecord, known: KnownPolicies, *, force: bool) -> PolicyRecord:
    """The record to store. Raises StateConflict if the number or the content does not fit."""
    if asked.version < known.newest:
        raise StateConflict(f"version {asked.version} is lower than {known.newest}", param="version")
    registered, reserved = known.records.get(asked.version), known.reserved
    if registered is not None:
        if (registered.location, registered.manifest_sha256) != (asked.location, asked.manifest_sha256):
            raise StateConflict(f"version {asked.version} is known with other content", param="version")
        return registered
    if reserved.locations.get(asked.version) == asked.location:
        return asked
    # A reserved number may only be published with the location of its reservation.
    if asked.version <= reserved.version:
        message = f"the trainer has reserved version {reserved.version}, and every lower number"
        raise StateConflict(message, param="version")
    if asked.version > known.next_free and not force:
        message = f"the next free version is {known.next_free}. A higher number makes the answers of all "
        message += "sessions staler by the gap; force: true publishes it"
        raise StateConflict(message, param="version", code="version_gap")
    return asked


def _with_state(record: PolicyRecord, plan: ServingPlan) -> PolicyRecord:
    """The record with the state that follows from the plan."""
    if record.version == plan.serving:
        return msgspec.structs.replace(record, state="serving")
    return msgspec.structs.replace(record, state="retired") if record.state == "serving" else record
