"""The gateways' end of the stream, on Redis: each append is one script, so it happens whole or not at all."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_queue import keys
from rollout_queue.codec import decode, decode_spec, encode
from rollout_queue.errors import Conflict, SessionClosed, StorageUnavailable
from rollout_queue.head import SessionHead
from rollout_queue.records import Outcome, Reward, SessionSpec, Turn, Verdict

_OPEN = """
-- KEYS: session, sessions, deadlines [, group, members]   ARGV: id, spec, created, expires, owner, size
local spec = redis.call('HGET', KEYS[1], 'spec')
if spec then return {'exists', spec} end
if KEYS[4] then
    local size, owner = unpack(redis.call('HMGET', KEYS[4], 'size', 'owner'))
    if owner and owner ~= ARGV[5] then return {'owner'} end
    if size and ARGV[6] ~= '' and size ~= ARGV[6] then return {'size', size} end
    size = size or ARGV[6]
    if size ~= '' and redis.call('SCARD', KEYS[5]) >= tonumber(size) then return {'full', size} end
    redis.call('HSET', KEYS[4], 'size', size, 'owner', ARGV[5])
    redis.call('SADD', KEYS[5], ARGV[1])
end
redis.call('HSET', KEYS[1], 'spec', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return {'created'}
"""

_APPEND_TURN = """
-- KEYS: session, stream, deadlines   ARGV: id, field, turn, expires
if redis.call('HEXISTS', KEYS[1], 'spec') == 0 then return 'unknown' end
if redis.call('HEXISTS', KEYS[1], 'outcome') == 1 then return 'closed' end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[3])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
return 'stored'
"""

_APPEND_REWARD = """
-- KEYS: session, stream   ARGV: field, reward, late reward
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if stored then return stored end
local reward = ARGV[2]
if redis.call('HEXISTS', KEYS[1], 'verdict') == 1 then reward = ARGV[3]
else redis.call('XADD', KEYS[2], '*', 'r', reward) end
redis.call('HSET', KEYS[1], ARGV[1], reward)
return reward
"""

_APPEND_OUTCOME = """
-- KEYS: session, stream, deadlines, verdicts   ARGV: id, outcome, reward field, reward, verdict, verdict code
local stored = redis.call('HGET', KEYS[1], 'outcome')
if stored then return stored end
if ARGV[3] ~= '' then
    redis.call('XADD', KEYS[2], '*', 'r', ARGV[4])
    redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSET', KEYS[1], 'outcome', ARGV[2])
if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[1], 'verdict', ARGV[5])
    redis.call('HINCRBY', KEYS[4], 'session:' .. ARGV[6], 1)
    redis.call('ZREM', KEYS[3], ARGV[1])
end
return ARGV[2]
"""

_EXPIRE = """
-- KEYS: session, stream, deadlines, verdicts   ARGV: id, outcome, verdict
redis.call('ZREM', KEYS[3], ARGV[1])
if redis.call('HEXISTS', KEYS[1], 'verdict') == 1 then return 0 end
redis.call('XADD', KEYS[2], '*', 'r', ARGV[2])
redis.call('HSETNX', KEYS[1], 'outcome', ARGV[2])
redis.call('HSET', KEYS[1], 'verdict', ARGV[3])
redis.call('HINCRBY', KEYS[4], 'session:expired', 1)
return 1
"""


class RedisWriter:
    """StreamWriter on Redis. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._open = redis.register_script(_OPEN)
        self._append_turn = redis.register_script(_APPEND_TURN)
        self._append_reward = redis.register_script(_APPEND_REWARD)
        self._append_outcome = redis.register_script(_APPEND_OUTCOME)
        self._expire = redis.register_script(_EXPIRE)

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        reply = await _stored(self._open(*_open_arguments(spec)))
        return _opened(spec, reply)

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        group_id, size = specs[0].group_id, specs[0].group_size
        assert group_id is not None  # noqa: S101 - the caller's type says so only in prose
        claimed = await _stored(self._redis.hsetnx(keys.group(group_id), "size", str(size)))
        if not claimed:
            raise Conflict(f"group {group_id} exists already")
        async with self._redis.pipeline(transaction=True) as transaction:
            for spec in specs:
                await self._open(*_open_arguments(spec), client=transaction)
            replies = await _stored(transaction.execute())
        for spec, reply in zip(specs, replies, strict=True):
            _opened(spec, reply)

    async def load(self, session_id: str) -> SessionHead | None:
        key = keys.session(session_id)
        fields = await _stored(cast(Awaitable[Mapping[bytes, bytes]], self._redis.hgetall(key)))
        return read_head(fields)

    async def sessions(self, start: int, count: int) -> Sequence[SessionHead]:
        names: list[bytes] = await _stored(self._redis.zrange(keys.SESSIONS, start, start + count - 1))
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.session(name.decode()))
            heads = map(read_head, await _stored(pipeline.execute()))
        return [head for head in heads if head is not None]

    async def append_turn(self, turn: Turn, expires_at: float) -> None:
        reply = await _stored(
            self._append_turn(
                [keys.session(turn.session_id), keys.STREAM, keys.DEADLINES],
                [turn.session_id, f"t:{turn.turn_id}", encode(turn), expires_at],
            )
        )
        if reply != b"stored":
            raise SessionClosed(f"session {turn.session_id} is {reply.decode()}")

    async def remember_continuation(self, owner: str, turn: Turn, ttl_s: float) -> None:
        key = keys.continuation(owner, turn.reply_digest)
        await _stored(self._redis.set(key, turn.session_id, px=max(1, int(ttl_s * 1000))))

    async def find_continuation(self, owner: str, reply_digests: Sequence[str]) -> str | None:
        if not reply_digests:
            return None
        names = [keys.continuation(owner, digest) for digest in reply_digests]
        found: list[bytes | None] = await _stored(self._redis.mget(names))
        return next((name.decode() for name in found if name is not None), None)

    async def append_reward(self, reward: Reward) -> Reward:
        late = msgspec.structs.replace(reward, late=True)
        reply = await _stored(
            self._append_reward(
                [keys.session(reward.session_id), keys.STREAM],
                [f"r:{reward.key}", encode(reward), encode(late)],
            )
        )
        return cast(Reward, decode(reply))

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        reply = await _stored(
            self._append_outcome(
                [keys.session(outcome.session_id), keys.STREAM, keys.DEADLINES, keys.VERDICTS],
                [
                    outcome.session_id,
                    encode(outcome),
                    f"r:{reward.key}" if reward else "",
                    encode(reward) if reward else b"",
                    msgspec.json.encode(verdict) if verdict else b"",
                    verdict.code if verdict else "",
                ],
            )
        )
        return cast(Outcome, decode(reply))

    async def expire(self, now: float, limit: int) -> int:
        overdue: list[bytes] = await _stored(
            self._redis.zrangebyscore(keys.DEADLINES, 0, now, start=0, num=limit)
        )
        expired = 0
        for session_id in (raw.decode() for raw in overdue):
            head = await self.load(session_id)
            if head is None:
                await _stored(self._redis.zrem(keys.DEADLINES, session_id))
                continue
            outcome, verdict = expiry(head.spec, now)
            expired += await _stored(
                self._expire(
                    [keys.session(session_id), keys.STREAM, keys.DEADLINES, keys.VERDICTS],
                    [session_id, encode(outcome), msgspec.json.encode(verdict)],
                )
            )
        return expired

    async def group_progress(self, group_id: str) -> tuple[int, int]:
        size = await _stored(cast(Awaitable[bytes | None], self._redis.hget(keys.group(group_id), "size")))
        members = await _stored(
            cast(Awaitable[set[bytes]], self._redis.smembers(keys.group_members(group_id)))
        )
        async with self._redis.pipeline(transaction=False) as pipeline:
            for member in members:
                pipeline.hexists(keys.session(member.decode()), "outcome")
            ended = await _stored(pipeline.execute())
        return sum(ended), int(size or 0) or len(members)


