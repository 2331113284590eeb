"""Removes the files of weights that were deleted, expired or overwritten, once no replay can ask for them.

note in the log ─▶ files are removed ─▶ the note is forgotten

A process that dies between leaves the note, and the next one removes what is left.
"""

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from rollout_queue import clock
from rollout_queue.commands.log import WHOLE_MODEL, CommandReader, Dropped
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.object_store import StoreUnavailable
from trainer_service.commands.exports import Exports
from trainer_service.commands.live_model import place_in
from trainer_service.commands.sampler_weights import SamplerWeights
from trainer_service.commands.saved_models import SavedModels
from trainer_service.publishing.gateway_client import GatewayUnavailable
from trainer_service.status.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

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
