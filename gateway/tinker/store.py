"""Client sessions, models and sampling sessions in Redis. Each belongs to the client key that made it.

Records are removed of client sessions that are deleted, and of those that ended long ago:

session ─▶ closed: nobody finds it ─▶ models, sampling sessions, samples ─▶ the session's own record

A session that ended long ago goes with its models and its sampling sessions. A model with named weights
outlasts it, because later sessions load these; it goes some time after the last of them. A session that is
deleted goes with its weights and its samples, too.
"""

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
from rollout_queue.contract.head import ListPosition, user_digest
from rollout_queue.redis import key_names
from rollout_queue.redis.availability import available, stored
from rollout_queue.redis.client_session_scripts import (
    ADD_MADE,
    ADD_SESSION,
    ADD_TARGET,
    BEAT,
    CLOSE_SESSION,
    END_SESSION,
    FORGET_MODEL,
    FORGET_SESSION,
)
from rollout_queue.redis.command_log import CommandSubmissions, Gone
from rollout_queue.redis.lua import Argument
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.trainer_commands import Kept

logger = logging.getLogger(__name__)


MADE_AT_ONCE = 500
"""How many models and sampling sessions are read at once. Redis serves nobody else meanwhile."""

R = TypeVar("R", ClientSession, ClientModel, SamplingTarget)


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

    # Client sessions

    async def add_session(self, session: ClientSession) -> None:
        """Raises UserDeleted if it is for a user whose data was deleted."""
        user = session.user or ""
        named = [key_names.client_session(session.session_id), key_names.client_sessions_of(session.owner)]
        named += [key_names.CLIENT_SESSIONS_LIVE, key_names.DELETED_USERS]
        named.append(key_names.client_records_of_user(user))
        arguments: list[Argument] = [session.session_id, encode_record(session), session.created_at]
        if not await ADD_SESSION.run(self._redis, named, [*arguments, user and user_digest(user)]):
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
        self, caller: Caller, last: ListPosition | None, count: int
    ) -> list[ListPosition]:
        """Some sessions of the caller's key that began before `last`, the newest first."""
        name, start = key_names.client_sessions_of(caller.owner), 0
        if last is not None:
            rank = await stored(self._redis.zrevrank(name, last.session_id))
            if rank is None:  # its record is removed
                rank = await stored(self._redis.zcount(name, last.created_at, "+inf")) - 1
            start = rank + 1
        found: Any = await stored(self._redis.zrevrange(name, start, start + count - 1, withscores=True))
        return [ListPosition(created_at, session_id.decode()) for session_id, created_at in found]

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
        return bool(await BEAT.run(self._redis, named, [session.session_id, clock.now()]))

    async def finish(self, session: ClientSession, how: bytes) -> None:
        """The first finish stays."""
        await self.end_models(session.session_id, "its client session has finished", how)

    async def end_models(self, session_id: str, why: str, finished: bytes = b"") -> None:
        """Take no more models, and no more commands for those of a session, so that the trainer frees them.
        From the first end on, the records of the session have a time to live."""
        named = [key_names.client_session(session_id), key_names.CLIENT_SESSIONS_ENDED]
        await END_SESSION.run(self._redis, named, [session_id, clock.now(), finished])
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
        noted = await ADD_MADE.run(self._redis, named, [session_id, model.model_id])
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
        if not await ADD_TARGET.run(self._redis, named, [name, encode_record(target)]):
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


AT_ONCE = 100
"""How many sessions are looked at in one sweep, and how many records are removed by one round trip."""
OVERDUE_S = 30.0
"""A deletion that has not ended after this time is finished by any gateway."""
MODEL = ":train:"
"""In the ids of models, and of nothing else."""
ENDED = "its client session has ended"


class RemovedRecords(msgspec.Struct):
    """How much the removal of a client session has removed. If it takes longer than OVERDUE_S, other gateways
    help, and what they removed is not counted."""

    models: int = 0
    weights: int = 0
    """Checkpoints, and named weights to sample from."""
    samplers: int = 0
    samples: int = 0


