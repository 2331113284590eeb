"""Publishes versions while the training goes on: numbers them, writes the files, has the gateway push them,
and finds out how the push ended.

main thread      snapshot ─┐                                                      ┌─▶ how the push ended
background       └─▶ PolicyStore.write ─▶ offer ─▶ POST {gateway}/admin/policies ┘ (202) ─▶ remove old ones

One version is published at a time: the next one waits until the former is announced. With a `TensorSender`,
engines may also receive the tensors from the snapshot, until the next one is taken. A version gets its number
before the step that makes it; no other weights have that number.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.published_policy import FileSpec
from rollout_queue.http.object_store import StoreUnavailable
from rollout_queue.protocol.gateway_messages import PushResult
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.tracing import in_span
from trainer_service.groups.reward_guard import Alarm
from trainer_service.heartbeat import Heartbeat, Stopped
from trainer_service.model.host_copies import HostTensor
from trainer_service.publishing.gateway_client import (
    GatewayClient,
    GatewayUnavailable,
    VersionTaken,
    VersionUnknown,
)
from trainer_service.publishing.places import PolicyPlace
from trainer_service.publishing.tensor_sender import TensorSender
from trainer_service.storage.durable_files import DiskRefused, DiskRetry
from trainer_service.storage.policy_store import PolicyStore, WeightsWriter, manifest_sha256
from trainer_service.storage.run_state import VersionFile
from trainer_service.trainer_metrics import TrainerMetrics

logger = logging.getLogger(__name__)

Results = tuple[PushResult, ...]
"""The results of a push, one per server."""


class PushFollower:
    """Asks the gateway, and reports what servers did: in the log and in the metrics."""

    def __init__(self, gateway: GatewayClient, metrics: TrainerMetrics) -> None:
        self._gateway, self._metrics = gateway, metrics
        self.announced: int | None = None
        """The last announced version, until it is known how its push ended."""
        self.refused: int | None = None
        """The last version that every server has refused; None if a server has taken one since."""
        self._failures, self._reason = 0, ""
        """How many pushes have failed since a server took one, and how the last of them did."""

    @property
    def failures(self) -> str | None:
        """Why the fleet serves older weights than the trainer's; None if the last push did not fail."""
        if not self._failures:
            return None
        pushes = "push" if self._failures == 1 else "pushes"
        return f"engines sample with older weights: the last {self._failures} {pushes} {self._reason}"

    def follow(self) -> None:
        """Ask how the push goes, if one is not known to have ended."""
        if self.announced is None:
            return
        version = self.announced
        try:
            detail = self._gateway.push_of(version)
        except VersionUnknown as error:
            logger.error("no server took version %d: %s", version, error)
            self._metrics.pushed(False)
            self._note_failure(str(error), refused=True)
            self.announced, self.refused = None, version
            return
        except GatewayUnavailable as error:
            logger.warning("the gateway does not tell how the push of version %d goes: %s", version, error)
            return
        if detail.push is not None and detail.push.state == "superseded":
            logger.info("a newer version has replaced version %d before every server had it", version)
        elif detail.push is not None and detail.push.state != "pushing":
            failed = detail.push.state == "failed"
            self.account(version, detail.results, failed=failed, error=detail.push.error)
        else:
            return
        self.announced = None

    def account(
        self, version: int, results: Results, *, failed: bool = False, error: str | None = None
    ) -> None:
        """Report the results of a push that has ended. The gateway knows no results of one that a later push
        has replaced, but whether it has `failed`, and its `error`."""
        for result in results:
            self._metrics.pushed(result.ok)
            if not result.ok:
                logger.error("server %s did not take version %d: %s", result.server, version, result.error)
        if failed or (results and not any(result.ok for result in results)):
            logger.error("no server took version %d", version)
            errors = (f"{result.server}: {result.error}" for result in results if result.error)
            refused = all(result.state == "refused" for result in results)
            self._note_failure(error or "; ".join(errors), refused=refused)
            if results and refused:
                self.refused = version
        else:
            self.refused, self._failures = None, 0
            logger.info("version %d is served by %d servers", version, sum(result.ok for result in results))

    def _note_failure(self, why: str, *, refused: bool) -> None:
        self._failures += 1
        verb = "was refused" if self._failures == 1 else "were refused"
        self._reason = f"{verb if refused else 'failed'}: {why}"


FOLLOW_EVERY_S = 2.0
GATEWAY = "the gateway to take the newest version"
ENGINES = "engines that receive the former version"
Reply = TypeVar("Reply")


