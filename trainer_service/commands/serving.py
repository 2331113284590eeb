"""Builds the parts of a trainer by commands, and runs it."""

from dataclasses import dataclass

from rollout_queue.commands.log import CommandReader
from rollout_queue.contract.policies.object_prefix import ObjectPrefix
from rollout_queue.contract.stream import StreamReader
from trainer_service.commands.command_trainer import CommandTrainer
from trainer_service.commands.publications import GatewayPublications
from trainer_service.commands.ranks import ModelRanks
from trainer_service.commands.sampler_weights import SamplerWeights
from trainer_service.commands.untrained_turns import UntrainedTurns
from trainer_service.metrics import TrainerMetrics
from trainer_service.model.trained.models import Models
from trainer_service.publishing.gateway_client import GatewayClient
from trainer_service.publishing.places import DiskPlace, ObjectStorePlace, PolicyPlace, place_of
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.version_numbers import VersionNumbers
from trainer_service.settings import TrainerSettings
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.status.shared_state import SharedState
from trainer_service.storage.checkpoint import Checkpoints
from trainer_service.storage.disk_retry import DiskRetry
from trainer_service.storage.policy_store import PolicyStore
from trainer_service.storage.run_files import VersionFile

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
