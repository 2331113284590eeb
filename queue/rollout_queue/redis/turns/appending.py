"""The keys and arguments of the script that appends a turn."""

from collections.abc import Iterable, Mapping

from rollout_queue.contract.codec import encode
from rollout_queue.contract.records import SessionSpec, Turn
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.contract.turn_parts.sums import NONE
from rollout_queue.redis import keys
from rollout_queue.redis.connection.replicas import Argument

CONTINUATION_TTL_S = 30 * 86400.0
"""The longest lifetime of a continuation key; a longer one could overflow Redis' count of milliseconds."""

_FIXED_KEYS = (
    *(keys.STREAM, keys.DEADLINES, keys.SESSIONS),
    *(keys.DELETED, keys.DELETED_USERS, keys.FORGOTTEN_IDS),
)


def append_arguments(
    turn: Turn,
    expires_at: float,
    owner: str,
    seen: int | None,
    opening: SessionSpec | None,
    deadline_ms: int,
    images: Mapping[str, bytes],
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of APPEND_TURN; `images` has the bytes of the turn's images by hash. Numbers are
    passed as text, which hiredis packs in half the time."""
    users = _users_of(turn, opening)
    named: list[str] = [keys.session(turn.session_id), *_FIXED_KEYS, *map(keys.user_sessions, users)]
    shown = sorted({image.sha256 for image in turn.images})
    named += images_of(shown)
    named += continuations_of(turn, owner)
    ttl_s = min(max(expires_at - turn.finished_at, 0.001), CONTINUATION_TTL_S)
    return named, [
        turn.session_id,
        f"t:{turn.turn_id}",
        encode(turn),
        repr(expires_at),
        str(int(ttl_s * 1000)),
        f"q:{turn.request_digest}",
        "" if seen is None else str(seen),
        "" if opening is None else encode(opening),
        "" if opening is None else repr(opening.created_at),
        str(deadline_ms),
        repr(turn.finished_at),
        str(int(CONTINUATION_TTL_S * 1000)),
        str(len(turn.output_ids)),
        *_versions_of(turn),
        str(len(users)),
        *map(user_digest, users),
        str(len(shown)),
        *[images.get(sha256, b"") for sha256 in shown],
    ]


def _versions_of(turn: Turn) -> tuple[str, str]:
    """The oldest and the newest version that sampled the turn's tokens."""
    versions = [span.version for span in turn.versions]
    return (str(min(versions)), str(max(versions))) if versions else (NONE, NONE)


def _users_of(turn: Turn, opening: SessionSpec | None) -> list[str]:
    """The user of the turn, and the one of the session that is opened with it."""
    if opening is None:
        return [turn.user] if turn.user else []
    return sorted({user for user in (turn.user, opening.user) if user})


def images_of(hashes: Iterable[str]) -> list[str]:
    """For each image the key of its bytes, and that of the sessions that show it."""
    return [key for sha256 in hashes for key in (keys.image(sha256), keys.image_sessions(sha256))]


def continuations_of(turn: Turn, owner: str) -> list[str]:
    """The keys by which a later call of `owner` finds the session of this turn."""
    return [keys.continuation(owner, digest) for digest in turn.continuation_digests]
