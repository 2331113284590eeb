"""What operators do with canaries and pins: begin and end them, and read their numbers."""

from collections.abc import Sequence

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.errors import ObjectNotFound, StateConflict
from gateway.fleet.fleet import Fleet
from gateway.policies.canary_plan import canary_begun, canary_servers
from gateway.policies.push import PushDriver
from rollout_queue import clock
from rollout_queue.contract.serving_plan import Canary, CanaryGates, Pin, ServingPlan, Sticky
from rollout_queue.redis.plan_store import CanaryLog, PlanEvent, ServingRegister


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
