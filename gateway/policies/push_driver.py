"""Brings every rollout server to the version that the plan wants. One gateway process at a time does it.

lease ─▶ plan ─▶ for each server: prepare ─▶ wait for a slot ─▶ load ─▶ proved ─▶ plan
                     └─ refused, failed, unavailable ─▶ noted, and tried again later

A server that dies is not waited for: it gets the version when it comes back. A server that has begun to
prepare a version loads it, even if a newer one is published meanwhile. Otherwise a trainer that publishes
faster than servers load would never be served. An operator's push (`force`) ends such work.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.cancellation import cancel_and_wait
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.registrations import noted_as_loading
from gateway.policies.attempts import Attempts
from gateway.policies.push_lease import KeptLease
from gateway.policies.push_progress import PushProgress
from gateway.policies.rolling import FetchSources, LoadSlots
from gateway.policies.server_notes import ServerNotes
from gateway.policies.server_reload import NotLoaded, PushOrder, ServerReloads
from gateway.policies.wanted_policies import WantedPolicies
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.serving_plan import ServerPush, ServerPushState, ServingPlan
from rollout_queue.protocol.rollout_server_messages import Reloaded
from rollout_queue.redis.plan_store import PushLease, ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""The pause between two attempts; it doubles with each."""


@dataclass(frozen=True)
class PushBounds:
    """How fast a push goes, and how far servers may lag behind (`GatewaySettings`)."""

    timeout_s: float
    lease_s: float
    max_unavailable: float
    fetch_fan_out: int
    max_version_lag: int


