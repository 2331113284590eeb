"""The calls and scores of the canary that is open: every gateway notes its own, and one reads them all."""

import msgspec
from redis.asyncio import Redis

from rollout_queue.contract.policies.canary import CanaryCall, CanaryRecord, CanaryReport, CanaryScore
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored

KEPT = 50_000
"""How many records are kept, about."""
READ_AT_ONCE = 2_000
BEGINNING = "0-0"


class CanaryLog:
    """Every method raises StorageUnavailable."""

    def __init__(self, redis: Redis) -> None:
        """`redis` returns bytes (decode_responses off)."""
        self._redis = redis

    async def note(self, record: CanaryRecord) -> None:
        fields = {"record": msgspec.json.encode(record)}
        await stored(self._redis.xadd(keys.CANARY_LOG, fields, maxlen=KEPT, approximate=True))  # type: ignore[arg-type]

    async def read(self, after: str) -> tuple[list[CanaryRecord], str]:
        """The records after this entry, and the id of the last one."""
        entries = await stored(self._redis.xrange(keys.CANARY_LOG, f"({after}", "+", READ_AT_ONCE))
        records = [
            msgspec.json.decode(fields[b"record"], type=CanaryCall | CanaryScore) for _, fields in entries
        ]
        return records, entries[-1][0].decode() if entries else after

    async def store_report(self, report: CanaryReport) -> None:
        await stored(self._redis.set(keys.CANARY_REPORT, msgspec.json.encode(report)))

    async def report(self) -> CanaryReport:
        """The numbers of the open canary, as they were last looked at."""
        packed = await stored(self._redis.get(keys.CANARY_REPORT))
        return CanaryReport() if packed is None else msgspec.json.decode(packed, type=CanaryReport)

    async def group_opened_at(self, group_id: str) -> float | None:
        """When the group's first session was opened, in seconds since the epoch; None if nobody knows."""
        opened_at = await stored(self._redis.hget(keys.group(group_id), "opened_at"))
        return None if opened_at is None else float(opened_at)
