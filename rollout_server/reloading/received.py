"""Versions that the engine receives as tensors: which ones, and their files, which follow after the load.

manifest says `collective`, and the files are not here ─▶ the engine receives ─▶ the files are fetched
engine starts again ─▶ files of the last version ─▶ else of the one before ─▶ else the initial model
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollout_queue.contract.published_policy import MANIFEST, Manifest
from rollout_server.errors import ReloadError
from rollout_server.reloading.collective import TensorReceiver
from rollout_server.weights.failures import as_reload_errors
from rollout_server.weights.fetch import Fetcher
from rollout_server.weights.locations import Location
from rollout_server.weights.policy import LocalPolicy, WantedPolicy
from rollout_server.weights.safetensors_file import BrokenWeights
from rollout_server.weights.store import WeightsStore, manifest_digest
from rollout_server.weights.verify import read_manifest, verify_tensors

logger = logging.getLogger(__name__)

Prepare = Callable[[WantedPolicy], Awaitable[LocalPolicy]]
"""Fetches and verifies the files of a version. Raises ReloadError."""


class ReceivedVersions:
    """Knows the version that the engine received last, and fetches its files."""

    def __init__(
        self, store: WeightsStore, fetcher: Fetcher, receiver: TensorReceiver, prepare: Prepare
    ) -> None:
        self._store, self._fetcher = store, fetcher
        self.receiver = receiver
        self._prepare = prepare
        self._last: tuple[WantedPolicy, LocalPolicy] | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def offered(self, wanted: WantedPolicy, place: Location) -> tuple[LocalPolicy, Manifest] | None:
        """The version and its manifest, if the trainer sends its tensors and they fit the engine's model;
        None if its files are here already, or have to be loaded. Raises ReloadError."""
        announced = wanted.manifest_sha256.lower() if wanted.manifest_sha256 else None
        if announced and self._store.path_of(wanted.version, announced).exists():
            return None
        with as_reload_errors(wanted.version):
            text = await self._fetcher.manifest(place)
            digest = manifest_digest(text)
            if announced not in (None, digest):
                raise BrokenWeights("its SHA-256 is not the announced one", file=MANIFEST)
            manifest = read_manifest(text, wanted.version)
            policy = LocalPolicy(wanted.version, self._store.path_of(wanted.version, digest), digest)
            if not manifest.collective or policy.directory.exists():
                return None
            verify_tensors(manifest, self._store.expected)
            return policy, manifest

    async def can_be_received(self, wanted: WantedPolicy, place: Location) -> bool:
        """Whether the trainer has the tensors now. Raises ReloadError."""
        offered = await self.offered(wanted, place)
        return offered is not None and await self.receiver.offered(wanted.version)

    def follow(self, wanted: WantedPolicy, policy: LocalPolicy) -> None:
        """The engine has received `policy`: fetch its files in the background. Restarts of the engine and
        other servers need them."""
        if self._fetching is not None:
            self._fetching.cancel()
        wanted = replace(wanted, manifest_sha256=policy.manifest_sha256)  # then files that are here suffice
        self._last = (wanted, policy)
        self._fetching = asyncio.create_task(self._fetch(wanted), name="files of a received version")

    def make_way(self, wanted: WantedPolicy) -> None:
        """Other files are to be fetched now."""
        if self._fetching is not None and self._last is not None and self._last[0].version != wanted.version:
            self._fetching.cancel()

    async def bootable(self, candidates: list[LocalPolicy], initial: LocalPolicy) -> LocalPolicy:
        """The first candidate of which an engine can start, else `initial`. Files of a received version that
        are not here are fetched."""
        for policy in candidates:
            if policy.manifest_sha256 is None:
                return policy
            try:
                if self._last is not None and self._last[1] == policy:
                    return await self._prepare(self._last[0])
                with as_reload_errors(policy.version):
                    await asyncio.to_thread(
                        self._store.verify_again, policy.directory, policy.version, policy.manifest_sha256
                    )
                return policy
            except ReloadError as error:
                logger.error("the engine cannot start with version %d: %s", policy.version, error)
        return initial

    async def close(self) -> None:
        """End what runs in the background."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    async def _fetch(self, wanted: WantedPolicy) -> None:
        try:
            await self._prepare(wanted)
        except ReloadError as error:
            logger.warning("version %d is served, and its files are not here: %s", wanted.version, error)
