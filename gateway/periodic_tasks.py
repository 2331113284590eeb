"""The gateway's periodic tasks: state of the fleet, limits, expiry of sessions, deletions, retention."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from gateway.callers.api_keys import configured_keys
from gateway.cancellation import cancel_and_wait
from gateway.fleet.silence import WATCH_EVERY_S
from gateway.generations.conversation import FIRST_PROMPTS
from gateway.generations.digests import clear_digest_cache
from gateway.parts import GatewayParts
from gateway.settings import GatewaySettings
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.protocol.conditions import NO_EVICTION

logger = logging.getLogger(__name__)

EXPIRE_BATCH = 100
TEXT_CACHES_S = 60.0
"""How often cached texts of conversations are dropped, because their sessions may have been deleted."""

LAG_EVERY_S = 0.1
"""How often the lag of the event loop is measured."""

Task = Callable[[GatewayParts], Awaitable[None]]


async def refresh_fleet(gateway: GatewayParts) -> None:
    """Ask every rollout server for its state, and publish the fleet's metrics."""
    await gateway.fleet.refresh()
    metrics, fleet = gateway.metrics, gateway.fleet
    metrics.serving_version.set(fleet.serving if fleet.serving is not None else -1)
    metrics.in_rotation.set(fleet.in_rotation)
    metrics.servers.clear()
    for server in fleet.servers.values():
        metrics.servers.labels(server.shown_state).inc()


async def drive_pushes(gateway: GatewayParts) -> None:
    """Bring every rollout server to the version that it is to serve, and judge the canary, if no other
    gateway does."""
    try:
        await gateway.push_driver.step()
        if gateway.push_driver.leads and await gateway.canary_judge.step():
            gateway.push_driver.wake()
    finally:
        await gateway.push_driver.wait(gateway.settings.poll_every_s)


async def note_canary(gateway: GatewayParts) -> None:
    """Store how the calls of a canary ended."""
    await gateway.canary_watch.write()


async def score_canary(gateway: GatewayParts) -> None:
    """Compare the version of a canary with the served one."""
    await gateway.canary_watch.score()


async def watch_silence(gateway: GatewayParts) -> None:
    """Move the answers of engines that give no sign of life."""
    gateway.silence.check()


async def measure_lag(gateway: GatewayParts) -> None:
    """Sleep, and note by how much the event loop was late."""
    due = clock.monotonic() + LAG_EVERY_S
    await clock.sleep(LAG_EVERY_S)
    gateway.metrics.loop_lag.add(max(0.0, clock.monotonic() - due))


async def keep_sessions_open(gateway: GatewayParts) -> None:
    """Put off the expiry of sessions that have calls in flight."""
    try:
        await gateway.in_flight.put_off_expiry()
    except StorageUnavailable as error:
        logger.warning("sessions with calls in flight may expire: %s", error)


async def expire_sessions(gateway: GatewayParts) -> None:
    """Close all overdue sessions, batch by batch."""
    try:
        while await gateway.writer.expire(clock.now(), EXPIRE_BATCH) == EXPIRE_BATCH:
            pass
    except StorageUnavailable as error:
        logger.warning("overdue sessions cannot be closed: %s", error)


async def retract_failed_turns(gateway: GatewayParts) -> None:
    """Retract turns that Redis may have stored after their clients were told that the call failed."""
    try:
        await gateway.writer.retract_failed()
    except StorageUnavailable as error:
        logger.warning("failed turns cannot be retracted yet: %s", error)


async def refresh_limits(gateway: GatewayParts) -> None:
    """Read the queue's length, the counts of other gateways, and how recent sessions ended."""
    await gateway.admission.refresh()
    _show_deployment(gateway)
    await gateway.warnings.refresh()


