"""The schema of everything in Redis: which releases may read and write it.

a release starts ─▶ weir:schema is none, or older: it writes its own  ─▶ goes on
                 └▶ weir:schema is newer: it refuses to start, since it would misread the data
"""

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.codec import SCHEMA
from rollout_queue.redis import key_names
from rollout_queue.redis.lua import Script

CLAIM_SCHEMA = Script[bytes]("""
-- KEYS: schema   ARGV: the schema of this release
-- Returns what is stored; this release's schema if that was none or older.
local found = redis.call('GET', KEYS[1])
if not found or (tonumber(found) and tonumber(found) < tonumber(ARGV[1])) then
    redis.pcall('SET', KEYS[1], ARGV[1]) -- a full Redis refuses it, and the next start repeats it
    return ARGV[1]
end
return found
""")


RESTORING = "restoring"
"""Stands in place of the schema while `weir restore` writes."""


class SchemaTooNew(Exception):
    """Redis has data of a newer release, or half of a backup."""


def claim_schema(redis: Redis) -> None:
    """Note that this release uses this Redis. Raises SchemaTooNew, or StorageUnavailable."""
    _check(CLAIM_SCHEMA.run_now(redis, [key_names.SCHEMA], [SCHEMA]))


async def claim_schema_async(redis: AsyncRedis) -> None:
    """The same in an event loop."""
    _check(await CLAIM_SCHEMA.run(redis, [key_names.SCHEMA], [SCHEMA]))


def write_schema(redis: Redis) -> None:
    """Note the schema, whatever is there."""
    redis.set(key_names.SCHEMA, SCHEMA)


def _check(found: bytes) -> None:
    if found == RESTORING.encode():
        raise SchemaTooNew(
            "a backup is being restored into this Redis, or its restore was interrupted: wait for it, or run "
            "`weir restore` again with --replace"
        )
    if not found.isdigit() or int(found) > SCHEMA:
        raise SchemaTooNew(
            f"Redis has data of schema {found.decode(errors='replace')}, and this release reads up to "
            f"{SCHEMA}: "
            "start the newer release again, or restore a backup from before the upgrade"
        )
