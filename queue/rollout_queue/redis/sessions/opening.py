"""The keys and arguments of the scripts that open sessions, and the meaning of their replies."""

from collections.abc import Sequence

from rollout_queue.contract.codec import decode_spec, encode
from rollout_queue.contract.errors import (
    Conflict,
    Deleted,
    GroupTaken,
    RewardsTooLarge,
    SessionClosed,
    SessionDeleted,
    SessionForgotten,
    SessionUnknown,
    TooManyRewards,
    UserDeleted,
)
from rollout_queue.contract.records import SessionSpec
from rollout_queue.contract.tombstone import user_digest
from rollout_queue.redis import keys
from rollout_queue.redis.connection.replicas import Argument


def open_arguments(spec: SessionSpec) -> tuple[list[str], list[Argument]]:
    session_keys: list[str] = [keys.session(spec.session_id), keys.SESSIONS, keys.DEADLINES]
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
    """The stored session, and whether OPEN created it. Raises the error that the reply names."""
    match reply[0]:
        case b"created":
            return spec, True
        case b"exists":
            return decode_spec(reply[1]), False
        case _:
            raise opening_refusal(spec, reply)


def opening_refusal(spec: SessionSpec, reply: list[bytes]) -> Conflict | Deleted:
    """The error for the reply of a script that did not store the spec."""
    match reply[0]:
        case b"deleted":
            return SessionDeleted(spec.session_id)
        case b"user deleted":
            return UserDeleted()
        case b"forgotten":
            return SessionForgotten(spec.session_id)
        case b"group forgotten":
            return group_forgotten(spec)
        case b"size":
            return Conflict(f"group {spec.shown_group} has size {reply[1].decode()}")
        case b"full":
            return Conflict(f"group {spec.shown_group} has its {reply[1].decode()} sessions already")
        case _:
            return GroupTaken(spec.shown_group)


def group_arguments(specs: Sequence[SessionSpec]) -> tuple[list[str], list[Argument]]:
    first = specs[0]
    assert first.group_id is not None  # noqa: S101 - `open_group` is called for groups only
    named: list[str] = [
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
    return Conflict(f"group {spec.shown_group} ended and was forgotten; its id cannot be used again yet")


def refusal(session_id: str, reason: bytes) -> SessionClosed | Deleted | RewardsTooLarge | TooManyRewards:
    """The error for the `reason` with which a script refused to append."""
    match reason:
        case b"deleted":
            return SessionDeleted(session_id)
        case b"user deleted":
            return UserDeleted()
        case b"unknown":
            return SessionUnknown(session_id)
        case b"too large":
            return RewardsTooLarge(session_id)
        case b"too many":
            return TooManyRewards(session_id)
        case _:
            return SessionClosed(f"session {session_id} is {reason.decode()}")
