"""Publishes models, so that engines can sample from them, and removes their files when they are dropped.

an adapter   PEFT's files ─▶ {policies_dir}/adapters/{model}/v00000001 ─▶ POST {gateway}/admin/adapters
all weights  a version of the fleet's policy, as after a step of the training by turns
dropped      note in the log ─▶ no replay can ask for the files: they are removed ─▶ the note is forgotten

A process that dies between leaves the note, and the next one removes what is left.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.object_store import StoreUnavailable
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.trainer_commands import WHOLE_MODEL, Dropped, Published
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.saved_models import Exports, SavedModels, place_in, safe_name
from trainer_service.heartbeat import Heartbeat
from trainer_service.publishing.gateway_client import GatewayUnavailable
from trainer_service.publishing.places import PolicyPlace
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenAdapter:
    """A version of an adapter that engines can load."""

    name: str
    version: int
    location: str
    manifest_sha256: str


class PublishAdapter(Protocol):
    """Has engines load an adapter; returns when one has proved that it has it. To publish the same again
    changes nothing. Raises NotPublished, and Stopped when the trainer is told to stop."""

    def __call__(self, adapter: WrittenAdapter, /) -> None: ...


class ForgetAdapter(Protocol):
    """Has engines forget a version of an adapter, if they have it. Raises GatewayUnavailable."""

    def __call__(self, name: str, version: int, /) -> None: ...


class PublishWeights(Protocol):
    """Publishes all weights as the next version of the fleet's policy; returns when an engine has proved that
    it has them. Raises NotPublished, and Stopped when the trainer is told to stop."""

    def __call__(self, ranks: ModelRanks, model_id: str, step: int, /) -> Published: ...


class NotPublished(Exception):
    """No engine has taken the weights. The message says why."""


class SamplerWeights:
    """Writes adapters and has them loaded."""

    def __init__(
        self,
        ranks: ModelRanks,
        store_of: Callable[[str], tuple[PolicyStore, PolicyPlace]],
        publish_adapter: PublishAdapter,
        publish_weights: PublishWeights,
        disk: DiskRetry,
        forget_adapter: ForgetAdapter,
    ) -> None:
        """`store_of` gives the directory of an adapter's versions, and where engines find them."""
        self._forget_adapter = forget_adapter
        self._ranks, self._store_of, self._disk = ranks, store_of, disk
        self._publish_adapter, self._publish_weights = publish_adapter, publish_weights

    def publish(self, model_id: str, version: int, step: int, *, adapter: bool) -> Published:
        """Publish the present weights of a model, an adapter under this version. Raises NotPublished."""
        if not adapter:
            return self._publish_weights(self._ranks, model_id, step)
        name = safe_name(model_id)
        store, place = self._store_of(name)
        snapshot = self._ranks.snapshot(model_id)
        path = self._disk.until_written(
            f"version {version} of {name}", lambda: store.write(version, step, snapshot.write)
        )
        place.offer(version)
        written = WrittenAdapter(name, version, place.location(version), manifest_sha256(path))
        self._publish_adapter(written)
        return Published(name, version, written.location, written.manifest_sha256, store.size_of(version))

    def remove(self, policy: str, version: int) -> None:
        """Remove a version of an adapter: from the engines, the place where they find it, and the disk.
        Raises GatewayUnavailable, StoreUnavailable, OSError and Stopped; then it can be tried again."""
        self._forget_adapter(policy, version)
        store, place = self._store_of(policy)
        place.withdraw(version)
        store.discard(version)
        if not any(store.directory.iterdir()):  # `store_of` makes it anew
            store.discard_directory()

    def remove_all(self, model_id: str) -> None:
        """Remove every version that is left of a model that is gone: what a process had published that died
        before it could answer, and what no engine has taken. Raises as `remove`."""
        name = safe_name(model_id)
        store, _ = self._store_of(name)
        for version in store.versions():
            self.remove(name, version)
        store.discard_directory()


Answer = TypeVar("Answer")
AT_ONCE = 100
"""How many notes are worked off before the next commands are read."""
RETRY_S = 30.0
"""When files are tried again that could not be removed."""


class DroppedWeights:
    """Used on the main thread."""

    def __init__(
        self,
        reader: CommandReader,
        saved: SavedModels,
        exports: Exports,
        sampler: SamplerWeights,
        heartbeat: Heartbeat,
    ) -> None:
        self._reader, self._sampler, self._heartbeat = reader, sampler, heartbeat
        self._files = {"weights": saved, "external_weights": exports}
        self._dropped = Dropped({}, {})
        self._retry_at = 0.0

    def read(self) -> None:
        """Learn what is deleted. To be called after commands were read, and before they are carried out."""
        self._dropped = self._ask(self._reader.dropped)
        for files in self._files.values():
            files.dropped = self._dropped

    def waits_for(self, durable: str, reached: str) -> bool:
        """Whether a checkpoint at the place `reached` would let go files that the one at `durable` does
        not."""
        places = (drop.deleted for drops in self._dropped.weights.values() for drop in drops)
        return any(place_in(durable) < place_in(each) <= place_in(reached) for each in places)

    def remove(self, durable: str) -> None:
        """Remove the files that no replay can ask for: it begins at the place `durable`, or later."""
        if clock.monotonic() < self._retry_at:
            return
        for _, removal in zip(range(AT_ONCE), self._removals(durable), strict=False):
            try:
                removal()
            except (OSError, StoreUnavailable, GatewayUnavailable) as error:
                logger.warning("weights that were deleted cannot be removed now: %s", error)
                self._retry_at = clock.monotonic() + RETRY_S
                return

    def _removals(self, durable: str) -> Iterator[Callable[[], None]]:
        """Whole models come last: when everything of theirs is removed that has a note of its own."""
        yield from self._of_weights(durable, whole=False)
        for (policy, version), made in self._dropped.adapters.items():
            if place_in(made) <= place_in(durable):
                yield lambda: self._remove_adapter(policy, version)  # noqa: B023
        yield from self._of_weights(durable, whole=True)

    def _of_weights(self, durable: str, *, whole: bool) -> Iterator[Callable[[], None]]:
        for (model_id, name), drops in self._dropped.weights.items():
            gone = [drop for drop in drops if place_in(drop.deleted) <= place_in(durable)]
            if gone and (name == WHOLE_MODEL) == whole:
                saved = max((drop.saved for drop in gone), key=place_in)
                yield lambda: self._remove_weights(model_id, name, saved, gone[-1].deleted)  # noqa: B023

    def _remove_weights(self, model_id: str, kept_as: str, saved: str, deleted: str) -> None:
        kind, _, name = kept_as.partition("/")
        if kind in self._files:
            self._files[kind].remove(model_id, name, saved)
        elif kept_as == WHOLE_MODEL:
            for files in self._files.values():
                files.remove_all(model_id)
            self._sampler.remove_all(model_id)
        self._ask(lambda: self._reader.forget_weights(model_id, kept_as, deleted))
        what = "what was left" if kept_as == WHOLE_MODEL else kept_as
        logger.info("%s of model %s is removed", what, model_id)

    def _remove_adapter(self, policy: str, version: int) -> None:
        self._sampler.remove(policy, version)
        self._ask(lambda: self._reader.forget_adapter(policy, version))

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        return self._heartbeat.retry(call, StorageUnavailable, "waiting")
