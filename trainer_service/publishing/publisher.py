"""Writes a version to disk, and has the gateway push it to every rollout server.

export ─▶ PolicyStore.write ─▶ POST {gateway}/admin/policies ─▶ one result per server
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.stream import StreamReader
from rollout_queue.protocol.policies import PushResult
from trainer_service.metrics import TrainerMetrics
from trainer_service.publishing.gateway_client import (
    GatewayClient,
    GatewayUnavailable,
    VersionTaken,
    VersionUnknown,
)
from trainer_service.status.heartbeat import REPORT_EVERY_S, Heartbeat
from trainer_service.storage.disk import DiskTrouble
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256

logger = logging.getLogger(__name__)

Results = tuple[PushResult, ...]
"""The results of a push, one per server."""


class Publisher:
    """Writes, announces and removes versions."""

    def __init__(
        self,
        store: PolicyStore,
        gateway: GatewayClient,
        stream: StreamReader,
        publish_url: str | None,
        heartbeat: Heartbeat,
        metrics: TrainerMetrics,
    ) -> None:
        self._store, self._gateway, self._stream = store, gateway, stream
        self._publish_url = publish_url
        self._heartbeat, self._metrics = heartbeat, metrics
        self._known: int | None = None
        """The newest version that the gateway knew when it was asked last; None before the first answer."""

    def newest_version(self, own: int) -> int:
        """The highest version number that the trainer (`own`), its disk or the gateway knows.

        The first call waits for the gateway, because the disk may have lost versions; it may raise Stopped.
        Later calls do not wait, because `reserve` shows whether a number is taken.
        """
        if self._known is None:
            self._known = self._heartbeat.retry(
                self._gateway.newest_version,
                GatewayUnavailable,
                "waiting",
                "the gateway to say which versions it knows",
            )
        else:
            try:
                self._known = max(self._known, self._gateway.newest_version())
            except GatewayUnavailable as error:
                logger.warning("the gateway did not tell its newest version: %s", error)
        return max(own, self._known, *self._store.versions())

    def reserve(self, version: int) -> int:
        """Reserve a number for the weights of the next step: no other weights are published under it.

        Returns the highest number that was published or reserved before. `version` is reserved only if it is
        higher. May raise Stopped.
        """
        return self._heartbeat.retry(
            lambda: self._stream.reserve(version, self._location(version)), StorageUnavailable, "waiting"
        )

    def publish(
        self, version: int, step: int, export: Callable[[Path], None], best: int | None = None
    ) -> None:
        """Write a version and have the fleet serve it. Then remove old versions except `best`. Waits for room
        on the disk and for the gateway; raises Stopped when told to stop meanwhile.

        If servers fail, or the number is taken, this is only logged, because the next version will replace
        this one.
        """
        path = self._heartbeat.retry(
            lambda: self._write(version, step, export),
            DiskTrouble,
            "publishing",
            f"room on the disk for version {version}",
        )
        try:
            results = self._pushed(
                lambda: self._gateway.announce(version, self._location(version), manifest_sha256(path), step)
            )
        except VersionTaken as error:
            logger.error("version %d is not published: %s", version, error)
            return
        self._known = max(self._known or 0, version)
        self._account(version, results)
        self._prune(best)

    def versions(self) -> list[int]:
        """The versions that can be served again, ascending."""
        return self._store.versions()

    def roll_back(self, version: int) -> bool:
        """Have the fleet serve an older version again. Returns whether a server serves it; failures are
        logged. Waits for the gateway; raises Stopped when told to stop meanwhile."""
        self._heartbeat.confirm()
        try:
            if self._heartbeat.retry(lambda: self._gateway.serves(version), GatewayUnavailable, "publishing"):
                return True
            results = self._pushed(lambda: self._gateway.roll_back(version))
        except VersionUnknown as error:
            logger.error("the fleet goes on with what it serves: %s", error)
            return False
        self._account(version, results)
        return any(result.ok for result in results)

    def resume(self, version: int, step: int, export: Callable[[Path], None]) -> None:
        """Publish the newest version after a restart, unless the gateway knows it or a newer one. A known
        version is not pushed again, because an operator may have rolled back from it."""
        newest = self._heartbeat.retry(self._gateway.newest_version, GatewayUnavailable, "publishing")
        if newest < version:
            self.publish(version, step, export)

    def _location(self, version: int) -> str:
        """Where rollout servers find a version: at the trainer's HTTP address, or on a shared disk."""
        if self._publish_url is not None:
            return f"{self._publish_url.rstrip('/')}/{version}"
        return self._store.path_of(version).resolve().as_uri()

    def _write(self, version: int, step: int, export: Callable[[Path], None]) -> Path:
        self._heartbeat.confirm()
        try:
            return self._store.write(version, step, export)
        except DiskTrouble:
            self._metrics.disk_refused("publish")
            raise

    def _prune(self, best: int | None) -> None:
        """Remove old versions, but keep those that a rollout server may still have to load."""
        try:
            self._store.prune(self._gateway.oldest_needed(), best)
        except GatewayUnavailable as error:
            logger.warning(
                "no version is removed, because the gateway did not tell which one is served: %s", error
            )

    def _pushed(self, ask: Callable[[], Results]) -> Results:
        """Call `ask` until the gateway answers, and return its results. A push takes as long as its slowest
        server; meanwhile the trainer reports that it is alive."""

        def pushed() -> Results:
            with ThreadPoolExecutor(1) as executor:
                push = executor.submit(ask)
                while True:
                    try:
                        return push.result(REPORT_EVERY_S)
                    except NotYet:
                        self._heartbeat.beat("publishing")

        return self._heartbeat.retry(pushed, GatewayUnavailable, "publishing")

    def _account(self, version: int, results: Results) -> None:
        for result in results:
            self._metrics.pushed(result.ok)
            if not result.ok:
                logger.error("server %s did not take version %d: %s", result.server, version, result.error)
        if results and not any(result.ok for result in results):
            logger.error("no server took version %d", version)
        else:
            logger.info("version %d is served by %d servers", version, sum(result.ok for result in results))
