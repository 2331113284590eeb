"""Chooses what is published of a version: its adapter alone, or the whole weights."""

import logging
from typing import Protocol

from trainer_service.publishing.publisher import Publisher, Snapshot

logger = logging.getLogger(__name__)


class SnapshotSource(Protocol):
    """Copies its present weights into host memory."""

    def snapshot(self) -> Snapshot: ...
    def adapter_snapshot(self) -> Snapshot: ...


class VersionContent:
    """With `adapters`, only adapters are published until every rollout server refuses them."""

    def __init__(self, policy: SnapshotSource, publisher: Publisher, *, adapters: bool) -> None:
        self._policy, self._publisher, self._adapters = policy, publisher, adapters

    def snapshot(self) -> Snapshot:
        """Copy it into host memory."""
        if self._adapters and self._publisher.refused is not None:
            self._adapters = False
            logger.warning("every server refuses adapters: from now on, whole weights travel")
        return self._policy.adapter_snapshot() if self._adapters else self._policy.snapshot()