class Snapshot(Protocol):
    """The weights of one step, which stay as they are while the training goes on."""

    @property
    def tensors(self) -> Sequence[HostTensor]: ...
    def write(self, directory: Path) -> Sequence[FileSpec]: ...


class Publisher:
    """Writes, offers, announces and removes versions."""

    def __init__(
        self,
        store: PolicyStore,
        gateway: GatewayClient,
        stream: StreamReader,
        place: PolicyPlace,
        heartbeat: Heartbeat,
        metrics: TrainerMetrics,
        executor: Executor | None = None,
        sender: TensorSender | None = None,
    ) -> None:
        """`executor` runs publications; by default, one thread."""
        self._executor = executor or ThreadPoolExecutor(1, "publisher")
        self._running: Future[None] | None = None
        """What runs in the background: one publication, or one question."""
        self.waits_for: str | None = None
        """What the publication in the background waits for."""
        self._store, self._gateway, self._stream = store, gateway, stream
        self.versions = store.versions
        """The versions that can be served again, ascending."""
        self._place, self._sender = place, sender
        self._heartbeat, self._metrics = heartbeat, metrics
        self._known: int | None = None
        """The newest version that the gateway knew when it was asked last; None before the first answer."""
        self._pushes = PushFollower(gateway, metrics)
        self._asked_at = 0.0

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
        """Reserve a number for the weights of the next step, as `StreamReader.reserve`. May raise Stopped."""
        reserve = partial(self._stream.reserve, version, self._place.location(version))
        return self._heartbeat.retry(reserve, StorageUnavailable, "waiting")

    def publish(
        self,
        version: int,
        step: int,
        take: Callable[[], Snapshot],
        best: int | None = None,
        trace: str | None = None,
    ) -> None:
        """Take a snapshot of the weights, and publish it in the background: write it, announce it, and remove
        old versions except `best`. Waits until the former version is announced; raises Stopped when told to
        stop meanwhile. `trace` is the span of the step.
        """
        self.wait()
        self._heartbeat.confirm()
        if self._sender is not None:
            self._running = self._executor.submit(copy_context().run, self._sender.withdraw)
            self._heartbeat.wait_for(self._running, "publishing", lambda: ENGINES)
        snapshot = take()
        work, of = partial(self._publish, version, step, snapshot, best), {"rl.policy.version": version}
        self._running = self._executor.submit(copy_context().run, in_span, "rl.publish", trace, of, work)
        self._collect()

    def wait(self) -> None:
        """Wait until the last version is announced. Raises Stopped when told to stop meanwhile, and what the
        publication raised."""
        if self._running is not None:
            self._heartbeat.wait_for(self._running, "publishing", lambda: self.waits_for)
        self._collect()

    def close(self) -> None:
        """Wait until nothing is published any more. What waits for the gateway or the disk ends when the
        trainer is told to stop."""
        self._executor.shutdown()
        with suppress(Stopped):
            self._collect()

    def _collect(self) -> None:
        """Raise what ran in the background raised, if it has ended."""
        if self._running is not None and self._running.done():
            running, self._running = self._running, None
            running.result()

    def _publish(self, version: int, step: int, snapshot: Snapshot, best: int | None) -> None:
        """Runs in the background. If the number is taken, this is only logged, because the next version will
        replace this one."""
        self._pushes.follow()
        write, offer = partial(self._write, version, step, snapshot.write), partial(self._offer, version)
        path = self._retry(write, DiskRefused, f"room on the disk for version {version}")
        self._retry(offer, StoreUnavailable, f"the object store to take version {version}")
        location, digest = self._place.location(version), manifest_sha256(path)
        if self._sender is not None:
            self._sender.offer(version, digest, snapshot.tensors)
        size = self._store.size_of(version)
        try:
            announce = partial(self._gateway.announce, version, location, digest, step, size)
            announced = self._retry(announce, GatewayUnavailable, GATEWAY)
        except VersionTaken as error:
            logger.error("version %d is not published: %s", version, error)
            return
        self._known = max(self._known or 0, version)
        if announced.state == "held":
            logger.warning("version %d is published and not served: an operator holds the fleet", version)
        else:
            logger.info("version %d is announced", version)
            self._pushes.announced = version
        self._prune(best)

    def _retry(self, call: Callable[[], Reply], failure: type[Exception], what: str) -> Reply:
        try:
            return self._heartbeat.retry_quietly(call, failure, what, self._note_wait)
        finally:
            self.waits_for = None

    def _note_wait(self, sentence: str) -> None:
        self.waits_for = sentence

    def follow(self) -> None:
        """Report how the push of the last version ended, once it has: asks in the background, at most every
        FOLLOW_EVERY_S, and not while a version is published. Raises what the last publication raised."""
        self._collect()
        due = self._pushes.announced is not None and clock.monotonic() - self._asked_at >= FOLLOW_EVERY_S
        if due and self._running is None:
            self._asked_at = clock.monotonic()
            self._running = self._executor.submit(copy_context().run, self._pushes.follow)
            self._collect()

    @property
    def refused(self) -> int | None:
        return self._pushes.refused

    def explained(self, alarm: Alarm) -> Alarm:
        """The alarm, with pushes that failed as its cause: engines that go on with older weights differ from
        the trainer."""
        failures = self._pushes.failures
        return alarm if failures is None else replace(alarm, reason=f"{failures}; {alarm.reason}")

    def roll_back(self, version: int) -> bool:
        """Have the fleet serve an older version again. Returns whether a server serves it; failures are
        logged. Waits for the gateway; raises Stopped when told to stop meanwhile."""
        self.wait()
        self._heartbeat.confirm()
        try:
            if self._heartbeat.retry(lambda: self._gateway.serves(version), GatewayUnavailable, "publishing"):
                return True
            results = self._pushed(lambda: self._gateway.roll_back(version))
        except VersionUnknown as error:
            logger.error("the fleet goes on with what it serves: %s", error)
            return False
        self._pushes.account(version, results)
        return any(result.ok for result in results)

    def resume(self, version: int, step: int, take: Callable[[], Snapshot]) -> None:
        """Publish the newest version after a restart, unless the gateway knows it or a newer one. A known
        version is not pushed again, because an operator may have rolled back from it."""
        newest = self._heartbeat.retry(self._gateway.newest_version, GatewayUnavailable, "publishing")
        if newest < version:
            self.reserve(version)  # a gateway or a Redis that lost its data knows no reservation
            self.publish(version, step, take)

    def _write(self, version: int, step: int, write: WeightsWriter) -> Path:
        self._heartbeat.confirm()
        try:
            return self._store.write(version, step, write)
        except DiskRefused:
            self._metrics.disk_refused("publish")
            raise

    def _offer(self, version: int) -> None:
        self._heartbeat.confirm()
        self._place.offer(version)

    def _prune(self, best: int | None) -> None:
        """Remove old versions. The gateway forgets each of them first, and refuses those that it needs."""
        try:
            for version in self._store.outdated(best):
                if self._gateway.remove(version):
                    self._place.withdraw(version)
                    self._remove(version)
            stored = set(self._store.versions())
            for policy in self._gateway.policies():
                lost = policy.version not in stored  # by the disk
                ours = policy.location == self._place.location(policy.version)
                if lost and ours and self._gateway.remove(policy.version):
                    self._place.withdraw(policy.version)
        except GatewayUnavailable as error:
            logger.warning("old versions stay, because the gateway does not answer: %s", error)
        except StoreUnavailable as error:
            logger.warning("old versions stay, because they cannot be removed: %s", error)

    def _remove(self, version: int) -> None:
        try:
            self._store.remove(version)
        except OSError as error:
            logger.warning("the files of version %d stay until the next one is published: %s", version, error)

    def _pushed(self, ask: Callable[[], Results]) -> Results:
        """Call `ask` until the gateway answers, and return its results. A push takes as long as its slowest
        server; meanwhile the trainer reports that it is alive."""

        def pushed() -> Results:
            with ThreadPoolExecutor(1) as executor:
                push = executor.submit(copy_context().run, ask)
                self._heartbeat.wait_for(push, "publishing")
                return push.result()

        return self._heartbeat.retry(pushed, GatewayUnavailable, "publishing")


class VersionNumbers:
    """Chooses numbers higher than all that the trainer's disk, the gateway or the stream knows."""

    def __init__(self, file: VersionFile, publisher: Publisher, disk: DiskRetry) -> None:
        self._file, self._publisher, self._disk = file, publisher, disk

    def reserve_after(self, version: int) -> int:
        """A new number greater than `version`. Waits for the gateway, the disk and the stream; raises Stopped
        when told to stop meanwhile."""
        number = self._reserve_on_disk(self._publisher.newest_version(version))
        while (newest := self._publisher.reserve(number)) >= number:
            number = self._reserve_on_disk(newest)
        return number

    def _reserve_on_disk(self, above: int) -> int:
        return self._disk.until_written("the number of a version", partial(self._file.reserve, above))
