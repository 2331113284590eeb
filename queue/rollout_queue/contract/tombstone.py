"""The tombstone that remains of a deleted session. It keeps the id from being used again."""

import hashlib

import msgspec


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """When the session was opened and deleted, who opened it, and how much it held."""

    session_id: str
    name: str | None = None
    owner: str = ""
    """`name` and `owner` of the session's `SessionSpec`."""
    created_at: float
    deleted_at: float
    turns: int
    rewards: int
    verdict: str | None = None
    """The code of the session's verdict. A trainer that does not know the session reads it here."""


class DeletionTotals(msgspec.Struct, frozen=True):
    """How many sessions, turns and rewards the deletion of a user's data removed."""

    sessions: int = 0
    turns: int = 0
    rewards: int = 0

    def __add__(self, more: "DeletionTotals") -> "DeletionTotals":
        rewards = self.rewards + more.rewards
        return DeletionTotals(self.sessions + more.sessions, self.turns + more.turns, rewards)


def encode_tombstone(tombstone: Tombstone) -> bytes:
    return msgspec.json.encode(tombstone)


def decode_tombstone(raw: bytes) -> Tombstone:
    return msgspec.json.decode(raw, type=Tombstone)


def total(tombstones: list[Tombstone]) -> DeletionTotals:
    """The sum over the sessions of one user."""
    turns, rewards = sum(each.turns for each in tombstones), sum(each.rewards for each in tombstones)
    return DeletionTotals(len(tombstones), turns, rewards)


def user_digest(user: str) -> str:
    """Identifies a deleted user without storing the name."""
    return hashlib.sha256(user.encode()).hexdigest()
