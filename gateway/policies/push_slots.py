"""What a push waits for: the lease, a source of the files, and a slot to load while others take calls."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from gateway.cancellation import cancel_and_wait
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis.plan_store import PushLease


class LoadSlots:
    """Lets a server load once few enough others do. Who waits longest is next."""

    def __init__(self, max_unavailable: float, live: Callable[[], int]) -> None:
        """`max_unavailable` is a share of the live servers, whose number `live` returns."""
        self._max_unavailable = max_unavailable
        self._live = live
        self._loading = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def allowed(self) -> int:
        """How many servers may load at once: at least one."""
        return max(1, int(self._max_unavailable * self._live()))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a slot, and have it while the block runs."""
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(given)
        self._give()
        try:
            await given
            yield
        finally:
            if given.done() and not given.cancelled():
                self._loading -= 1
            self._give()

    def _give(self) -> None:
        """Give every free slot to a server that waits."""
        allowed = self.allowed
        while self._waiting and self._loading < allowed:
            given = self._waiting.popleft()
            if not given.done():  # else its server is not waited for any more
                self._loading += 1
                given.set_result(None)


ORIGIN = ""
"""The source of a version that has no other: its location."""


class FetchSources:
    """Lets a server fetch a version once few enough others read from the same source.

    The sources are the version's location, and the servers that have its files already. So the number of
    sources grows with each server, and the location is read by few. Who waits longest is next.
    """

    def __init__(self, fan_out: int) -> None:
        """`fan_out`: how many servers may read from one source at once."""
        self._fan_out = fan_out
        self._readers: Counter[str] = Counter()
        self._waiting: deque[tuple[asyncio.Future[str], Callable[[], Sequence[str]]]] = deque()

    @asynccontextmanager
    async def taken(self, peers: Callable[[], Sequence[str]], any_readers: bool) -> AsyncIterator[str | None]:
        """Wait for a source, and have it while the block runs: the URL of one of the `peers`, or None for the
        version's location. A peer comes before the location. With `any_readers`, the location takes all."""
        if any_readers:
            yield None
            return
        given: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((given, peers))
        self._give()
        try:
            yield await given or None
        finally:
            if given.done() and not given.cancelled():
                self._readers[given.result()] -= 1
                self._readers += Counter()  # drops those without readers
            self._give()

    def _give(self) -> None:
        """Give every free source to a server that waits."""
        while self._waiting:
            given, peers = self._waiting[0]
            if not given.done():  # else its server is not waited for any more
                if (source := self._free(peers())) is None:
                    return
                self._readers[source] += 1
                given.set_result(source)
            self._waiting.popleft()

    def _free(self, peers: Sequence[str]) -> str | None:
        """The source with the fewest readers that may have one more; None if there is none."""
        found = min(peers, key=lambda peer: self._readers[peer], default=ORIGIN)
        for source in (found, ORIGIN):
            if self._readers[source] < self._fan_out:
                return source
        return None


logger = logging.getLogger(__name__)


class KeptLease:
    """Claimed by `hold`, and kept until `release`, or until another process has it."""

    def __init__(self, lease: PushLease, lease_s: float, lost: Callable[[], None]) -> None:
        """`lost` is called when the lease is not held any more."""
        self._lease, self._lease_s, self._lost = lease, lease_s, lost
        self._until = float("-inf")
        self._keeping: asyncio.Task[None] | None = None

    @property
    def held(self) -> bool:
        return clock.monotonic() < self._until

    async def hold(self) -> bool:
        """Claim or renew the lease. Returns whether this process holds it now. Raises StorageUnavailable."""
        await self._renew()
        if self.held and (self._keeping is None or self._keeping.done()):
            self._keeping = asyncio.create_task(self._keep(), name="lease of pushes")
        return self.held

    async def release(self) -> None:
        """Let another process claim the lease at once. Raises StorageUnavailable."""
        if self._keeping is not None:
            await cancel_and_wait([self._keeping])
        self._until = float("-inf")
        await self._lease.release()

    async def _renew(self) -> None:
        began_at = clock.monotonic()
        held = await self._lease.hold()
        self._until = began_at + self._lease_s if held else float("-inf")

    async def _keep(self) -> None:
        while self.held:
            await clock.sleep(self._lease_s / 3)
            try:
                await self._renew()
            except StorageUnavailable as error:
                logger.warning("the lease of pushes is not renewed: %s", error)
        self._lost()
