"""Where rollout servers find versions: on a shared disk, at the trainer's address, or in an object store.

PolicyStore ─ the trainer's own disk ─┬─▶ file://…, or http://…: read from there
                                      └─▶ copied: files ─ manifest.json ─ STABLE ─▶ s3://bucket/path/v00000012
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Protocol

from rollout_queue import clock
from rollout_queue.contract.published_policy import MANIFEST, STABLE, ObjectPrefix
from rollout_queue.http.object_store import ObjectAbsent, ObjectStore, opened
from rollout_queue.settings import ObjectStoreSettings
from trainer_service.heartbeat import Stopped
from trainer_service.settings import TrainerSettings
from trainer_service.storage.policy_store import PolicyStore

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""How long a store may be silent before an attempt has failed."""
STOP_POLL_S = 0.2
LAST = (MANIFEST, STABLE)
"""What is written after all other files, and removed before them, the other way round."""


class PolicyPlace(Protocol):
    """A place where rollout servers find versions. `offer` and `withdraw` raise StoreUnavailable, and Stopped
    when the trainer is told to stop."""

    def location(self, version: int) -> str: ...

    def offer(self, version: int) -> None:
        """Let servers find a version, which is on the trainer's disk."""

    def withdraw(self, version: int) -> None:
        """Undo `offer`, before the version is removed from the trainer's disk."""


class DiskPlace:
    """The trainer's directory of versions, on a disk that the servers share."""

    def __init__(self, versions: PolicyStore) -> None:
        self._versions = versions

    def location(self, version: int) -> str:
        return self._versions.path_of(version).resolve().as_uri()

    def offer(self, version: int) -> None:
        pass

    def withdraw(self, version: int) -> None:
        pass


class HttpPlace(DiskPlace):
    """The trainer's HTTP address, which offers the same directory."""

    def __init__(self, versions: PolicyStore, url: str) -> None:
        super().__init__(versions)
        self._url = url.rstrip("/")

    def location(self, version: int) -> str:
        return f"{self._url}/{version}"


class ObjectStorePlace:
    """An S3-compatible store, to which versions are copied. Each call has its own client and event loop."""

    def __init__(
        self,
        versions: PolicyStore,
        root: ObjectPrefix,
        settings: ObjectStoreSettings,
        stopping: Callable[[], bool],
    ) -> None:
        self._versions, self._root, self._settings, self._stopping = versions, root, settings, stopping
        self._begun: int | None = None
        """The version that is being copied."""
        self._copied: set[str] = set()
        """The names of its files that are in the store, so that a retry goes on after them."""

    def location(self, version: int) -> str:
        return self._place(version).url

    def offer(self, version: int) -> None:
        self._run(self._copy(version))

    def withdraw(self, version: int) -> None:
        self._run(self._remove(version))

    async def _copy(self, version: int) -> None:
        place, directory = self._place(version), self._versions.path_of(version)
        async with opened(self._settings, SILENCE_S) as store:
            if self._begun == version:
                await store.end_uploads(place)  # of the attempt that failed
            else:
                if await _has(store, place, directory):
                    return
                await _clear(store, place)  # what a dead process left
                self._begun, self._copied = version, set()
            for name in [*_names(directory), *LAST]:
                if name not in self._copied:
                    await store.write(place.below(name), directory / name)
                    self._copied.add(name)
        self._begun = None
        logger.info("version %d is in the object store", version)

    async def _remove(self, version: int) -> None:
        async with opened(self._settings, SILENCE_S) as store:
            await _clear(store, self._place(version))

    def _place(self, version: int) -> ObjectPrefix:
        return self._root.below(self._versions.path_of(version).name)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(self._until_stopped(work))

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        while not task.done():
            with suppress(TimeoutError):
                async with clock.timeout(STOP_POLL_S):
                    await asyncio.wait([task])
            if self._stopping():
                task.cancel()
        if task.cancelled():
            raise Stopped
        task.result()


def place_of(settings: TrainerSettings, versions: PolicyStore, stopping: Callable[[], bool]) -> PolicyPlace:
    """The place that the settings name."""
    url = settings.publish_url
    if url is None:
        return DiskPlace(versions)
    if url.startswith("s3://"):
        return ObjectStorePlace(versions, ObjectPrefix.parse(url), settings.object_store, stopping)
    return HttpPlace(versions, url)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name not in LAST)


async def _has(store: ObjectStore, place: ObjectPrefix, directory: Path) -> bool:
    """Whether the version in `directory` is in the store already, complete and with the same content."""
    if STABLE not in await store.names(place):
        return False
    own, text = (directory / MANIFEST).read_bytes(), b""
    with suppress(ObjectAbsent):
        async with aclosing(store.read(place.below(MANIFEST))) as chunks:
            async for chunk in chunks:
                text += chunk
                if not own.startswith(text):
                    break
    return text == own


async def _clear(store: ObjectStore, place: ObjectPrefix) -> None:
    """Remove all objects below `place`, in an order in which no server takes the rest for a version."""
    names = await store.names(place)
    for name in [*(each for each in reversed(LAST) if each in names), *(set(names) - set(LAST))]:
        await store.remove(place.below(name))
    await store.end_uploads(place)