class PushDriver:
    """Drives pushes while this process has the lease. `step` is called again and again."""

    def __init__(self, redis: Redis, fleet: Fleet, bounds: PushBounds) -> None:
        self._fleet = fleet
        self._reloads = ServerReloads(fleet, bounds.timeout_s)
        self._serving = ServingRegister(redis, fleet.confirm, lambda: fleet.plan)
        self._register = PolicyRegister(redis, fleet.confirm)
        self._lease = KeptLease(PushLease(redis, bounds.lease_s), bounds.lease_s, self.wake)
        self._notes = ServerNotes(self._serving)
        self._progress = PushProgress(self._serving, self._register, fleet, bounds.max_version_lag)
        self._slots = LoadSlots(bounds.max_unavailable, lambda: len(self._live()))
        self._sources = FetchSources(bounds.fetch_fan_out)
        self._attempts: dict[str, Attempts] = {}  # by server
        self.leads, self._waits_for_redis = False, False
        """Whether this process had the lease at its last step, and whether that step failed without Redis."""
        self._capacity, self._push = 1.0, 0  # what is left of the fleet in this push, and the push's id
        self._noted: frozenset[tuple[int, int]] = frozenset()
        """The keys of the orders whose state on a server is stored."""
        self._wanted = WantedPolicies(self._register)
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Have the next step begin at once."""
        self._wake.set()

    async def wait(self, at_most_s: float) -> None:
        """Return when the next step is due."""
        try:
            async with clock.timeout(at_most_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def close(self) -> None:
        await self._stop()
        try:
            await self._lease.release()
        except StorageUnavailable as error:
            logger.warning("the lease of pushes was not released, and expires: %s", error)

    async def step(self) -> None:
        """Begin what can begin now, and end the push if there is nothing left to wait for."""
        try:
            self.leads = await self._lease.hold()
            if not self.leads:
                await self._stop()
                return
            plan, packed = await self._serving.read_packed()
            if plan == ServingPlan() != self._fleet.plan:  # Redis may have lost it
                await self._fleet.refresh()
                plan, packed = await self._serving.read_packed()
            self._fleet.adopt(plan)
            if not self._fleet.servers:  # one may have registered at another gateway since the last poll
                await self._fleet.refresh()
            orders = await self._orders_of(plan, packed)
            for server, order in orders:
                if self._lease.held:
                    await self._consider(server, order)
            await self._notes.write()
            self._measure_capacity()
            self._forget_servers()
            await self._judge(plan, orders)
            self._waits_for_redis = False
        except StorageUnavailable as error:
            if not self._waits_for_redis:
                logger.warning("pushes wait for Redis: %s", error)
            self._waits_for_redis = True

    async def _orders_of(self, plan: ServingPlan, packed: bytes) -> list[tuple[FleetServer, PushOrder]]:
        """What each server is to serve now; no server is there while there is no policy."""
        orders: list[tuple[FleetServer, PushOrder]] = []
        for server in self._fleet.rollout_servers:
            own = plan.own_version(server.id)
            version = plan.target if own is None else own.version
            if version is None or server.ahead:
                continue
            if (record := await self._wanted.record(version, packed)) is None:
                continue
            fleets = PushOrder.of(plan, record)
            orders.append((server, PushOrder(record, own.id, force=True, own=True) if own else fleets))
        self._wanted.end_look()
        # After a failed push, servers stay with the former version; what they did in the push stays noted.
        pushed = None if plan.push is None else plan.push.version
        self._noted = frozenset(order.key for _, order in orders if order.own or order.version == pushed)
        if plan.push is not None and plan.push.id != self._push:
            self._push, self._capacity = plan.push.id, 1.0
        return orders

    async def _judge(self, plan: ServingPlan, orders: Sequence[tuple[FleetServer, PushOrder]]) -> None:
        """End the push, or open the canary, if no server is waited for."""
        pushed = [server.id for server, order in orders if not order.own]
        fleets = [self._attempts[each] for each in pushed if each in self._attempts]
        await self._progress.judge_canary(plan, list(self._attempts.values()))
        if not fleets and self._fleet.rollout_servers:
            return  # every server has its own version
        record = None if plan.target is None else await self._register.record(plan.target)
        await self._notes.write()  # whoever hears that the push has ended reads what the servers did
        if record is not None and await self._progress.judge_push(
            plan, PushOrder.of(plan, record), fleets, self._capacity
        ):
            self.wake()

    # One server

    async def _consider(self, server: FleetServer, order: PushOrder) -> None:
        """Begin, end or note the work on one server."""
        attempts = self._attempts.get(server.id)
        if attempts is not None and attempts.running:
            hangs = server.state == "dead" and server.late
            replaced = order.force and attempts.order.push < order.push and not server.pushing
            if not (hangs or replaced):
                return
            assert attempts.task is not None  # noqa: S101 - it is running
            await cancel_and_wait([attempts.task])
        process = server.registration.process
        if attempts is None or (attempts.order.key, attempts.process) != (order.key, process):
            noted = ServerPush(push=order.push, server=server.id, state="waiting")
            attempts = Attempts(order, process, noted)
            self._attempts[server.id] = attempts
        await self._advance(server, attempts)

    async def _advance(self, server: FleetServer, attempts: Attempts) -> None:
        """Note where a server stands on which nothing runs, and begin the next attempt if one is due."""
        if not server.live:
            state = "drained" if server.drained else server.state
            self._note(attempts, "unavailable", error=f"is {state}, and takes the version later")
        elif self._serves(server, attempts):
            await self._prove(attempts)
        elif attempts.noted.state != "refused" and clock.monotonic() >= attempts.next_at:
            attempts.task = asyncio.create_task(self._bring(server, attempts), name=f"push to {server.id}")
            attempts.task.add_done_callback(self._bring_ended)

    async def _bring(self, server: FleetServer, attempts: Attempts) -> None:
        """Have the server prepare and load the version."""
        order, began_at = attempts.order, clock.monotonic()
        try:
            async with self._sources.taken(lambda: self._peers(order), order.has_any_readers) as peer:
                await self._store(attempts, "preparing")
                await self._reloads.prepare(server, order, peer)
                await self._store(attempts, "prepared")  # from now on, others may read from this server
            async with self._slots.taken():
                loaded = await self._load(server, attempts)
        except StorageUnavailable as error:
            logger.warning("what server %s serves is noted later: %s", server.id, error)
            return
        except NotLoaded as error:
            attempts.failures += 1
            pause_s = min(FIRST_PAUSE_S * 2.0 ** (attempts.failures - 1), LONGEST_PAUSE_S)
            attempts.next_at = clock.monotonic() + pause_s
            state: ServerPushState = "refused" if error.definite else "failed"
            self._note(attempts, state, error=str(error), total_s=clock.monotonic() - began_at)
            logger.error("server %s did not load version %d: %s", server.id, order.version, error)
            return
        total_s = clock.monotonic() - began_at
        attempts.noted = replace(attempts.noted, paused_s=loaded.paused_s, total_s=total_s)
        await self._prove(attempts)

    async def _load(self, server: FleetServer, attempts: Attempts) -> Reloaded:
        """Have the server load the version, and send it no calls meanwhile. Raises NotLoaded."""
        server.pushing = True
        try:
            self._measure_capacity()
            await self._store(attempts, "loading")
            async with noted_as_loading(self._fleet.redis, server.id):
                loaded = await self._reloads.load(server, attempts.order)
            await self._progress.admit(attempts.order)  # first, so that the server is always in rotation
            record, push = attempts.order.record, attempts.order.push
            server.has_loaded(record.version, record.manifest_sha256, loaded.adapters, push)
            return loaded
        finally:
            server.pushing = False

    def _bring_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
        self.wake()

    def _serves(self, server: FleetServer, attempts: Attempts) -> bool:
        """Whether the server is known to serve the content of the order's version."""
        record = attempts.order.record
        if server.version != record.version:
            return False
        if record.location is None or record.manifest_sha256 is not None:
            return server.manifest_sha256 == record.manifest_sha256
        return attempts.noted.state == "proved" or record.version in self._fleet.plan.versions

    async def _prove(self, attempts: Attempts) -> None:
        """The server serves the version of the order."""
        attempts.failures = 0
        await self._progress.admit(attempts.order)
        self._note(attempts, "proved", version_served=attempts.order.version)

    async def _store(self, attempts: Attempts, state: ServerPushState) -> None:
        """Note it, and store it before anything else is done."""
        self._note(attempts, state)
        await self._notes.write()

    def _note(
        self,
        attempts: Attempts,
        state: ServerPushState,
        *,
        version_served: int | None = None,
        error: str | None = None,
        total_s: float | None = None,
    ) -> None:
        """Note what the server does, and have the next write store it, if it is new."""
        before = attempts.noted
        total_s = before.total_s if total_s is None else total_s
        noted = replace(before, state=state, version_served=version_served, error=error, total_s=total_s)
        attempts.noted = noted
        if noted != before and attempts.order.key in self._noted:
            self._notes.put(noted)

    def _peers(self, order: PushOrder) -> list[str]:
        """The URLs of the live servers that have the files of the version."""
        having = {name for name, each in self._attempts.items() if each.has_files_of(order)}
        return [
            server.registration.url
            for server in self._fleet.rollout_servers
            if server.live and server.id in having and server.registration.url is not None
        ]

    def _forget_servers(self) -> None:
        gone = [i for i, each in self._attempts.items() if i not in self._fleet.servers and not each.running]
        for server_id in gone:
            del self._attempts[server_id]

    def _live(self) -> list[FleetServer]:
        """The live servers that take part in pushes."""
        plan = self._fleet.plan
        return [
            each for each in self._fleet.rollout_servers if each.live and plan.own_version(each.id) is None
        ]

    def _measure_capacity(self) -> None:
        if live := len(self._live()):
            self._capacity = min(self._capacity, self._fleet.in_rotation / live)

    async def _stop(self) -> None:
        """Begin nothing more, and wait for no server. What servers have begun goes on."""
        running = [each.task for each in self._attempts.values() if each.task is not None and each.running]
        await cancel_and_wait(running)
        self._attempts.clear()
        self._notes.forget()
