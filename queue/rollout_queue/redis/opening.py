"""What the scripts that open sessions are given, and what the answers of scripts mean."""

from collections.abc import Sequence

from rollout_queue.contract.codec import decode_spec, encode
from rollout_queue.contract.errors import (
    Conflict,
    Deleted,
    SessionClosed,
    SessionDeleted,
    SessionForgotten,
    SessionUnknown,
    UserDeleted,
)
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.connection import Argument


def open_arguments(spec: SessionSpec) -> tuple[list[str], list[Argument]]:
    session_keys = [keys.session(spec.session_id), keys.SESSIONS, keys.DEADLINES]
    session_keys += [keys.DELETED, keys.DELETED_USERS, keys.user_sessions(spec.user or "")]
    session_keys.append(keys.FORGOTTEN_IDS)
    if spec.group_id is not None:
        session_keys += [keys.group(spec.group_id), keys.group_members(spec.group_id)]
    return session_keys, [
        spec.session_id,
        encode(spec),
        spec.created_at,
        spec.created_at + spec.ttl_s,
        spec.owner,
        "" if spec.group_size is None else str(spec.group_size),
        user_digest(spec.user) if spec.user else "",
        spec.group_id or "",
    ]


def opened(spec: SessionSpec, reply: list[bytes]) -> tuple[SessionSpec, bool]:
    match reply[0]:
        case b"created":
            return spec, True
        case b"exists":
            return decode_spec(reply[1]), False
        case b"deleted":
            raise SessionDeleted(spec.session_id)
        case b"user deleted":
            raise UserDeleted
        case b"forgotten":
            raise SessionForgotten(spec.session_id)
        case b"group forgotten":
            raise group_forgotten(spec)
        case b"size":
            raise Conflict(f"group {spec.group_id} has size {reply[1].decode()}")
        case b"full":
            raise Conflict(f"group {spec.group_id} has its {reply[1].decode()} sessions already")
        case _:
            raise Conflict(f"group {spec.group_id} belongs to another client key")


def group_arguments(specs: Sequence[SessionSpec]) -> tuple[list[str], list[Argument]]:
    first = specs[0]
    assert first.group_id is not None  # noqa: S101 - the caller's type says so only in prose
    named = [
        keys.group(first.group_id),
        keys.group_members(first.group_id),
        keys.SESSIONS,
        keys.DEADLINES,
        keys.DELETED_USERS,
        keys.user_sessions(first.user or ""),
        keys.FORGOTTEN_IDS,
    ]
    named += [keys.session(spec.session_id) for spec in specs]
    arguments: list[Argument] = [len(specs), first.owner]
    arguments += [first.created_at, first.created_at + first.ttl_s]
    arguments += [user_digest(first.user) if first.user else "", first.group_id]
    for spec in specs:
        arguments += [spec.session_id, encode(spec)]
    return named, arguments


def group_forgotten(spec: SessionSpec) -> Conflict:
    return Conflict(f"group {spec.group_id} ended and is forgotten; its id is not given again so soon")


def refusal(session_id: str, reason: bytes) -> SessionClosed | Deleted:
    """Why nothing was appended, in the words of the scripts."""
    match reason:
        case b"deleted":
            return SessionDeleted(session_id)
        case b"user deleted":
            return UserDeleted()
        case b"unknown":
            return SessionUnknown(session_id)
        case _:
            return SessionClosed(f"session {session_id} is {reason.decode()}")
