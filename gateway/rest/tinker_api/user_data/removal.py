"""Removes the records of client sessions that ended long ago.

A session goes with its models and its sampling sessions. A model with named weights outlasts its session,
because later sessions load these; it goes some time after the last of them.
"""

import logging
import time
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.rest.tinker_api.records import ClientModel, ClientSession
from gateway.rest.tinker_api.weights import KeptWeightsStore
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.commands.submission import CommandSubmissions
from rollout_queue.redis.scripts import client_sessions as scripts

logger = logging.getLogger(__name__)

AT_ONCE = 100
"""How many sessions are looked at in one sweep, and how many records are removed by one round trip."""
MODEL = ":train:"
"""In the ids of models, and of nothing else."""


class ClientRecordRetention:
    """Several gateways may do this at once, and do what a killed one has begun."""

    def __init__(self, redis: Redis, log: CommandSubmissions, weights: KeptWeightsStore) -> None:
        self._redis, self._log, self._weights = redis, log, weights
        self._forget_model = redis.register_script(scripts.FORGET_MODEL)
        self._forget_session = redis.register_script(scripts.FORGET_SESSION)

    async def forget_old(self, retention_s: float) -> None:
        """Remove some of the sessions that ended so long ago, and of the models that have outlasted theirs.
        Raises StorageUnavailable."""
        until = time.time() - retention_s
        found: Any = await stored(
            self._redis.zrangebyscore(keys.CLIENT_SESSIONS_ENDED, "-inf", until, start=0, num=AT_ONCE)
        )
        for name in [each.decode() for each in found]:
            try:
                await (self._forget(name) if MODEL in name else self._forget_all_of(name))
            except msgspec.MsgspecError as error:  # a newer gateway may be able to read it
                logger.warning("the records of %s cannot be read, and stay: %s", name, error)
                await self._look_again_later(name)

    async def _forget_all_of(self, session_id: str) -> None:
        """Remove a session with all that it has made. The session's own record goes last."""
        session, made = keys.client_session(session_id), keys.made_in(session_id)
        while members := await stored(self._redis.srandmember(made, AT_ONCE)):
            names = sorted(each.decode() for each in members)
            for model_id in (each for each in names if MODEL in each):
                await self._log.end(model_id, "its client session has ended")
                await self._forget(model_id)
            targets = [keys.sampling_target(each) for each in names if MODEL not in each]
            async with self._redis.pipeline(transaction=True) as pipeline:
                if targets:
                    pipeline.unlink(*targets)
                pipeline.srem(made, *names)
                await stored(pipeline.execute())
        packed: Any = await stored(self._redis.hget(session, "record"))
        owner = "" if packed is None else msgspec.json.decode(packed, type=ClientSession).owner
        named = [session, made, keys.client_sessions_of(owner)]
        named += [keys.CLIENT_SESSIONS_ENDED, keys.CLIENT_SESSIONS_LIVE]
        if await stored(self._forget_session(named, [session_id])):
            logger.info("the records of client session %s are removed", session_id)

    async def _forget(self, model_id: str) -> None:
        """Remove a model that has ended; or, if it has named weights, look for them again later."""
        await self._weights.drop_unnamed(model_id)
        packed, gone = await self._log.spec(model_id), True
        if packed is not None:
            owner = msgspec.json.decode(packed, type=ClientModel).owner
            named = [keys.model(model_id), keys.kept(model_id), keys.kept_terms(model_id)]
            gone = bool(await stored(self._forget_model([*named, keys.models_of(owner)], [model_id])))
        if gone:
            await stored(self._redis.zrem(keys.CLIENT_SESSIONS_ENDED, model_id))
        else:
            await self._look_again_later(model_id)

    async def _look_again_later(self, name: str) -> None:
        await stored(self._redis.zadd(keys.CLIENT_SESSIONS_ENDED, {name: time.time()}))
