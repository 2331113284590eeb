"""Builds the parts of a trainer by commands, runs it, and has engines load what commands publish."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rollout_queue.contract.published_policy import ObjectPrefix
from rollout_queue.redis.command_log import CommandReader
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.trainer_commands import Published
from trainer_service.commands.command_trainer import CommandTrainer, UntrainedTurns
from trainer_service.commands.model_ranks import ModelRanks
from trainer_service.commands.sampler_weights import NotPublished, SamplerWeights, WrittenAdapter
from trainer_service.heartbeat import Heartbeat
from trainer_service.model.trained_models import Models
from trainer_service.publishing.gateway_client import (
    GatewayClient,
    GatewayUnavailable,
    VersionTaken,
    VersionUnknown,
)
from trainer_service.publishing.places import DiskPlace, ObjectStorePlace, PolicyPlace, place_of
from trainer_service.publishing.publisher import Publisher, VersionNumbers
from trainer_service.settings import TrainerSettings
from trainer_service.shared_state import SharedState
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.durable_files import DiskRetry
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256
from trainer_service.storage.run_state import VersionFile
from trainer_service.trainer_metrics import TrainerMetrics

Answer = TypeVar("Answer")


class _NotYet(Exception):
    """No engine has the weights yet."""


class GatewayPublications:
    """`PublishAdapter` and `PublishWeights`. Both wait for the gateway, and for a first engine; they raise
    Stopped when the trainer is told to stop meanwhile."""

    def __init__(
        self,
        gateway: GatewayClient,
        heartbeat: Heartbeat,
        publisher: Publisher,
        numbers: VersionNumbers,
        store: PolicyStore,
        place: PolicyPlace,
        version: int,
    ) -> None:
        """`version` is a number of the fleet's policy; weights get greater ones."""
        self._gateway, self._heartbeat = gateway, heartbeat
        self._publisher, self._numbers, self._store, self._place = publisher, numbers, store, place
        self._version = version

    def adapter(self, adapter: WrittenAdapter) -> None:
        """Have every live server load an adapter. Waits for servers whose engines are not there. Raises
        NotPublished if all of them refuse the adapter itself."""

        def publish() -> None:
            pushed = self._gateway.publish_adapter(
                adapter.name, adapter.version, adapter.location, adapter.manifest_sha256
            )
            if not pushed.results:
                raise _NotYet("no rollout server is live")
            if any(result.ok for result in pushed.results):
                return
            errors = {result.error for result in pushed.results if result.error}
            why = f"no server has loaded {adapter.name}: {'; '.join(sorted(errors))}"
            raise NotPublished(why) if all(result.refused for result in pushed.results) else _NotYet(why)

        self._heartbeat.confirm()
        try:
            self._until_answered(publish)
        except VersionTaken as error:
            raise NotPublished(f"the gateway refuses {adapter.name}: {error}") from error

    def weights(self, ranks: ModelRanks, model_id: str, step: int) -> Published:
        """Publish all weights as the next version. Raises NotPublished if no server has taken them."""
        version = self._version = self._numbers.reserve_after(self._version)
        self._publisher.publish(version, step, lambda: ranks.snapshot(model_id))
        self._publisher.wait()

        def proved() -> None:
            try:
                push = self._gateway.push_of(version).push
            except VersionUnknown as error:
                raise NotPublished(f"the gateway has not taken version {version}: {error}") from error
            if push is None or (push.state == "pushing" and not push.proved):
                raise _NotYet(f"version {version} is pushed to the servers")
            if not push.proved and push.state != "serving":
                raise NotPublished(f"no server has loaded version {version}: {push.error or push.state}")

        self._until_answered(proved)
        path = self._store.path_of(version)
        return Published(
            "", version, self._place.location(version), manifest_sha256(path), self._store.size_of(version)
        )

    def _until_answered(self, call: Callable[[], Answer]) -> Answer:
        def calling() -> Answer:
            try:
                return call()
            except _NotYet as error:
                raise GatewayUnavailable(str(error)) from error

        return self._heartbeat.retry(calling, GatewayUnavailable, "publishing")


ADAPTERS = "adapters"
"""The directory of adapters, in that of the published versions."""


@dataclass(frozen=True)
class AdapterPlaces:
    """The directory of each adapter's versions, and where engines find them."""

    settings: TrainerSettings
    shared_state: SharedState

    def __call__(self, name: str) -> tuple[PolicyStore, PolicyPlace]:
        settings = self.settings
        store = PolicyStore(
            settings.policies_dir / ADAPTERS / name, settings.model_path, settings.keep_policies
        )
        if settings.publish_url is None:
            return store, DiskPlace(store)
        root = ObjectPrefix.parse(settings.publish_url).below(ADAPTERS).below(name)
        stopping = self.shared_state
        return store, ObjectStorePlace(store, root, settings.object_store, lambda: stopping.stopping)


def train_by_commands(
    settings: TrainerSettings,
    reader: CommandReader,
    stream: StreamReader,
    gateway: GatewayClient,
    store: PolicyStore,
    checkpoints: Checkpoints,
    metrics: TrainerMetrics,
    shared_state: SharedState,
    heartbeat: Heartbeat,
) -> None:
    """Carry out commands until told to stop. `stream` knows the numbers of the fleet's versions; `store` has
    their files."""
    ranks = ModelRanks(Models(settings))
    ranks.require_shared(settings.checkpoint_dir)
    disk = DiskRetry(heartbeat, metrics, "publishing", "publish")
    place = place_of(settings, store, lambda: shared_state.stopping)
    publisher = Publisher(store, gateway, stream, place, heartbeat, metrics)
    numbers = VersionNumbers(VersionFile(settings.checkpoint_dir), publisher, disk)
    publications = GatewayPublications(
        gateway, heartbeat, publisher, numbers, store, place, settings.initial_version
    )
    places = AdapterPlaces(settings, shared_state)
    sampler = SamplerWeights(
        ranks, places, publications.adapter, publications.weights, disk, gateway.remove_adapter
    )
    try:
        turns = UntrainedTurns(stream, heartbeat)
        CommandTrainer(
            settings, ranks, reader, sampler, checkpoints, metrics, shared_state, heartbeat, turns
        ).run()
    finally:
        publisher.close()
    ranks.close()  # not after an exception: ranks that wait in a collective receive no call
