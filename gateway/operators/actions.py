"""The log of admin actions: every request with an admin key that may change something, and its result.

request ──▶ route ──▶ reply ──▶ log line, and weir:admin_actions in Redis (the last KEPT of all gateways)
"""

import logging
import re
from typing import Any

import msgspec
from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.callers import digest
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored

logger = logging.getLogger(__name__)

KEPT = 10_000
MAX_PATH = 500
"""Characters of a path that are kept."""
FIELD = b"a"
USER_PATH = re.compile(r"(/admin/users/)(.*?)(/data/?)?", re.DOTALL)
READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""


class AdminAction(msgspec.Struct, frozen=True):
    """One request with an admin key."""

    at: float
    """Seconds since the epoch, when the reply began."""
    key: str
    """The key's name; empty on a gateway without keys."""
    method: str
    path: str
    status: int
    request_id: str
    client: str
    """The address from which the request came; a proxy's if there is one."""


class ActionLog:
    """Writes admin actions, and reads them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, action: AdminAction) -> None:
        """Log an action. If Redis does not store it, the log line is all that is left of it."""
        logger.info(
            "admin action: key %s, %s %s, status %d, request %s, from %s",
            action.key or "-",
            action.method,
            action.path,
            action.status,
            action.request_id,
            action.client,
        )
        try:
            packed: Any = {FIELD: msgspec.json.encode(action)}
            await stored(self._redis.xadd(key_names.ADMIN_ACTIONS, packed, maxlen=KEPT, approximate=True))
        except StorageUnavailable as error:
            logger.warning("the last admin action is only in this log: %s", error)

    async def newest(self, limit: int, before: str | None) -> list[tuple[str, AdminAction]]:
        """The last actions before the one with the id `before`, newest first, each with its id.

        Raises StorageUnavailable.
        """
        end = "+" if before is None else f"({before}"
        found = await stored(self._redis.xrevrange(key_names.ADMIN_ACTIONS, max=end, count=limit))
        return [
            (entry_id.decode(), msgspec.json.decode(fields[FIELD], type=AdminAction))
            for entry_id, fields in found
        ]


def now_action(key: str, method: str, path: str, status: int, request_id: str, client: str) -> AdminAction:
    """An action that ends now. A user's name becomes its SHA-256, so that no log outlives the user's data."""
    named = USER_PATH.fullmatch(path)
    shown = path if named is None else f"{named[1]}sha256:{digest(named[2])}{named[3] or ''}"
    return AdminAction(clock.now(), key, method, shown[:MAX_PATH], status, request_id, client)
