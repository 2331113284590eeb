"""Describes sessions that calls have opened: one script, so that of several descriptions one is stored.

call ──▶ implicit session ──describe──▶ spec with its group, and a LateJoin in the stream
                └── turns, which name no group ──▶ stream
"""

from redis.asyncio import Redis

from rollout_queue.contract.codec import decode_spec, encode
from rollout_queue.contract.head import late_join_of
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.replicas import Argument, Confirm
from rollout_queue.redis.heads.reading import reading
from rollout_queue.redis.scripts import sessions as session_scripts
from rollout_queue.redis.sessions.ending import terms_of
from rollout_queue.redis.sessions.opening import opening_refusal


class Descriptions:
    """Describes sessions on Redis. Several gateways may do so at the same time."""

    def __init__(self, redis: Redis, confirm: Confirm) -> None:
        self._redis, self._confirm = redis, confirm
        self._describe = redis.register_script(session_scripts.DESCRIBE)

    async def describe(self, spec: SessionSpec, now: float, *, counts: bool) -> SessionSpec | None:
        """See `StreamWriter.describe_session`."""
        while (seen := await stored(self._redis.hget(keys.session(spec.session_id), "spec"))) is not None:
            with reading(spec.session_id):
                known = decode_spec(seen)
            if not known.implicit:
                return known
            reply = await self._confirm(self._describe, *_arguments(spec, seen, now, counts))
            match reply[0]:
                case b"described":
                    return spec
                case b"ended":
                    return known
                case b"changed":
                    continue
                case _:
                    raise opening_refusal(spec, reply)
        return None


def _arguments(spec: SessionSpec, seen: bytes, now: float, counts: bool) -> tuple[list[str], list[Argument]]:
    named: list[str] = [keys.session(spec.session_id), keys.STREAM, keys.DEADLINES, keys.DELETED_USERS]
    named += [keys.user_sessions(spec.user or ""), keys.FORGOTTEN_IDS, keys.UNTRAINED]
    if spec.group_id is not None:
        named += [keys.group(spec.group_id), keys.group_members(spec.group_id)]
    join = late_join_of(spec, now)
    return named, [
        spec.session_id,
        seen,
        encode(spec),
        repr(now),
        repr(spec.ttl_s),
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        user_digest(spec.user) if spec.user else "",
        spec.group_id or "",
        terms_of(spec),
        encode(join) if join else b"",
        "-1" if not spec.train else str(int(counts)),
    ]
