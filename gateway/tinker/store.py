"""Client sessions, models and sampling sessions in Redis. Each belongs to the client key that made it."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from redis.asyncio import Redis

from gateway.callers.identity import Caller
from gateway.errors import InvalidRequest, ObjectNotFound
from gateway.tinker.paths import (
    UNREADABLE,
    ClientModel,
    ClientSession,
    Record,
    SamplingTarget,
    WeightsPath,
    encode_record,
)
from gateway.tinker.weights import KeptWeightsStore
from rollout_queue import clock
from rollout_queue.contract.errors import UserDeleted
from rollout_queue.contract.head import user_digest
from rollout_queue.redis import client_session_scripts, key_names
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.command_log import CommandSubmissions, Gone
from rollout_queue.trainer_commands import Kept

logger = logging.getLogger(__name__)


MADE_AT_ONCE = 500
"""How many models and sampling sessions are read at once. Redis serves nobody else meanwhile."""

R = TypeVar("R", ClientSession, ClientModel, SamplingTarget)


class SessionPlace(NamedTuple):
    """A client session's place among those of its key."""

    created_at: float
    session_id: str


class FoundSession(NamedTuple):
    """A client session, and how it is."""

    session: ClientSession
    finished: dict[str, Any] | None
    """How its client said that it ended."""
    ended: bool
    """Whether it takes no more models."""


