"""The push: brings every rollout server to the version that the plan wants. One gateway at a time drives it.

What a server does in a push (`ServerPart`; each state is noted in Redis before the next request):

              ┌──── the pause is over ─── failed ◀───┐ any other fault
              ▼                                      │
    waiting ──▶ preparing ──▶ prepared ──▶ loading ──┼──▶ proved
    an order      a source      a slot      POST     └──▶ refused     the server says that it never will
                  POST /reload, prepare     /reload

    at any time while nothing runs:  it serves the version ▶ proved    it is not live ▶ unavailable ▶ waiting
    at any time:  another order, or another process of the server ▶ waiting, with the new order

What becomes of the push (`ended_as`), once no server is waited for:

    pushing ──▶ serving      a server has proved the version, or the fleet has no servers
            ──▶ failed       servers have refused it or failed, and none has proved it
            ──▶ superseded   a newer push begins (`ServingPlan.begun`)
    all are unavailable ──▶ it goes on

What always holds:
- Only the holder of the lease begins requests. Who loses it waits for no server; what servers do goes on.
- A version answers calls only after a server has proved it, in a push that the plan still knows.
- A server prepares before it loads. At most `max_unavailable` of the live servers load at once.
- A server that has refused an order is not asked again; one that fails is, after a pause that doubles. The
  push does not wait for it after ATTEMPTS.
- A server that has begun loads its version, even if a newer one is published meanwhile: otherwise a trainer
  that publishes faster than servers load would never be served. An operator's push (`force`) ends such work.
- A server that dies is not waited for: it gets the version when it comes back.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from redis.asyncio import Redis

from gateway.cancellation import cancel_and_wait
from gateway.fleet.fleet import Fleet
from gateway.fleet.fleet_server import FleetServer
from gateway.fleet.registrations import noted_as_loading
from gateway.policies.push_slots import FetchSources, KeptLease, LoadSlots
from gateway.policies.server_reload import NotLoaded, PushOrder, ServerReloads
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.contract.serving_plan import (
    CanaryReport,
    PushState,
    ServerPush,
    ServerPushState,
    ServingPlan,
)
from rollout_queue.protocol.rollout_server_messages import Reloaded
from rollout_queue.redis.plan_store import PlanEvent, PushLease, ServingRegister
from rollout_queue.redis.policy_register import PolicyRegister

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a server that fails, and does not refuse, is asked before the push ends without it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""The pause between two attempts; it doubles with each."""
ERROR_CHARACTERS = 2000
"""The longest error of a push that is stored."""
NOT_LOADED = "its servers did not load it"
BARE = "bare engines cannot load a policy: put a rollout server in front of each"


@dataclass(frozen=True)
class PushBounds:
    """How fast a push goes, and how far servers may lag behind (`GatewaySettings`)."""

    timeout_s: float
    lease_s: float
    max_unavailable: float
    fetch_fan_out: int
    max_version_lag: int


@dataclass
class ServerPart:
    """What is known of one server about one order: its state in the diagram."""

    order: PushOrder
    process: str | None
    """The server's process: another one is asked anew."""
    noted: ServerPush
    failures: int = 0
    next_at: float = 0.0
    """clock.monotonic() from which on it is asked again."""
    task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, server: FleetServer, order: PushOrder) -> "ServerPart":
        noted = ServerPush(push=order.push, server=server.id, state="waiting")
        return cls(order, server.registration.process, noted)

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def due(self) -> bool:
        """Whether the next attempt may begin."""
        return self.noted.state != "refused" and clock.monotonic() >= self.next_at

    @property
    def settled(self) -> bool:
        """Whether the push does not wait for this server any more."""
        if self.running:
            return False
        exhausted = self.noted.state == "failed" and self.failures >= ATTEMPTS
        return exhausted or self.noted.state in ("proved", "refused", "unavailable")

    def is_of(self, server: FleetServer, order: PushOrder) -> bool:
        """Whether this is about the same order to the same process."""
        return (self.order.key, self.process) == (order.key, server.registration.process)

    def must_end(self, server: FleetServer, order: PushOrder) -> bool:
        """Whether what runs has to end: the server hangs, or an operator's order has replaced this one before
        the server loads."""
        hangs = server.state == "dead" and server.late > 0
        return hangs or (order.force and self.order.push < order.push and not server.pushing)

    def has_files_of(self, order: PushOrder) -> bool:
        """Whether the server has the files of an order, and has verified them."""
        own, asked = self.order.record, order.record
        same = own.version == asked.version and own.manifest_sha256 == asked.manifest_sha256
        return same and self.noted.state in ("prepared", "loading", "proved")

    def did_not_load(self, error: NotLoaded) -> ServerPushState:
        """An attempt has failed. Returns the state after it."""
        self.failures += 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (self.failures - 1), LONGEST_PAUSE_S)
        self.next_at = clock.monotonic() + pause_s
        return "refused" if error.definite else "failed"


