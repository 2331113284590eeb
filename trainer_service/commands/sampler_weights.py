"""Publishes models, so that engines can sample from them.

an adapter   PEFT's files ─▶ {policies_dir}/adapters/{model}/v00000001 ─▶ POST {gateway}/admin/adapters
all weights  a version of the fleet's policy, as after a step of the training by turns
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout_queue.commands.result import Published
from trainer_service.commands.live_model import safe_name
from trainer_service.commands.ranks import ModelRanks
from trainer_service.publishing.places import PolicyPlace
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256


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
