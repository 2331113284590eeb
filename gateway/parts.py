"""Builds the gateway's parts when the application starts, and closes them when it ends."""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request

from gateway.callers.admission import Admission
from gateway.callers.api_keys import ApiKeys, KeyChanges, configured_keys
from gateway.callers.backpressure import memory_bound, read_backpressure
from gateway.callers.identity import Identities
from gateway.callers.key_store import KeyStore
from gateway.counters import CacheLookups
from gateway.fleet.engine_client import EngineClient
from gateway.fleet.failover import Sampler
from gateway.fleet.fleet import Fleet
from gateway.fleet.silence import SilenceWatch
from gateway.generations.conversation import FIRST_PROMPTS
from gateway.generations.generator import Generator
from gateway.generations.recorder import Recorder
from gateway.language.image_reading import ImageReader
from gateway.language.render import ChatRenderer
from gateway.operators.actions import ActionLog
from gateway.operators.lost_keys import LostKeys
from gateway.operators.pipeline import PipelineMonitor
from gateway.operators.warnings import WarningMonitor
from gateway.policies.adapter_policies import AdapterPolicies
from gateway.policies.canaries import Canaries, CanaryJudge
from gateway.policies.canary_watch import CanaryWatch
from gateway.policies.policies import Policies
from gateway.policies.push import PushBounds, PushDriver
from gateway.prometheus import Metrics
from gateway.sessions.lifetime import CallsInFlight, Retention
from gateway.sessions.resolution import SessionResolver
from gateway.sessions.session_service import SessionService
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.callers import bearer
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_async_redis
from rollout_queue.redis.schema_version import SchemaTooNew, claim_schema_async
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.redis.stream_writer import StreamWriter

logger = logging.getLogger(__name__)

SECRET_RETRY_S = 0.2
"""Pause between two attempts to read from a Redis that does not answer, when the gateway starts."""


@dataclass(frozen=True)
class GatewayParts:
    """The objects that requests and background tasks share; they are open while the application runs.

    A variable `gateway` is an instance of this class.
    """

    settings: GatewaySettings
    keys: ApiKeys
    key_changes: KeyChanges
    actions: ActionLog
    identities: Identities
    renderer: ChatRenderer
    images: ImageReader
    redis: Redis
    writer: StreamWriter
    deleter: StreamDeleter
    engine: EngineClient
    fleet: Fleet
    silence: SilenceWatch
    policies: Policies
    push_driver: PushDriver
    adapters: AdapterPolicies
    canaries: Canaries
    canary_watch: CanaryWatch
    canary_judge: CanaryJudge
    admission: Admission
    sessions: SessionService
    resolver: SessionResolver
    in_flight: CallsInFlight
    sampler: Sampler
    generator: Generator
    recorder: Recorder
    metrics: Metrics
    pipeline: PipelineMonitor
    warnings: WarningMonitor
    lost_keys: LostKeys
    retention: Retention


def parts_of(request: Request) -> GatewayParts:
    """The parts of the application that serves the request."""
    found: GatewayParts = request.app.state.parts
    return found


@asynccontextmanager
async def opened(
    settings: GatewaySettings, renderer: ChatRenderer, metrics: Metrics
) -> AsyncIterator[GatewayParts]:
    """Build the parts, and close them at the end of the block. Waits until Redis answers."""
    gateway = await _build(settings, renderer, metrics)
    await _log_memory_bound(gateway.redis)
    yield gateway
    await gateway.recorder.close()
    await _read_keys(gateway.keys)  # also stores what was used since the last poll
    await gateway.sampler.close()
    await gateway.push_driver.close()
    await gateway.silence.close()
    await gateway.fleet.close()
    await gateway.engine.close()
    gateway.images.close()
    await gateway.writer.close()
    await gateway.redis.aclose()