def ended_as(states: Collection[ServerPushState], *, no_servers: bool = False) -> PushState | None:
    """How a push ends in which every server is settled in one of these states; None if it goes on."""
    if "proved" in states or no_servers:
        return "serving"
    return None if set(states) == {"unavailable"} else "failed"


def errors_of(parts: Sequence[ServerPart]) -> str:
    found = "; ".join(f"{each.noted.server}: {each.noted.error}" for each in parts if each.noted.error)
    return found[:ERROR_CHARACTERS]


class PushDriver:
    """Drives pushes while this process has the lease. `step` is called again and again."""

    def __init__(self, redis: Redis, fleet: Fleet, bounds: PushBounds) -> None:
        self._fleet, self._max_version_lag = fleet, bounds.max_version_lag
        self._reloads = ServerReloads(fleet, bounds.timeout_s)
        self._serving = ServingRegister(redis, fleet.confirm, lambda: fleet.plan)
        self._register = PolicyRegister(redis, fleet.confirm)
        self._lease = KeptLease(PushLease(redis, bounds.lease_s), bounds.lease_s, self.wake)
        self._slots = LoadSlots(bounds.max_unavailable, lambda: len(self._live()))
        self._sources = FetchSources(bounds.fetch_fan_out)
        self._parts: dict[str, ServerPart] = {}
        """By server."""
        self.leads, self._waits_for_redis = False, False
        """Whether this process had the lease at its last step, and whether that step failed without Redis."""
        self._capacity, self._push = 1.0, 0  # what is left of the fleet in this push, and the push's id
        self._noted: frozenset[tuple[int, int]] = frozenset()
        """The keys of the orders whose state on a server is stored."""
        self._unwritten: dict[str, ServerPush] = {}
        """The last note of each server that is not in Redis yet."""
        self._writing = asyncio.Lock()
        self._records: dict[int, PolicyRecord | None] = {}
        """The policies that the last step wanted, as far as they are known."""
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
            plan, packed = await self._read_plan()
            orders = await self._orders_of(plan, packed)
            for server, order in orders:
                if self._lease.held:
                    await self._consider(server, order)
            await self._write_notes()
            self._measure_capacity()
            self._forget_servers()
            await self._judge_canary(plan)
            await self._judge_push(plan, orders)
            self._waits_for_redis = False
        except StorageUnavailable as error:
            if not self._waits_for_redis:
                logger.warning("pushes wait for Redis: %s", error)
            self._waits_for_redis = True

    async def _stop(self) -> None:
        """Begin nothing more, and wait for no server. What servers have begun goes on."""
        running = [each.task for each in self._parts.values() if each.task is not None and each.running]
        await cancel_and_wait(running)
        self._parts.clear()
        self._unwritten.clear()

    # What each server is to serve

    async def _read_plan(self) -> tuple[ServingPlan, bytes]:
        plan, packed = await self._serving.read_packed()
        if plan == ServingPlan() != self._fleet.plan:  # Redis may have lost it
            await self._fleet.refresh()
            plan, packed = await self._serving.read_packed()
        self._fleet.adopt(plan)
        if plan.push is not None and plan.push.id != self._push:
            self._push, self._capacity = plan.push.id, 1.0
        return plan, packed

    async def _orders_of(self, plan: ServingPlan, packed: bytes) -> list[tuple[FleetServer, PushOrder]]:
        """What each server is to serve now; no server is there while there is no policy."""
        orders: list[tuple[FleetServer, PushOrder]] = []
        found: dict[int, PolicyRecord | None] = {}
        for server in self._fleet.rollout_servers:
            own = plan.own_version(server.id)
            version = plan.target if own is None else own.version
            if version is None or server.ahead:
                continue
            if version not in found:
                found[version] = await self._record(version, packed)
            if (record := found[version]) is None:
                continue
            fleets = PushOrder.of(plan, record)
            orders.append((server, PushOrder(record, own.id, force=True, own=True) if own else fleets))
        # One that is not registered at this moment is still known; so is one that no server waits for now.
        known = self._records | {version: record for version, record in found.items() if record is not None}
        self._records = {each: known.get(each) for each in (*found, *(known.keys() & plan.needed))}
        # After a failed push, servers stay with the former version; what they did in the push stays noted.
        pushed = None if plan.push is None else plan.push.version
        self._noted = frozenset(order.key for _, order in orders if order.own or order.version == pushed)
        return orders

    async def _record(self, version: int, packed: bytes) -> PolicyRecord | None:
        """The policy, which the plan wants. It is registered again if Redis has lost it. None if nobody knows
        it, which is logged once."""
        if (record := await self._register.record(version)) is not None:
            return record
        if (known := self._records.get(version)) is not None:
            if not await self._register.register_again(known, packed):
                return None
            logger.warning("version %d was not registered any more, and is registered again", version)
        elif version not in self._records:
            logger.error("version %d is to be served, and is not registered", version)
        return known

    # One server

    async def _consider(self, server: FleetServer, order: PushOrder) -> None:
        """Begin, end or note the work on one server."""
        part = self._parts.get(server.id)
        if part is not None and part.task is not None and part.running:
            if not part.must_end(server, order):
                return
            await cancel_and_wait([part.task])
        if part is None or not part.is_of(server, order):
            part = self._parts[server.id] = ServerPart.of(server, order)
        if not server.live:
            state = "drained" if server.drained else server.state
            self._note(part, "unavailable", error=f"is {state}, and takes the version later")
        elif self._serves(server, part):
            await self._prove(part)
        elif part.due:
            part.task = asyncio.create_task(self._bring(server, part), name=f"push to {server.id}")
            part.task.add_done_callback(self._bring_ended)

    async def _bring(self, server: FleetServer, part: ServerPart) -> None:
        """Have the server prepare and load the version."""
        order, began_at = part.order, clock.monotonic()
        try:
            async with self._sources.taken(lambda: self._peers(order), order.has_any_readers) as peer:
                await self._store(part, "preparing")
                await self._reloads.prepare(server, order, peer)
                await self._store(part, "prepared")  # from now on, others may read from this server
            async with self._slots.taken():
                loaded = await self._load(server, part)
        except StorageUnavailable as error:
            logger.warning("what server %s serves is noted later: %s", server.id, error)
            return
        except NotLoaded as error:
            state = part.did_not_load(error)
            self._note(part, state, error=str(error), total_s=clock.monotonic() - began_at)
            logger.error("server %s did not load version %d: %s", server.id, order.version, error)
            return
        total_s = clock.monotonic() - began_at
        part.noted = replace(part.noted, paused_s=loaded.paused_s, total_s=total_s)
        await self._prove(part)

    async def _load(self, server: FleetServer, part: ServerPart) -> Reloaded:
        """Have the server load the version, and send it no calls meanwhile. Raises NotLoaded."""
        server.pushing = True
        try:
            self._measure_capacity()
            await self._store(part, "loading")
            async with noted_as_loading(self._fleet.redis, server.id):
                loaded = await self._reloads.load(server, part.order)
            await self._admit(part.order)  # first, so that the server is always in rotation
            record, push = part.order.record, part.order.push
            server.has_loaded(record.version, record.manifest_sha256, loaded.adapters, push)
            return loaded
        finally:
            server.pushing = False

    def _bring_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
        self.wake()

    def _serves(self, server: FleetServer, part: ServerPart) -> bool:
        """Whether the server is known to serve the content of the order's version."""
        record = part.order.record
        if server.version != record.version:
            return False
        if record.location is None or record.manifest_sha256 is not None:
            return server.manifest_sha256 == record.manifest_sha256
        return part.noted.state == "proved" or record.version in self._fleet.plan.versions

    async def _prove(self, part: ServerPart) -> None:
        """The server serves the version of the order."""
        part.failures = 0
        await self._admit(part.order)
        self._note(part, "proved", version_served=part.order.version)

    async def _admit(self, order: PushOrder) -> None:
        """A server has proved the version. If it is the fleet's, it may answer calls."""
        if order.own or any((each.push, each.version) == order.key for each in self._fleet.plan.admissible):
            return
        if order.record.state != "serving":
            await self._register.store(replace(order.record, state="serving"))
        former = self._fleet.serving
        plan = await self._change(lambda plan: plan.proved(order.version, order.push, self._max_version_lag))
        if plan.serving != former:
            logger.info("version %s is served", plan.serving)

    def _peers(self, order: PushOrder) -> list[str]:
        """The URLs of the live servers that have the files of the version."""
        having = {name for name, each in self._parts.items() if each.has_files_of(order)}
        return [
            server.registration.url
            for server in self._fleet.rollout_servers
            if server.live and server.id in having and server.registration.url is not None
        ]

    def _forget_servers(self) -> None:
        gone = [i for i, each in self._parts.items() if i not in self._fleet.servers and not each.running]
        for server_id in gone:
            del self._parts[server_id]

    # The notes: what is noted while a write runs goes with the next

    async def _store(self, part: ServerPart, state: ServerPushState) -> None:
        """Note it, and store it before anything else is done."""
        self._note(part, state)
        await self._write_notes()

    def _note(
        self,
        part: ServerPart,
        state: ServerPushState,
        *,
        version_served: int | None = None,
        error: str | None = None,
        total_s: float | None = None,
    ) -> None:
        """Note what the server does, and have the next write store it, if it is new."""
        before = part.noted
        total_s = before.total_s if total_s is None else total_s
        noted = replace(before, state=state, version_served=version_served, error=error, total_s=total_s)
        part.noted = noted
        if noted != before and part.order.key in self._noted:
            self._unwritten[noted.server] = noted

    async def _write_notes(self) -> None:
        """Store the notes, also what is noted meanwhile. If Redis fails, they go with a later write."""
        async with self._writing:
            while self._unwritten:
                written, self._unwritten = self._unwritten, {}
                try:
                    await self._serving.note_servers(written.values())
                except StorageUnavailable as error:
                    self._unwritten = written | self._unwritten
                    logger.warning("what %d servers do in the push is not stored: %s", len(written), error)
                    return

    # The whole push, and the canary

    async def _judge_push(self, plan: ServingPlan, orders: Sequence[tuple[FleetServer, PushOrder]]) -> None:
        """End the push if no server is waited for."""
        pushed = [server.id for server, order in orders if not order.own]
        parts = [self._parts[each] for each in pushed if each in self._parts]
        if not parts and self._fleet.rollout_servers:
            return  # every server has its own version
        record = None if plan.target is None else await self._register.record(plan.target)
        await self._write_notes()  # whoever learns that the push has ended reads what the servers did
        if record is None or not plan.pushing:
            return
        order, states = PushOrder.of(plan, record), {each.noted.state for each in parts}
        if not all(each.settled and each.order.key == order.key for each in parts):
            return
        if (ended := ended_as(states, no_servers=not self._fleet.servers)) is None:
            return
        if "proved" in states or not await self._finds_more_servers():
            await self._end_as(ended, order, parts)
        self.wake()

    async def _end_as(self, ended: PushState, order: PushOrder, parts: Sequence[ServerPart]) -> None:
        states = {each.noted.state for each in parts}
        if ended == "serving":
            if not parts:  # there are no servers, so none has admitted it
                await self._admit(order)
            await self._end(order.push, "serving")
            return
        await self._end(order.push, "failed", errors_of(parts) or BARE, refused="failed" not in states)
        logger.error("version %d was refused by every server", order.version)
        if states <= {"refused"} and order.record.state == "published":
            await self._free_number(order.record)

    async def _finds_more_servers(self) -> bool:
        """Whether a server has registered at another gateway since the last poll. It can still prove it."""
        known = set(self._fleet.servers)
        await self._fleet.refresh()
        return not self._fleet.servers.keys() <= known

    async def _free_number(self, record: PolicyRecord) -> None:
        """Every server has refused the version. One of its canary may have sampled with it before."""
        if record.version not in {each.version for each in await self._serving.last_canaries()}:
            await self._register.forget(record)

    async def _judge_canary(self, plan: ServingPlan) -> None:
        """Open the canary once its servers have proved the version, or roll it back if they cannot."""
        canary = plan.active_canary
        if canary is None or canary.state != "opening":
            return
        own = [each for each in self._parts.values() if each.order.push == canary.id]
        if not own or not all(each.settled for each in own):
            return
        match ended_as({each.noted.state for each in own}):
            case "serving":
                await self._change(lambda plan: plan.canary_opened(canary.id, clock.now()))
                logger.info("the canary of version %d is open", canary.version)
            case "failed":
                report = CanaryReport(reason=f"{NOT_LOADED}: {errors_of(own)}")
                now = clock.now()
                await self._change(lambda plan: plan.canary_ended(canary.id, "rolled_back", report, now))

    async def _end(
        self, push: int, state: PushState, error: str | None = None, *, refused: bool = False
    ) -> None:
        ended = partial(ServingPlan.ended, error=error, capacity=self._capacity, refused=refused)
        now = clock.now()
        await self._change(lambda plan: ended(plan, push, state, now))

    async def _change(self, event: PlanEvent) -> ServingPlan:
        plan = await self._serving.change(event)
        self._fleet.adopt(plan)
        return plan

    # How much of the fleet is left

    def _live(self) -> list[FleetServer]:
        """The live servers that take part in pushes."""
        plan = self._fleet.plan
        return [
            each for each in self._fleet.rollout_servers if each.live and plan.own_version(each.id) is None
        ]

    def _measure_capacity(self) -> None:
        if live := len(self._live()):
            self._capacity = min(self._capacity, self._fleet.in_rotation / live)