def _show_deployment(gateway: GatewayParts) -> None:
    """Publish the metrics of what all gateways share."""
    shown, admission, plan = gateway.metrics.deployment, gateway.admission, gateway.fleet.plan
    shown.redis_up.set(bool(admission.redis_answers))
    shown.held.set(plan.hold is not None)
    if plan.push is not None:
        shown.push_version.set(plan.push.version)
        shown.push_is(plan.push.state)
    if not admission.redis_answers:
        return
    seen = admission.backpressure
    shown.used_bytes.set(seen.used_bytes)
    shown.max_bytes.set(seen.max_bytes)
    shown.evicted.set(seen.evicted)
    shown.evicts.set(seen.eviction != NO_EVICTION)
    shown.entries.set(seen.entries)
    shown.dead_letters.set(seen.dead)
    shown.unfinished.set(seen.unfinished)
    if (trainer := seen.trainer) is not None:
        shown.waiting.set(trainer.rollouts_waiting)
        shown.owed.set(trainer.rollouts_owed)
        shown.per_step.set(trainer.rollouts_per_step)
        shown.trained_version.set(trainer.version)
        shown.trainer_seen.set(trainer.last_seen)
        shown.trainer_is(trainer.state)


async def refresh_keys(gateway: GatewayParts) -> None:
    """Read API keys that were changed, and share what was used of the keys here."""
    try:
        await gateway.keys.refresh()
    except StorageUnavailable as error:
        logger.warning("changes of API keys are not known yet: %s", error)


async def watch_keys(gateway: GatewayParts) -> None:
    """Notice keys that Redis has lost."""
    try:
        await gateway.lost_keys.refresh()
    except StorageUnavailable as error:
        logger.warning("whether Redis has lost keys is not known: %s", error)


async def finish_deletions(gateway: GatewayParts) -> None:
    """Drop deleted sessions from memory, and finish deletions that a stopped gateway began."""
    try:
        await gateway.writer.forget_deleted()
        await gateway.deleter.finish(clock.now())
    except StorageUnavailable as error:
        logger.warning("deletions cannot be read: %s", error)


async def apply_retention(gateway: GatewayParts) -> None:
    """Remove sessions whose verdict is `retention_s` old. If Redis fills up, remove the oldest earlier."""
    try:
        await gateway.retention.refresh()
    except StorageUnavailable as error:
        logger.warning("settled sessions cannot be removed: %s", error)


async def drop_text_caches(gateway: GatewayParts) -> None:
    """Drop every cached text of a conversation."""
    gateway.renderer.tokenizer.clear_caches()
    gateway.images.clear()
    FIRST_PROMPTS.clear()
    clear_digest_cache()


POLLED: tuple[Task, ...] = (
    refresh_fleet,
    keep_sessions_open,
    expire_sessions,
    retract_failed_turns,
    refresh_limits,
    refresh_keys,
    watch_keys,
    finish_deletions,
    apply_retention,
)
"""The tasks that run every `poll_every_s`."""


@asynccontextmanager
async def background_tasks(gateway: GatewayParts) -> AsyncIterator[None]:
    """Run the periodic tasks while the block runs."""
    poll_every_s = gateway.settings.poll_every_s
    running = [asyncio.create_task(_repeat(task, gateway, poll_every_s)) for task in POLLED]
    running.append(asyncio.create_task(_repeat(drive_pushes, gateway, 0)))
    running += [
        asyncio.create_task(_repeat(task, gateway, 0)) for task in (measure_lag, note_canary, score_canary)
    ]
    running.append(asyncio.create_task(_repeat(watch_silence, gateway, WATCH_EVERY_S)))
    running.append(asyncio.create_task(_repeat(drop_text_caches, gateway, TEXT_CACHES_S)))
    yield
    await cancel_and_wait(running)


@asynccontextmanager
async def reload_on_hangup(gateway: GatewayParts) -> AsyncIterator[None]:
    """Read the configured keys again at each SIGHUP while the block runs."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(
            signal.SIGHUP, lambda: gateway.keys.reload(lambda: configured_keys(GatewaySettings()))
        )
    except (ValueError, RuntimeError):  # not the main thread, as in tests
        yield
        return
    yield
    loop.remove_signal_handler(signal.SIGHUP)


async def _repeat(task: Task, gateway: GatewayParts, every_s: float) -> None:
    """Run the task again and again; a failure does not end it."""
    while True:
        try:
            await task(gateway)
        except Exception:  # outermost frame of a task: log the bug and go on
            logger.exception("the background task %s failed", getattr(task, "__name__", task))
        await clock.sleep(every_s)
