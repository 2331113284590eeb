"""What the routes of the Tinker API share: callers, sessions, the check of the base model, futures."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from gateway.callers.identity import Caller
from gateway.cancellation import cancel_and_wait
from gateway.errors import LimitReached, NotPermitted, ObjectNotFound, invalid
from gateway.parts import GatewayParts
from gateway.rest.access import client_of
from gateway.settings import GatewaySettings, TinkerSettings
from gateway.tinker.paths import PromiseId
from gateway.tinker.promises import Announcements, SamplePromises
from gateway.tinker.samples import SampleMaker
from gateway.tinker.store import ClientRecordRemoval, TinkerStore
from rollout_queue import clock
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.command_log import CommandSubmissions
from rollout_queue.redis.redis_client import open_async_redis
from rollout_queue.trainer_commands import Command, Refused, encode

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 30.0
MOST_DOWNLOADS = 16
"""How many files of exports one process sends at once."""
RETRY_FULL_S = 2
"""When a client may try again whose command found the log full."""


@dataclass(frozen=True)
class TinkerDoor:
    """The objects behind the Tinker API; open while the application runs."""

    gateway: GatewayParts
    log: CommandSubmissions
    store: TinkerStore
    announcements: Announcements
    promises: SamplePromises
    samples: SampleMaker
    removal: ClientRecordRemoval
    downloads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_DOWNLOADS))

    @property
    def base_model(self) -> str:
        """The name by which clients know the base model."""
        settings = self.gateway.settings
        return settings.tinker.base_model or str(settings.model_path)

    def check_base_model(self, name: str) -> str:
        """The base model's name. Raises InvalidRequest for another model."""
        if name not in (self.base_model, self.gateway.settings.model_name):
            raise invalid(
                "base_model",
                f"{name!r} is not served here; this server has {self.base_model!r}",
                code="model_not_found",
            )
        return self.base_model

    async def trains_commands(self) -> bool | None:
        """Whether the trainer carries out commands; None if none has reported."""
        found = await stored(self.gateway.redis.hget(key_names.TRAINER, "source"))
        return None if found is None else bool(found == b"commands")

    async def submit(
        self, model_id: str, number: int, command: Command, digest: str | None = None
    ) -> PromiseId:
        """Store a command durably, once. Returns its promise. `digest` is that of the request, if the command
        stands in place of another one.

        Raises InvalidRequest if its number was used for another command, ObjectNotFound, and LimitReached if
        the log is full.
        """
        digest = digest or hashlib.sha256(encode(command)).hexdigest()[:32]
        promise = PromiseId("c", model_id, number)
        match await self.log.submit(model_id, number, digest, command):
            case "new" | "known":
                return promise
            case "other":
                raise invalid(
                    "seq_id",
                    f"number {number} of model {model_id} was used for another command",
                    code="sequence_conflict",
                )
            case "unknown":
                raise ObjectNotFound(f"there is no model {model_id!r}", param="model_id")
            case "ended":
                raise ObjectNotFound(f"model {model_id} takes no more commands", param="model_id")
            case "far":
                raise invalid("seq_id", f"too many commands before number {number} are missing")
            case "too large":
                most = log_bound(self.gateway)
                why = f"the data of one optimizer step need more than the command log holds ({most} bytes)"
                return await self.submit(model_id, number, Refused(why), digest)
            case "full":
                message = "the command log is full: it is freed when the trainer has written a checkpoint"
                full = LimitReached(message, code="log_full", retry_s=RETRY_FULL_S)
                raise self.gateway.metrics.refused(full)


def log_bound(gateway: GatewayParts) -> int:
    """What the command log may hold, in bytes: at most an eighth of Redis. One model may fill as much again,
    and Redis needs the room of both once more while a trainer reads them."""
    most, redis_bytes = gateway.settings.tinker.max_log_bytes, gateway.admission.redis_bytes
    return most if redis_bytes is None else min(most, redis_bytes // 8)


@asynccontextmanager
async def opened_door(gateway: GatewayParts) -> AsyncIterator[TinkerDoor]:
    """The door, with its own connection for announcements: a read of them blocks."""
    settings: GatewaySettings = gateway.settings
    redis = open_async_redis(settings, timeout_s=20)
    log = CommandSubmissions(gateway.redis, lambda: log_bound(gateway))
    announcements = Announcements(redis)
    promises = SamplePromises(gateway.redis)
    tinker = settings.tinker
    samples = SampleMaker(gateway, promises, announcements, tinker.max_samples, tinker.sample_patience_s)
    store = TinkerStore(gateway.redis, log)
    removal = ClientRecordRemoval(gateway.redis, log, store.weights, gateway.deleter)
    tasks = [
        asyncio.create_task(announcements.follow()),
        asyncio.create_task(_sweep(store, removal, settings.tinker)),
    ]
    try:
        yield TinkerDoor(gateway, log, store, announcements, promises, samples, removal)
    finally:
        await samples.close()
        await cancel_and_wait(tasks)
        await redis.aclose()


async def _sweep(store: TinkerStore, removal: ClientRecordRemoval, settings: TinkerSettings) -> None:
    """End the models of sessions whose client is gone, and weights whose time is over, and remove old
    records, until it is cancelled."""
    timeout_s, retention_s = settings.session_timeout_s, settings.session_retention_s
    while True:
        await clock.sleep(min(SWEEP_EVERY_S, timeout_s / 4, retention_s / 4))
        for work in (
            lambda: store.end_silent(timeout_s),
            store.weights.end_expired,
            lambda: removal.forget_old(retention_s),
        ):
            try:
                await work()
            except StorageUnavailable as error:
                logger.warning("client sessions and weights cannot be ended or forgotten now: %s", error)
            except Exception:  # a bug; the other work goes on, and nobody awaits this task
                logger.exception("client sessions and weights cannot be ended or forgotten")


def door_of(request: Request) -> tuple[TinkerDoor, Caller]:
    """The door and the caller. Raises UnknownCaller, NotPermitted for a session key."""
    _, caller = client_of(request)
    if caller.session_id is not None:
        raise NotPermitted("a session key does not open the Tinker API")
    door: TinkerDoor = request.app.state.tinker
    return door, caller


def now() -> float:
    return clock.now()
