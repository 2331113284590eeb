"""The gateways' end of the stream, on Redis: each append is one script, so it happens whole or not at all."""

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from redis.asyncio import Redis

from rollout_queue import keys, redis_scripts
from rollout_queue.availability import stored
from rollout_queue.codec import decode, decode_spec, encode
from rollout_queue.errors import Conflict, SessionClosed
from rollout_queue.head import SessionHead
from rollout_queue.records import Outcome, Reward, SessionSpec, Turn, Verdict

CONTINUATION_TTL_S = 30 * 86400.0
"""Redis counts a key's life in milliseconds and overflows; a conversation that old has ended."""


class RedisWriter:
    """StreamWriter on Redis. `redis` returns bytes (decode_responses off)."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._open = redis.register_script(redis_scripts.OPEN)
        self._open_group = redis.register_script(redis_scripts.OPEN_GROUP)
        self._append_turn = redis.register_script(redis_scripts.APPEND_TURN)
        self._append_reward = redis.register_script(redis_scripts.APPEND_REWARD)
        self._append_outcome = redis.register_script(redis_scripts.APPEND_OUTCOME)
        self._expire = redis.register_script(redis_scripts.EXPIRE)

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        reply = await stored(self._open(*_open_arguments(spec)))
        return _opened(spec, reply)

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        first = specs[0]
        assert first.group_id is not None  # noqa: S101 - the caller's type says so only in prose
        named = [
            keys.group(first.group_id),
            keys.group_members(first.group_id),
            keys.SESSIONS,
            keys.DEADLINES,
        ]
        named += [keys.session(spec.session_id) for spec in specs]
        arguments: list[str | bytes | float] = [len(specs), first.owner]
        arguments += [first.created_at, first.created_at + first.ttl_s]
        for spec in specs:
            arguments += [spec.session_id, encode(spec)]
        created = await stored(self._open_group(named, arguments))
        if not created:
            raise Conflict(f"group {first.group_id} exists already")

    async def load(self, session_id: str) -> SessionHead | None:
        key = keys.session(session_id)
        return read_head(await stored(self._redis.hgetall(key)))

    async def sessions(self, start: int, count: int) -> Sequence[SessionHead]:
        names: list[bytes] = await stored(self._redis.zrange(keys.SESSIONS, start, start + count - 1))
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(keys.session(name.decode()))
            heads = map(read_head, await stored(pipeline.execute()))
        return [head for head in heads if head is not None]

    async def append_turn(self, turn: Turn, expires_at: float, owner: str = "") -> None:
        named = [keys.session(turn.session_id), keys.STREAM, keys.DEADLINES]
        if turn.reply_digest:
            named.append(keys.continuation(owner, turn.reply_digest))
        lives_s = min(max(expires_at - turn.finished_at, 0.001), CONTINUATION_TTL_S)
        reply = await stored(
            self._append_turn(
                named,
                [turn.session_id, f"t:{turn.turn_id}", encode(turn), expires_at, int(lives_s * 1000)],
            )
        )
        if reply != b"stored":
            raise SessionClosed(f"session {turn.session_id} is {reply.decode()}")

    async def find_continuation(self, owner: str, reply_digests: Sequence[str]) -> str | None:
        if not reply_digests:
            return None
        names = [keys.continuation(owner, digest) for digest in reply_digests]
        found: list[bytes | None] = await stored(self._redis.mget(names))
        return next((name.decode() for name in found if name is not None), None)

    async def append_reward(self, reward: Reward) -> Reward:
        late = msgspec.structs.replace(reward, late=True)
        reply = await stored(
            self._append_reward(
                [keys.session(reward.session_id), keys.STREAM],
                [f"r:{reward.key}", encode(reward), encode(late)],
            )
        )
        return cast(Reward, decode(reply))

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        reply = await stored(
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
        overdue: list[bytes] = await stored(
            self._redis.zrangebyscore(keys.DEADLINES, 0, now, start=0, num=limit)
        )
        return sum([await self._expire_one(session_id.decode(), now) for session_id in overdue])

    async def _expire_one(self, session_id: str, now: float) -> int:
        raw = await stored(self._redis.hget(keys.session(session_id), "spec"))
        if raw is None:
            await stored(self._redis.zrem(keys.DEADLINES, session_id))
            return 0
        outcome, verdict = expiry(decode_spec(raw), now)
        return int(
            await stored(
                self._expire(
                    [keys.session(session_id), keys.STREAM, keys.DEADLINES, keys.VERDICTS],
                    [session_id, encode(outcome), msgspec.json.encode(verdict), now],
                )
            )
        )

    async def group_progress(self, group_id: str) -> tuple[int, int]:
        size = await stored(self._redis.hget(keys.group(group_id), "size"))
        members = await stored(self._redis.smembers(keys.group_members(group_id)))
        async with self._redis.pipeline(transaction=False) as pipeline:
            for member in members:
                pipeline.hexists(keys.session(member.decode()), "outcome")
            ended = await stored(pipeline.execute())
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
