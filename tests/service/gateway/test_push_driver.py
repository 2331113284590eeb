"""The driver of pushes, step by step, on a real Redis."""

import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from redis.asyncio import Redis

from gateway.engines.client import EngineClient
from gateway.engines.fleet import Fleet
from gateway.engines.fleet_server import Registration
from gateway.engines.policies.push_driver import PushBounds, PushDriver
from gateway.engines.transports.httptools_transport import HttptoolsTransport
from rollout_queue.contract.policies.policy import PolicyRecord
from rollout_queue.redis import keys
from rollout_queue.redis.policies.register import PolicyRegister
from rollout_queue.redis.policies.serving import ServingRegister
from tests.support.gateway.running import Backends
from tests.support.redis_clients import async_redis_at
from tests.support.serving import free_port

BOUNDS = PushBounds(timeout_s=5, lease_s=5, max_unavailable=0.25, fetch_fan_out=4, max_version_lag=4)


@pytest.fixture
async def fleet(own_backends: Backends) -> AsyncIterator[Fleet]:
    """The fleet of a gateway that knows no server yet."""
    own_backends.clear(None)
    redis, engine = async_redis_at(own_backends.redis_url), EngineClient(HttptoolsTransport(5.0))
    fleet = Fleet(redis, engine, None)
    yield fleet
    await fleet.close()
    await engine.close()
    await redis.aclose()


async def begin_push(redis: Redis) -> None:
    register = PolicyRegister(redis)
    record = PolicyRecord(version=1, location="file:///policies/1", created_at=time.time())
    assert await register.register(record, await register.look())
    await ServingRegister(redis).change(lambda plan: plan.begun(1, time.time(), force=False))


async def test_a_push_waits_for_a_server_that_registered_at_another_gateway(fleet: Fleet) -> None:
    """Nothing listens at the server's address, so the push cannot go on, and must not end without it."""
    await begin_push(fleet.redis)
    url = f"http://127.0.0.1:{free_port()}"
    registration = Registration(id="r0", url=url, engine_url=url, registered_at=time.time())
    await fleet.redis.hset(keys.SERVERS, "r0", msgspec.json.encode(registration).decode())
    driver = PushDriver(fleet.redis, fleet, BOUNDS)
    await driver.step()
    plan = await ServingRegister(fleet.redis).read()
    assert (plan.pushing, plan.serving) == (True, None)
    await driver.close()


async def test_a_push_without_any_server_ends(fleet: Fleet) -> None:
    await begin_push(fleet.redis)
    driver = PushDriver(fleet.redis, fleet, BOUNDS)
    await driver.step()
    plan = await ServingRegister(fleet.redis).read()
    assert (plan.pushing, plan.serving) == (False, 1)
    await driver.close()
