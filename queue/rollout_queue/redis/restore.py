"""Writes a whole recorded session back to Redis: for a replay, or after data was lost.

One script writes the whole session. So an import that is interrupted leaves no half-written session, which a
gateway might expire, and the next import can skip the sessions that exist.
"""

from typing import Any, Literal

import msgspec
from redis import Redis

from rollout_queue import clock
from rollout_queue.contract.codec import encode
from rollout_queue.contract.episodes import Episode
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.availability import available
from rollout_queue.redis.scripts.restore import RESTORE, SAME

Restored = Literal["restored", "exists", "deleted", "forgotten", "owner", "size", "full"]
"""The result: every value but `restored` means that nothing was written."""


def restore(redis: Redis, episode: Episode) -> Restored:
    """Write the session, unless one with its id exists or existed. Raises StorageUnavailable.

    Its time to live starts now, so that it can still be rewarded.
    """
    spec, verdict = episode.spec, episode.verdict
    users = _users(episode)
    arguments: list[str | bytes | float] = [
        spec.session_id,
        encode(spec),
        spec.created_at,
        clock.now() + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        b"" if verdict is None else msgspec.json.encode(verdict),
        "" if verdict is None else verdict.code,
        len(users),
        *map(user_digest, users),
        len(_images(episode)),
        spec.group_id or "",
        *_fields(episode),
    ]
    script = redis.register_script(RESTORE)
    with available():
        reply: Any = script(_names(episode), arguments)
    restored: Restored = reply.decode()
    return restored


def _users(episode: Episode) -> list[str]:
    """The users whose data the session holds, sorted."""
    return sorted({user for user in (episode.spec.user, *(turn.user for turn in episode.turns)) if user})


def _images(episode: Episode) -> list[str]:
    """The hashes of the images that its turns show, sorted. Their bytes stay in Redis for it, if they are
    there."""
    return sorted({image.sha256 for turn in episode.turns for image in turn.images})


def _names(episode: Episode) -> list[str]:
    spec = episode.spec
    named: list[str] = [
        keys.session(spec.session_id),
        keys.STREAM,
        keys.SESSIONS,
        keys.DEADLINES,
        keys.VERDICTS,
    ]
    named += [keys.DELETED, keys.DELETED_USERS, keys.SETTLED, keys.FORGOTTEN_IDS]
    named += map(keys.user_sessions, _users(episode))
    named += map(keys.image_sessions, _images(episode))
    if spec.group_id is not None:
        named += [keys.group(spec.group_id), keys.group_members(spec.group_id)]
    return named


def _fields(episode: Episode) -> list[str | bytes | float]:
    """Three items for each field of the session's hash: its name, its value, and the record for the stream.

    The record of the outcome gets the present time, because a trainer waits `group_wait_s` from that time for
    further members of the group. With the old time it would not wait at all.
    """
    fields: list[str | bytes | float] = []
    for turn in episode.turns:
        fields += [f"t:{turn.turn_id}", encode(turn), SAME]
        if turn.last_attempt and turn.request_digest:
            fields += [f"q:{turn.request_digest}", b"", b""]
    for reward in episode.rewards:
        fields += [f"r:{reward.key}", encode(reward), SAME]
    if episode.outcome is not None:
        ended = msgspec.structs.replace(episode.outcome, created_at=clock.now())
        fields += ["outcome", encode(episode.outcome), encode(ended)]
    return fields