class TinkerStore:
    """Every method may raise StorageUnavailable, and ObjectNotFound for what is not the caller's."""

    def __init__(self, redis: Redis, log: CommandSubmissions) -> None:
        self._redis, self._log = redis, log
        self.weights = KeptWeightsStore(redis, log)
        self._beat = redis.register_script(client_session_scripts.BEAT)
        self._end_session = redis.register_script(client_session_scripts.END_SESSION)
        self._add_session = redis.register_script(client_session_scripts.ADD_SESSION)
        self._add_made = redis.register_script(client_session_scripts.ADD_MADE)
        self._add_target = redis.register_script(client_session_scripts.ADD_TARGET)

    # Client sessions

    async def add_session(self, session: ClientSession) -> None:
        """Raises UserDeleted if it is for a user whose data was deleted."""
        user = session.user or ""
        named = [key_names.client_session(session.session_id), key_names.client_sessions_of(session.owner)]
        named += [
            key_names.CLIENT_SESSIONS_LIVE,
            key_names.DELETED_USERS,
            key_names.client_records_of_user(user),
        ]
        arguments: list[Any] = [session.session_id, encode_record(session), session.created_at]
        if not await stored(self._add_session(named, [*arguments, user and user_digest(user)])):
            raise UserDeleted

    async def session(self, session_id: str, caller: Caller) -> ClientSession:
        found: Any = await stored(self._redis.hget(key_names.client_session(session_id), "record"))
        return _owned(_read(found, ClientSession), caller, f"session {session_id!r}")

    async def session_ids(self, caller: Caller, limit: int, offset: int) -> list[str]:
        """The ids of some sessions of the caller's key, the newest first."""
        name = key_names.client_sessions_of(caller.owner)
        ids: Any = await stored(self._redis.zrevrange(name, offset, offset + limit - 1))
        return [each.decode() for each in ids]

    async def sessions_after(
        self, caller: Caller, last: SessionPlace | None, count: int
    ) -> list[SessionPlace]:
        """Some sessions of the caller's key that began before `last`, the newest first."""
        name, start = key_names.client_sessions_of(caller.owner), 0
        if last is not None:
            rank = await stored(self._redis.zrevrank(name, last.session_id))
            if rank is None:  # its record is removed
                rank = await stored(self._redis.zcount(name, last.created_at, "+inf")) - 1
            start = rank + 1
        found: Any = await stored(self._redis.zrevrange(name, start, start + count - 1, withscores=True))
        return [SessionPlace(created_at, session_id.decode()) for session_id, created_at in found]

    async def found_sessions(self, session_ids: Sequence[str], caller: Caller) -> list[FoundSession]:
        """Those of these sessions that exist and are the caller's."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for each in session_ids:
                pipeline.hmget(key_names.client_session(each), "record", "finished")
                pipeline.zscore(key_names.CLIENT_SESSIONS_ENDED, each)
            replies = await stored(pipeline.execute())
        found = []
        for (record, finished), ended in zip(replies[::2], replies[1::2], strict=True):
            session = _read(record, ClientSession)
            if session is not None and _may_use(session, caller):
                how = None if finished is None else msgspec.json.decode(finished, type=dict[str, Any])
                found.append(FoundSession(session, how, ended is not None))
        return found

    async def made_in(self, session: ClientSession) -> tuple[list[str], list[str]]:
        """The ids of the models and of the sampling sessions of a session."""
        ids = await self._made_in(session.session_id)
        return [each for each in ids if ":train:" in each], [each for each in ids if ":sample:" in each]

    async def _made_in(self, session_id: str) -> list[str]:
        with available():
            members = self._redis.sscan_iter(key_names.made_in(session_id), count=MADE_AT_ONCE)
            return sorted({each.decode() async for each in members})

    async def beat(self, session: ClientSession) -> bool:
        """Note a sign of life. Returns False if the session has finished."""
        named = [key_names.client_session(session.session_id), key_names.CLIENT_SESSIONS_LIVE]
        return bool(await stored(self._beat(named, [session.session_id, clock.now()])))

    async def finish(self, session: ClientSession, how: bytes) -> None:
        """The first finish stays."""
        await self.end_models(session.session_id, "its client session has finished", how)

    async def end_models(self, session_id: str, why: str, finished: bytes = b"") -> None:
        """Take no more models, and no more commands for those of a session, so that the trainer frees them.
        From the first end on, the records of the session have a time to live."""
        named = [key_names.client_session(session_id), key_names.CLIENT_SESSIONS_ENDED]
        await stored(self._end_session(named, [session_id, clock.now(), finished]))
        for made in await self._made_in(session_id):
            if ":train:" in made:
                if await self._log.end(made, why):
                    logger.info("model %s ends: %s", made, why)
                try:
                    await self.weights.drop_unnamed(made)
                except UNREADABLE as error:  # it is tried again before the model is forgotten
                    logger.warning("what model %s has published cannot be read, and stays: %s", made, error)
        await stored(self._redis.zrem(key_names.CLIENT_SESSIONS_LIVE, session_id))

    async def end_silent(self, timeout_s: float) -> None:
        """End the models of the sessions without a sign of life for so long."""
        until, why = clock.now() - timeout_s, f"its client gave no sign of life for {timeout_s:g} s"
        found: Any = await stored(
            self._redis.zrangebyscore(key_names.CLIENT_SESSIONS_LIVE, "-inf", until, start=0, num=100)
        )
        for session_id in found:
            await self.end_models(session_id.decode(), why)

    # Models

    async def add_model(self, model: ClientModel) -> None:
        """Raises InvalidRequest if a model with this id and other terms exists, or the session has ended."""
        session_id, ended = model.session_id, key_names.CLIENT_SESSIONS_ENDED
        named = [key_names.client_session(session_id), key_names.made_in(session_id), ended]
        noted = await stored(self._add_made(named, [session_id, model.model_id]))
        if noted == b"unknown":
            raise ObjectNotFound(f"there is no session {session_id!r}", param="session_id")
        if noted == b"ended":
            message = f"session {session_id} has ended: it takes no new models, so begin another one"
            raise InvalidRequest(message, param="session_id", code="session_ended")
        spec = await self._log.open(model.model_id, model.owner, encode_record(model), session_id)
        if isinstance(spec, Gone):
            raise ObjectNotFound(f"there is no session {session_id!r}", param="session_id")
        if await stored(self._redis.zscore(ended, session_id)) is not None:  # it has ended meanwhile
            await self._log.end(model.model_id, "its client session has ended")
        known = _read(spec, ClientModel)
        if known is not None and _terms(known) != _terms(model):
            message = f"model {model.model_id} exists already, and was made with other arguments"
            raise InvalidRequest(message, param="model_seq_id")

    async def model(self, model_id: str, caller: Caller) -> ClientModel:
        spec = await self._log.spec(model_id)
        return _owned(_read(spec, ClientModel), caller, f"model {model_id!r}")

    async def kept(self, path: WeightsPath, caller: Caller) -> tuple[ClientModel, Kept]:
        """The model that made these weights, and what is kept of them. They must be of the caller's key, or
        public."""
        spec = _read(await self._log.spec(path.model_id), ClientModel)
        found = await self.weights.find(path)
        if found is None or not found.terms.public:
            _owned(spec, caller, f"model {path.model_id!r}")
        if spec is None or found is None:
            raise ObjectNotFound(f"there are no weights {path}", param="path")
        if found.expired:
            raise ObjectNotFound(f"the weights {path} have expired", param="path")
        return spec, found.kept

    async def models(self, caller: Caller, limit: int, offset: int) -> tuple[list[ClientModel], int]:
        """Some models of the caller's key, the newest first, and how many there are."""
        name = key_names.models_of(caller.owner)
        ids: Any = await stored(self._redis.zrevrange(name, offset, offset + limit - 1))
        specs = [_read(await self._log.spec(each.decode()), ClientModel) for each in ids]
        return [each for each in specs if each is not None], await stored(self._redis.zcard(name))

    # Sampling sessions

    async def add_target(self, target: SamplingTarget) -> None:
        """The first target of this id stays: a repeated request has the same."""
        name, made = target.sampling_session_id, key_names.made_in(target.session_id)
        named = [key_names.client_session(target.session_id), made, key_names.sampling_target(name)]
        if not await stored(self._add_target(named, [name, encode_record(target)])):
            raise ObjectNotFound(f"there is no session {target.session_id!r}", param="session_id")

    async def target(self, sampling_session_id: str, caller: Caller) -> SamplingTarget:
        found: Any = await stored(self._redis.get(key_names.sampling_target(sampling_session_id)))
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