class ClientRecordRemoval:
    """Several gateways may do this at once, and do what a killed one has begun. Every method may raise
    StorageUnavailable, and may be repeated then."""

    def __init__(
        self, redis: Redis, log: CommandSubmissions, weights: KeptWeightsStore, deleter: StreamDeleter
    ) -> None:
        """`deleter` deletes the sessions that record samples."""
        self._redis, self._log, self._weights, self._deleter = redis, log, weights, deleter

    async def forget_old(self, retention_s: float) -> None:
        """Remove some of the sessions that ended so long ago, and of the models that have outlasted theirs;
        and go on with the deletion of sessions."""
        deleting, ended = key_names.CLIENT_SESSIONS_DELETING, key_names.CLIENT_SESSIONS_ENDED
        for listed, age_s in ((deleting, OVERDUE_S), (ended, retention_s)):
            until = clock.now() - age_s
            found: Any = await stored(self._redis.zrangebyscore(listed, "-inf", until, start=0, num=AT_ONCE))
            for name in [each.decode() for each in found]:
                try:
                    await (self._forget(name) if MODEL in name else self._remove(name, "forgotten"))
                except UNREADABLE as error:
                    logger.warning("the records of %s cannot be read, and stay: %s", name, error)
                    await stored(self._redis.zadd(listed, {name: clock.now()}))

    async def delete_session(self, session_id: str) -> RemovedRecords:
        """Delete a session with all that it has made. From the first step on, no request finds it."""
        return await self._remove(session_id, "deleted")

    async def delete_user(self, user: str) -> int:
        """Delete the client sessions of a user for whom no new ones are taken, and the models that have
        outlasted theirs. Returns how many sessions there were."""
        sessions, records = 0, key_names.client_records_of_user(user)
        while names := await stored(self._redis.srandmember(records, AT_ONCE)):
            for name in [each.decode() for each in names]:
                if MODEL in name:
                    await self._delete_model(name)
                else:
                    await self.delete_session(name)
                    sessions += 1
            await stored(self._redis.srem(records, *names))  # bounded: AT_ONCE
        return sessions

    async def _remove(self, session_id: str, how: str) -> RemovedRecords:
        """Remove a session with all that it has made. The session's own record goes last."""
        removed, made = RemovedRecords(), key_names.made_in(session_id)
        session, lists = key_names.client_session(session_id), [key_names.CLIENT_SESSIONS_LIVE]
        lists += [key_names.CLIENT_SESSIONS_ENDED, key_names.CLIENT_SESSIONS_DELETING]
        arguments = (session_id, how, clock.now())
        said, packed = await CLOSE_SESSION.run(self._redis, [session, *lists], arguments) or (b"gone", None)
        record = None if packed is None else msgspec.json.decode(packed, type=ClientSession)
        while members := await stored(self._redis.srandmember(made, AT_ONCE)):
            names = sorted(each.decode() for each in members)
            for model_id in (each for each in names if MODEL in each):
                await self._log.end(model_id, ENDED)
                if said == b"deleted":
                    removed.weights += await self._delete_model(model_id)
                else:
                    await self._forget(model_id)
                removed.models += 1
            targets = [key_names.sampling_target(each) for each in names if MODEL not in each]
            async with self._redis.pipeline(transaction=True) as pipeline:
                if targets:
                    pipeline.unlink(*targets)  # bounded: AT_ONCE
                pipeline.srem(made, *names)  # bounded: AT_ONCE
                await stored(pipeline.execute())
            removed.samplers += len(targets)
        if said == b"deleted":  # samples name their client session as their user
            removed.samples = (await self._deleter.delete_user(session_id)).sessions
        named = [session, made, key_names.client_sessions_of(record.owner if record else ""), *lists]
        named += [key_names.client_records_of_user((record and record.user) or "")]
        if await FORGET_SESSION.run(self._redis, named, [session_id]) and record is not None:
            logger.info("the records of client session %s are removed: it is %s", session_id, said.decode())
        return removed

    async def _delete_model(self, model_id: str) -> int:
        """Delete a model that has ended, with all that it has saved and the results of its commands. Returns
        how many named weights it had."""
        count: Any = await stored(self._redis.hget(key_names.model(model_id), "next"))  # final: it has ended
        weights = await self._weights.delete_all(model_id)
        await self._log.forget_results(model_id, int(count or 0))  # this may be the last that is done
        while not await self._forget(model_id):  # the trainer has saved more meanwhile
            weights += await self._weights.delete_all(model_id)
        await self._log.forget_results(model_id, int(count or 0))  # what the trainer has answered meanwhile
        return weights

    async def _forget(self, model_id: str) -> bool:
        """Remove a model that has ended; or, if it has named weights, look for them again later. Returns
        whether it is gone."""
        await self._weights.drop_unnamed(model_id)
        packed, gone = await self._log.spec(model_id), True
        if packed is not None:
            model = msgspec.json.decode(packed, type=ClientModel)
            user = model.user or ""
            named: list[str] = [key_names.model(model_id), key_names.kept(model_id)]
            named.append(key_names.kept_terms(model_id))
            named += [key_names.models_of(model.owner), key_names.DROPPED, key_names.COMMANDS]
            named.append(key_names.client_records_of_user(user))
            gone = bool(await FORGET_MODEL.run(self._redis, named, [model_id, user and "named"]))
        if gone:
            await stored(self._redis.zrem(key_names.CLIENT_SESSIONS_ENDED, model_id))
        else:
            await stored(self._redis.zadd(key_names.CLIENT_SESSIONS_ENDED, {model_id: clock.now()}))
        return gone
