"""Looks up the policies that the plan wants, and registers them again if Redis has lost them."""

import logging

from rollout_queue.contract.published_policy import PolicyRecord
from rollout_queue.redis.policy_register import PolicyRegister

logger = logging.getLogger(__name__)


class WantedPolicies:
    """Reads each policy once in a look; remembers those of the last look."""

    def __init__(self, register: PolicyRegister) -> None:
        self._register = register
        self._before: dict[int, PolicyRecord | None] = {}
        self._found: dict[int, PolicyRecord | None] = {}

    async def record(self, version: int, plan: bytes) -> PolicyRecord | None:
        """The policy, which the plan wants; None if nobody knows it, which is logged once. Raises
        StorageUnavailable."""
        if version not in self._found:
            self._found[version] = await self._looked_up(version, plan)
        return self._found[version]

    def end_look(self) -> None:
        self._before, self._found = self._found, {}

    async def _looked_up(self, version: int, plan: bytes) -> PolicyRecord | None:
        if (record := await self._register.record(version)) is not None:
            return record
        if (known := self._before.get(version)) is not None:
            if not await self._register.register_again(known, plan):
                return None
            logger.warning("version %d was not registered any more, and is registered again", version)
        elif version not in self._before:
            logger.error("version %d is to be served, and is not registered", version)
        return known
