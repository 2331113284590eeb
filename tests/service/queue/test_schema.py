"""The schema of Redis' data: a release notes its own, and refuses data of a newer one."""

import pytest
from redis import Redis

from rollout_queue.contract.codec import SCHEMA
from rollout_queue.redis import key_names
from rollout_queue.redis.schema_version import (
    RESTORING,
    SchemaTooNew,
    claim_schema,
    claim_schema_async,
    write_schema,
)
from tests.support.redis_clients import async_redis_at


def test_a_release_notes_its_schema_and_accepts_older_ones(redis: Redis) -> None:
    claim_schema(redis)
    assert redis.get(key_names.SCHEMA) == str(SCHEMA).encode()
    redis.set(key_names.SCHEMA, SCHEMA - 1)
    claim_schema(redis)
    assert redis.get(key_names.SCHEMA) == str(SCHEMA).encode()


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        (str(SCHEMA + 1), f"has data of schema {SCHEMA + 1}, and this release reads up to {SCHEMA}"),
        ("what", "Redis has data of schema what"),
        (RESTORING, "a backup is being restored into this Redis, or its restore was interrupted"),
    ],
)
async def test_data_of_a_newer_release_or_half_a_backup_is_refused(
    redis: Redis, redis_url: str, stored: str, sentence: str
) -> None:
    redis.set(key_names.SCHEMA, stored)
    with pytest.raises(SchemaTooNew, match=sentence):
        claim_schema(redis)
    async with async_redis_at(redis_url) as client:
        with pytest.raises(SchemaTooNew, match=sentence):
            await claim_schema_async(client)
    assert redis.get(key_names.SCHEMA) == stored.encode()
    write_schema(redis)
    claim_schema(redis)


def test_a_full_redis_does_not_keep_a_release_from_starting(redis: Redis) -> None:
    redis.config_set("maxmemory", "1")
    claim_schema(redis)
    assert redis.get(key_names.SCHEMA) is None
