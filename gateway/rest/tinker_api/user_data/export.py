"""Writes what is kept of a client session as lines of JSON, some records at a time.

session ─ model ─ its commands ─ its weights ─ next model … ─ samplers ─ samples, by the ids of their sessions
"""

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.edge.one_line import one_line
from gateway.rest.tinker_api.records import ClientModel, ClientSession
from gateway.rest.tinker_api.weights import KeptWeights, KeptWeightsStore
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.http.errors import storage_unavailable
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.commands.submission import MOST_EARLY
from rollout_queue.redis.scripts.commands import REMEMBERED

logger = logging.getLogger(__name__)

AT_ONCE = 500
"""Records that are read by one round trip."""

Line = Mapping[str, Any]


class ClientSessionExport:
    """Reads one client session. The caller has asked whether it is the client's."""

    def __init__(self, redis: Redis, weights: KeptWeightsStore) -> None:
        self._redis, self._weights = redis, weights

    async def lines(self, session: ClientSession) -> AsyncIterator[bytes]:
        """The lines. After an error, the last one is the error body of the REST routes."""
        try:
            async for some in self._records(session):
                yield one_line(b"".join(msgspec.json.encode(each) + b"\n" for each in some))
        except StorageUnavailable as error:
            logger.warning("the export of client session %s ends early: %s", session.session_id, error)
            yield msgspec.json.encode(storage_unavailable(error).body) + b"\n"

    async def _records(self, session: ClientSession) -> AsyncIterator[Iterable[Line]]:
        finished: Any = await stored(self._redis.hget(keys.client_session(session.session_id), "finished"))
        how = None if finished is None else msgspec.json.decode(finished)
        yield [{"type": "session", **msgspec.to_builtins(session), "finished": how}]
        async for names in self._members(keys.made_in(session.session_id)):
            models = sorted(each for each in names if ":train:" in each)
            for model_id in models:
                async for some in self._of_model(model_id):
                    yield some
            targets = [keys.sampling_target(each) for each in names if ":train:" not in each]
            if targets:
                found: Any = await stored(self._redis.mget(targets))  # bounded: AT_ONCE
                yield [{"type": "sampler", **msgspec.json.decode(each)} for each in found if each]
        async for names in self._members(keys.user_sessions(session.session_id)):
            yield [{"type": "sample", "session_id": each} for each in names]

    async def _of_model(self, model_id: str) -> AsyncIterator[Iterable[Line]]:
        fields = await stored(self._redis.hmget(keys.model(model_id), "spec", "ended", "next", "done"))
        spec, ended, following, done = fields
        if spec is None:
            return
        model = msgspec.json.decode(spec, type=ClientModel)
        yield [{"type": "model", **msgspec.to_builtins(model), "ended": ended and ended.decode()}]
        reached, following = int(done if done is not None else -1), int(following)
        for first in range(max(0, following - REMEMBERED), following + MOST_EARLY + 1, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            told: Any = await stored(
                self._redis.hmget(
                    keys.model(model_id), [f"k:{number}" for number in numbers]
                )  # bounded: AT_ONCE
            )
            known = ((number, each.decode()) for number, each in zip(numbers, told, strict=True) if each)
            yield [_command(model_id, number, each, reached, following) for number, each in known]
        yield [_weights(each) for each in await self._weights.all_kept(model_id)]

    async def _members(self, name: str) -> AsyncIterator[list[str]]:
        """Every member of a set, a few at a time; one may come twice if the set changes."""
        cursor = None
        while cursor != 0:
            cursor, found = await stored(self._redis.sscan(name, cursor or 0, count=AT_ONCE))
            yield [each.decode() for each in found]


def _command(model_id: str, number: int, told: str, reached: int, following: int) -> Line:
    kind, at_ms = told.split()
    state = "done" if number <= reached else "waits" if number < following else "waits for earlier ones"
    at = int(at_ms) / 1000
    return {
        "type": "command",
        "model_id": model_id,
        "seq_id": number,
        "kind": kind,
        "created_at": at,
        "state": state,
    }


def _weights(weights: KeptWeights) -> Line:
    return {
        "type": "weights",
        "path": str(weights.path),
        "created_at": weights.kept.created_at,
        "size_bytes": weights.kept.made.size_bytes,
        "expires_at": weights.expires_at,
        "public": weights.terms.public,
        "user_metadata": weights.terms.user_metadata,
    }
