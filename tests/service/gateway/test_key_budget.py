"""The budget of a key while its use is shared with other gateways."""

import asyncio
from collections.abc import Mapping

from redis.asyncio import Redis

from gateway.keys.api_key import ApiKey, KeyLimits, Secret
from gateway.keys.api_keys import ApiKeys
from gateway.keys.key_store import KeyStore, KeyUse
from rollout_queue.http.keys import digest
from tests.support.redis_clients import async_redis_at

TEAM = ApiKey("team-of-a-slow-redis", "client", (Secret(digest("secret")),), KeyLimits(token_budget=10))


class SlowStore(KeyStore):
    """Redis adds the use, and its answer comes later."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    async def add_usage(self, usage: Mapping[str, KeyUse]) -> Mapping[str, int]:
        spent = await super().add_usage(usage)
        self.asked.set()
        await self.gate.wait()
        return spent


async def test_tokens_count_while_redis_is_told_of_them(redis_url: str) -> None:
    redis = async_redis_at(redis_url)
    store = SlowStore(redis)
    known = ApiKeys((TEAM,), store)
    known.spend(TEAM.owner, 7)
    sharing = asyncio.create_task(known.refresh())
    await store.asked.wait()
    assert known.left(TEAM.owner) == 3
    known.spend(TEAM.owner, 2)
    assert known.left(TEAM.owner) == 1
    store.gate.set()
    await sharing
    assert known.left(TEAM.owner) == 1
    await redis.aclose()
