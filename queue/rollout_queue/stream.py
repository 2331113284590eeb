"""The two ends of the stream: gateways write, the trainer reads.

    gateway ── append (record + session head, one transaction) ──▶ stream ── read ──▶ trainer
       ▲                                                             │
       └────────────── verdicts, in the head ◀── acknowledge ────────┘ after a durable checkpoint

`redis_writer` and `redis_reader` implement them on Redis, `memory` for unit tests; the same tests hold
both. The writer is asynchronous because a gateway serves many calls; the reader blocks because a trainer
has nothing else to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rollout_queue.head import SessionHead
from rollout_queue.records import Outcome, Record, Reward, SessionSpec, Turn, Verdict


class Entry(NamedTuple):
    """One record at its place in the stream."""

    entry_id: str
    record: Record


class Verdicts(NamedTuple):
    """What became of sessions and of their turns."""

    sessions: Mapping[str, Verdict]
    turns: Mapping[tuple[str, str], Verdict]
    """By (session id, turn id)."""


class StreamWriter(Protocol):
    """The gateways' end. Every method raises StorageUnavailable when nothing could be stored or read."""

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        """Create the session, or find the one of that id. Returns it and whether it was created.

        Raises Conflict when its group has another size or owner, or no place left.
        """
        ...

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        """Create a group and all of its sessions, or nothing. Raises Conflict when the group exists."""
        ...

    async def load(self, session_id: str) -> SessionHead | None: ...

    async def sessions(self, start: int, count: int) -> Sequence[SessionHead]:
        """Up to `count` sessions from the `start`-th on, oldest first."""
        ...

    async def append_turn(self, turn: Turn, expires_at: float, owner: str = "") -> None:
        """Store the turn in stream and head, once; by its reply digest a later call of `owner` finds it.

        Raises SessionClosed when the session has ended.
        """
        ...

    async def find_continuation(self, owner: str, reply_digests: Sequence[str]) -> str | None:
        """The session of the first digest that is remembered for this owner."""
        ...

    async def append_reward(self, reward: Reward) -> Reward:
        """Store the reward; returns what is stored under its key, which a late one carries `late` in."""
        ...

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        """Close the session, with its last reward (if that key is new) and a verdict where it is known.

        Returns the outcome that is stored: an earlier one stands.
        """
        ...

    async def expire(self, now: float, limit: int) -> int:
        """Close sessions whose deadline is past and that nobody finished and rewarded. Returns how many."""
        ...

    async def group_progress(self, group_id: str) -> tuple[int, int]:
        """How many sessions of the group have ended, and how many it is made for."""
        ...


class StreamReader(Protocol):
    """The trainer's end. Every method raises StorageUnavailable when Redis does not answer."""

    def reclaim(self) -> Iterable[Entry]:
        """Every entry that was delivered and never acknowledged, oldest first: what a restart takes up."""
        ...

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        """Up to `count` entries that were never delivered; waits at most `block_s` for the first."""
        ...

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        """In one transaction: write the verdicts and acknowledge the entries; then trim what nobody needs."""
        ...

    def report(self, state: Mapping[str, str | int | float]) -> None:
        """Say to the gateways where the trainer stands."""
        ...
