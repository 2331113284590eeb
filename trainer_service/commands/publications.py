"""Has engines load what commands publish, through the gateway."""

from collections.abc import Callable
from typing import TypeVar

from rollout_queue.commands.result import Published
from trainer_service.commands.ranks import ModelRanks
from trainer_service.commands.sampler_weights import NotPublished, WrittenAdapter
from trainer_service.publishing.gateway_client import (
    GatewayClient,
    GatewayUnavailable,
    VersionTaken,
    VersionUnknown,
)
from trainer_service.publishing.places import PolicyPlace
from trainer_service.publishing.publisher import Publisher
from trainer_service.publishing.version_numbers import VersionNumbers
from trainer_service.status.heartbeat import Heartbeat
from trainer_service.storage.policy_store import PolicyStore, manifest_sha256

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
