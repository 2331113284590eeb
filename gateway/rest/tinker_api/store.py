"""Client sessions, models and sampling sessions in Redis. Each belongs to the client key that made it."""

import time
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.rest.tinker_api.paths import WeightsPath
from gateway.rest.tinker_api.records import (
    ClientModel,
    ClientSession,
    Record,
    SamplingTarget,
    encode_record,
)
from gateway.sessions.identity import Caller
from rollout_queue.commands.result import Kept
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.commands.submission import CommandSubmissions

R = TypeVar("R", ClientSession, ClientModel, SamplingTarget)


class TinkerStore:
    """Every method may raise StorageUnavailable, and ObjectNotFound for what is not the caller's."""

    def __init__(self, redis: Redis, log: CommandSubmissions) -> None:
        self._redis, self._log = redis, log

    # Client sessions

    async def add_session(self, session: ClientSession) -> None:
        name = keys.client_session(session.session_id)
        fields: dict[Any, Any] = {"record": encode_record(session), "beat": time.time()}
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hset(name, mapping=fields)
            pipeline.zadd(keys.client_sessions_of(session.owner), {session.session_id: session.created_at})
            await stored(pipeline.execute())

    async def session(self, session_id: str, caller: Caller) -> ClientSession:
        found: Any = await stored(self._redis.hget(keys.client_session(session_id), "record"))
        return _owned(_read(found, ClientSession), caller, f"session {session_id!r}")

    async def beat(self, session: ClientSession) -> bool:
        """Note a sign of life. Returns False if the session has finished."""
        name = keys.client_session(session.session_id)
        await stored(self._redis.hset(name, "beat", str(time.time())))
        return not await stored(self._redis.hexists(name, "finished"))

    async def finish(self, session: ClientSession, how: bytes) -> None:
        """The first finish stays."""
        name = keys.client_session(session.session_id)
        await stored(self._redis.hsetnx(name, "finished", how.decode()))

    # Models

    async def add_model(self, model: ClientModel) -> None:
        """Raises InvalidRequest if a model with this id and other terms exists."""
        spec = await self._log.open(model.model_id, model.owner, encode_record(model))
        known = _read(spec, ClientModel)
        if known is not None and _terms(known) != _terms(model):
            message = f"model {model.model_id} exists already, and was made with other arguments"
            raise InvalidRequest(message, param="model_seq_id")

    async def model(self, model_id: str, caller: Caller) -> ClientModel:
        spec = await self._log.spec(model_id)
        return _owned(_read(spec, ClientModel), caller, f"model {model_id!r}")

    async def kept(self, path: WeightsPath, caller: Caller) -> tuple[ClientModel, Kept]:
        """The model that made these weights, and what is kept of them."""
        model = await self.model(path.model_id, caller)
        kept = await self._log.kept_as(path.model_id, path.kept_as)
        if kept is None:
            raise ObjectNotFound(f"there are no weights {path}", param="path")
        return model, kept

    # Sampling sessions

    async def add_target(self, target: SamplingTarget) -> None:
        """The first target of this id stays: a repeated request has the same."""
        name = keys.sampling_target(target.sampling_session_id)
        await stored(self._redis.set(name, encode_record(target), nx=True))

    async def target(self, sampling_session_id: str, caller: Caller) -> SamplingTarget:
        found: Any = await stored(self._redis.get(keys.sampling_target(sampling_session_id)))
        target = _read(found, SamplingTarget)
        return _owned(target, caller, f"sampling session {sampling_session_id!r}")


def _read(packed: bytes | None, kind: type[R]) -> R | None:
    return None if packed is None else msgspec.json.decode(packed, type=kind)


def _owned(record: R | None, caller: Caller, name: str) -> R:
    if record is None or not _may_use(record, caller):
        raise ObjectNotFound(f"there is no {name}")
    return record


def _may_use(record: Record, caller: Caller) -> bool:
    return caller.role == "admin" or record.owner in (caller.owner, caller.former)


def _terms(model: ClientModel) -> ClientModel:
    """What a repeated request says again."""
    return msgspec.structs.replace(model, created_at=0.0)