async def _build(settings: GatewaySettings, renderer: ChatRenderer, metrics: Metrics) -> GatewayParts:
    redis = open_async_redis(settings, timeout_s=10)
    await _claim_schema(redis)
    cached = settings.session_cache_bytes
    writer = StreamWriter(redis, head_cache_bytes=cached, replication=settings.replication)
    engine = EngineClient(settings.engine_timeout_s, bearer(settings.engine_key))
    key_store = KeyStore(redis, writer.confirmed)
    api_keys = ApiKeys(configured_keys(settings), key_store)
    identities = Identities(api_keys, secret := await _secret(redis))
    await _read_keys(api_keys)
    server_key = settings.rollout_server_key or next(iter(settings.admin_keys), None)
    limits, confirm = settings.concurrency, writer.confirmed
    fleet = Fleet(redis, engine, server_key, settings.engines, concurrency=limits, confirm=confirm)
    metrics.fleet.read = fleet.figures
    push_driver = PushDriver(redis, fleet, _push_bounds(settings))
    admission = Admission(settings.limits, api_keys, redis, fleet, metrics, settings.poll_every_s)
    sessions = SessionService(settings, writer, admission, identities)
    canary_watch = CanaryWatch(redis, fleet)
    recorder = Recorder(settings, renderer, writer, metrics, canary_watch)
    metrics.caches |= _caches(writer, renderer)
    sampler = _sampler(settings, engine, fleet, metrics, renderer)
    return GatewayParts(
        settings=settings,
        keys=api_keys,
        key_changes=KeyChanges(api_keys, key_store),
        actions=ActionLog(redis),
        identities=identities,
        renderer=renderer,
        images=ImageReader(renderer.vision, settings.images, renderer.context_length, writer.images),
        redis=redis,
        writer=writer,
        deleter=StreamDeleter(redis),
        engine=engine,
        fleet=fleet,
        silence=SilenceWatch(fleet, engine, metrics, settings.scheduler_silence_s, settings.engine_wait_s),
        policies=Policies(redis, fleet, push_driver, auto_canary=settings.auto_canary),
        push_driver=push_driver,
        adapters=AdapterPolicies(redis, fleet, settings.max_adapters, settings.push_timeout_s),
        canaries=Canaries(redis, fleet, push_driver),
        canary_watch=canary_watch,
        canary_judge=_canary_judge(settings, redis, fleet, writer),
        admission=admission,
        sessions=sessions,
        resolver=SessionResolver(sessions, writer, admission),
        in_flight=CallsInFlight(writer),
        sampler=sampler,
        generator=Generator(settings, renderer, sampler, recorder, canary_watch, admission.max_row_tokens),
        recorder=recorder,
        metrics=metrics,
        pipeline=PipelineMonitor(redis),
        warnings=WarningMonitor(settings.warnings, settings.limits, redis),
        lost_keys=LostKeys(redis, secret, (api_keys.write_again, fleet.refresh)),
        retention=Retention(settings, redis, metrics),
    )


def _caches(writer: StreamWriter, renderer: ChatRenderer) -> Mapping[str, Callable[[], CacheLookups]]:
    return {
        "heads": lambda: CacheLookups(*writer.head_lookups),
        "phrases": renderer.tokenizer.phrases.lookups,
        "passages": renderer.tokenizer.passages.lookups,
        "first_prompts": FIRST_PROMPTS.lookups,
    }


def _sampler(
    settings: GatewaySettings, engine: EngineClient, fleet: Fleet, metrics: Metrics, renderer: ChatRenderer
) -> Sampler:
    return Sampler(
        engine,
        fleet,
        metrics,
        text_of=renderer.text_of,
        vocab_size=renderer.config.vocab_size,
        engine_wait_s=settings.engine_wait_s,
        patience_s=settings.failover_patience_s,
    )


def _canary_judge(settings: GatewaySettings, redis: Redis, fleet: Fleet, writer: StreamWriter) -> CanaryJudge:
    load = partial(writer.load, turns=False)
    return CanaryJudge(redis, fleet, load, settings.canary, automatic=settings.auto_canary)


def _push_bounds(settings: GatewaySettings) -> PushBounds:
    return PushBounds(
        timeout_s=settings.push_timeout_s,
        lease_s=settings.push_lease_s,
        max_unavailable=settings.max_unavailable,
        fetch_fan_out=settings.fetch_fan_out,
        max_version_lag=settings.max_version_lag,
    )


async def _log_memory_bound(redis: Redis) -> None:
    try:
        pressure = await read_backpressure(redis)
    except StorageUnavailable as error:
        logger.warning("Redis does not say how much memory it may use: %s", error)
        return
    logger.log(logging.INFO if pressure.max_bytes else logging.WARNING, memory_bound(pressure))


async def _read_keys(api_keys: ApiKeys) -> None:
    try:
        await api_keys.refresh()
    except StorageUnavailable as error:
        logger.warning("the keys in Redis are read at a later poll: %s", error)


async def _claim_schema(redis: Redis) -> None:
    """Wait until Redis answers. Raises SchemaTooNew if newer gateways have used this Redis."""
    while True:
        try:
            return await claim_schema_async(redis)
        except StorageUnavailable as error:
            logger.warning("waiting for Redis: %s", error)
            await clock.sleep(SECRET_RETRY_S)
        except SchemaTooNew as error:
            logger.critical("%s", error)
            raise


async def _secret(redis: Redis) -> bytes:
    """The secret that signs session keys. All gateways on this Redis share it; the first one makes it."""
    while True:
        try:
            if (secret := await cast(Awaitable[bytes | None], redis.get(key_names.SECRET))) is not None:
                return secret  # read before `set`: a full Redis refuses writes
            await redis.set(key_names.SECRET, secrets.token_bytes(32), nx=True)
        except (RedisError, OSError) as error:
            logger.warning("waiting for Redis: %s", error)
            await clock.sleep(SECRET_RETRY_S)
