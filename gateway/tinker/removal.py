"""Removes the records of client sessions: those that are deleted, and those that ended long ago.

session ─▶ closed: nobody finds it ─▶ models, sampling sessions, samples ─▶ the session's own record

A session that ended long ago goes with its models and its sampling sessions. A model with named weights
outlasts it, because later sessions load these; it goes some time after the last of them. A session that is
deleted goes with its weights and its samples, too.
"""

import logging
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.tinker.paths import UNREADABLE, ClientModel, ClientSession
from gateway.tinker.weights import KeptWeightsStore
from rollout_queue import clock
from rollout_queue.redis import client_session_scripts, key_names
from rollout_queue.redis.availability import stored
from rollout_queue.redis.command_log import CommandSubmissions
from rollout_queue.redis.session_deletion import StreamDeleter

logger = logging.getLogger(__name__)

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
        self._close = redis.register_script(client_session_scripts.CLOSE_SESSION)
        self._forget_model = redis.register_script(client_session_scripts.FORGET_MODEL)
        self._forget_session = redis.register_script(client_session_scripts.FORGET_SESSION)

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
        closed = await stored(self._close([session, *lists], [session_id, how, clock.now()]))
        said, packed = closed or (b"gone", None)
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
        if await stored(self._forget_session(named, [session_id])) and record is not None:
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
            named: list[str] = [
                key_names.model(model_id),
                key_names.kept(model_id),
                key_names.kept_terms(model_id),
            ]
            named += [key_names.models_of(model.owner), key_names.DROPPED, key_names.COMMANDS]
            named.append(key_names.client_records_of_user(user))
            gone = bool(await stored(self._forget_model(named, [model_id, user and "named"])))
        if gone:
            await stored(self._redis.zrem(key_names.CLIENT_SESSIONS_ENDED, model_id))
        else:
            await stored(self._redis.zadd(key_names.CLIENT_SESSIONS_ENDED, {model_id: clock.now()}))
        return gone
