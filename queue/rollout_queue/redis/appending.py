"""What the script that appends a turn is given."""

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import SessionSpec, Turn
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.connection import Argument

CONTINUATION_TTL_S = 30 * 86400.0
"""Redis counts a key's life in milliseconds and overflows; a conversation that old has ended."""

_APPENDED_TO = (
    *(keys.STREAM, keys.DEADLINES, keys.SESSIONS),
    *(keys.DELETED, keys.DELETED_USERS, keys.FORGOTTEN_IDS),
)


def append_arguments(
    turn: Turn, expires_at: float, owner: str, seen: int | None, opening: SessionSpec | None
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments; numbers as text, which packs in half the time."""
    users = _users_of(turn, opening)
    named = [keys.session(turn.session_id), *_APPENDED_TO, *map(keys.user_sessions, users)]
    named += continuations_of(turn, owner)
    lives_s = min(max(expires_at - turn.finished_at, 0.001), CONTINUATION_TTL_S)
    return named, [
        turn.session_id,
        f"t:{turn.turn_id}",
        encode(turn),
        repr(expires_at),
        str(int(lives_s * 1000)),
        f"q:{turn.request_digest}",
        "" if seen is None else str(seen),
        "" if opening is None else encode(opening),
        "" if opening is None else repr(opening.created_at),
        str(len(users)),
        *map(user_digest, users),
    ]


def _users_of(turn: Turn, opening: SessionSpec | None) -> list[str]:
    """For whom the turn was made, and for whom its session is opened with it."""
    if opening is None:
        return [turn.user] if turn.user else []
    return sorted({user for user in (turn.user, opening.user) if user})


def continuations_of(turn: Turn, owner: str) -> list[str]:
    """The keys by which a later call of `owner` finds the session of the turn."""
    digests = [turn.reply_digest] if turn.reply_digest else []
    if turn.finish == "tool_calls":
        digests.append(turn.turn_id)
    if turn.request_digest and turn.parent_id is None:
        digests.append(turn.request_digest)
    return [keys.continuation(owner, digest) for digest in digests]
