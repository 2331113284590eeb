"""What is left of a deleted session, so that its id is never given again and nothing is added to it."""

import hashlib

import msgspec


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """When the session was made and deleted, whose it was, and how much was deleted."""

    session_id: str
    owner: str = ""
    """As the session's: digest of the client key that made it."""
    created_at: float
    deleted_at: float
    turns: int
    rewards: int
    verdict: str | None = None
    """Code of the verdict that it had: the trainer may meet its deletion when it remembers it no more."""


class DeletionTotals(msgspec.Struct, frozen=True):
    """How much the deletion of a user's data deleted."""

    sessions: int = 0
    turns: int = 0
    rewards: int = 0


def encode_tombstone(tombstone: Tombstone) -> bytes:
    return msgspec.json.encode(tombstone)


def decode_tombstone(raw: bytes) -> Tombstone:
    return msgspec.json.decode(raw, type=Tombstone)


def total(tombstones: list[Tombstone]) -> DeletionTotals:
    """The sum over the sessions of one user."""
    turns, rewards = sum(each.turns for each in tombstones), sum(each.rewards for each in tombstones)
    return DeletionTotals(len(tombstones), turns, rewards)


def user_digest(user: str) -> str:
    """By it a deleted user is known, without the name."""
    return hashlib.sha256(user.encode()).hexdigest()