def read_head(fields: Mapping[bytes, bytes]) -> SessionHead | None:
    """A session's head from the fields of its hash; None when there is no such session."""
    if b"spec" not in fields:
        return None
    turns: list[Turn] = []
    rewards: list[Reward] = []
    turn_verdicts: dict[str, Verdict] = {}
    for field, value in fields.items():
        match field[:2]:
            case b"t:":
                turns.append(cast(Turn, decode(value)))
            case b"r:":
                rewards.append(cast(Reward, decode(value)))
            case b"v:":
                turn_verdicts[field[2:].decode()] = msgspec.json.decode(value, type=Verdict)
    outcome, verdict = fields.get(b"outcome"), fields.get(b"verdict")
    return SessionHead(
        spec=decode_spec(fields[b"spec"]),
        turns=tuple(sorted(turns, key=lambda turn: turn.finished_at)),
        rewards=tuple(sorted(rewards, key=lambda reward: reward.created_at)),
        outcome=cast(Outcome, decode(outcome)) if outcome else None,
        verdict=msgspec.json.decode(verdict, type=Verdict) if verdict else None,
        turn_verdicts=turn_verdicts,
    )


def expiry(spec: SessionSpec, now: float) -> tuple[Outcome, Verdict]:
    """What a session that nobody finished, or nobody rewarded, ends with."""
    detail = f"no reward and finish within {spec.ttl_s:g} s of its last call"
    outcome = Outcome(
        session_id=spec.session_id,
        status="abandoned",
        reason="expired",
        created_at=now,
        group_id=spec.group_id,
        group_size=spec.group_size,
        task_id=spec.task_id,
        train=spec.train,
    )
    return outcome, Verdict(code="expired", detail=detail)


def _open_arguments(spec: SessionSpec) -> tuple[list[str], list[str | bytes | float]]:
    session_keys = [keys.session(spec.session_id), keys.SESSIONS, keys.DEADLINES]
    if spec.group_id is not None:
        session_keys += [keys.group(spec.group_id), keys.group_members(spec.group_id)]
    return session_keys, [
        spec.session_id,
        encode(spec),
        spec.created_at,
        spec.created_at + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
    ]


def _opened(spec: SessionSpec, reply: list[bytes]) -> tuple[SessionSpec, bool]:
    match reply[0]:
        case b"created":
            return spec, True
        case b"exists":
            return decode_spec(reply[1]), False
        case b"size":
            raise Conflict(f"group {spec.group_id} has size {reply[1].decode()}")
        case b"full":
            raise Conflict(f"group {spec.group_id} has its {reply[1].decode()} sessions already")
        case _:
            raise Conflict(f"group {spec.group_id} belongs to another client key")


async def _stored(call: Awaitable[Any]) -> Any:
    """The one place where a Redis failure becomes ours."""
    try:
        return await call
    except (RedisError, OSError) as error:
        raise StorageUnavailable(f"Redis: {error}") from error
