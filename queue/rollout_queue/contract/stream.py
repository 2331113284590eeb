"""The two ends of the stream: gateways write, the trainer reads.

    gateway ── append (record + session head, one transaction) ──▶ stream ── read ──▶ trainer
       ▲                                                             │
       └────────────── verdicts, in the head ◀── acknowledge ────────┘ after a durable checkpoint

`redis_writer` and `redis_reader` implement them on Redis, `memory` for unit tests; the same tests hold
both. The writer is asynchronous because a gateway serves many calls; the reader blocks because a trainer
has nothing else to do.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.listing import ListedSession, ListPosition
from rollout_queue.contract.progress import GroupProgress
from rollout_queue.contract.records import Outcome, Record, Reward, SessionSpec, Turn, Verdict
from rollout_queue.contract.tombstone import DeletionTotals, Tombstone


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One record at its place in the stream."""

    entry_id: str
    record: Record


class Verdicts(NamedTuple):
    """What became of sessions and of their turns."""

    sessions: Mapping[str, Verdict]
    turns: Mapping[tuple[str, str], Verdict]
    """By (session id, turn id)."""


class GroupMembers(NamedTuple):
    """Who was opened in a group, deleted ones too. `size` is what it was made for, where somebody said."""

    size: int | None
    members: frozenset[str]
    forgotten: int = 0
    """Members that were settled so long ago that their heads are gone."""


class StreamWriter(Protocol):
    """The gateways' end. Every method raises StorageUnavailable when nothing could be stored or read."""

    async def close(self) -> None: ...

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        """Create the session, or find the one of that id. Returns it and whether it was created.

        Raises Conflict when its group has another size or owner, or no place left; SessionDeleted and
        UserDeleted.
        """
        ...

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        """Create a group and all of its sessions, or nothing.

        Raises Conflict when the group exists; UserDeleted.
        """
        ...

    async def load(self, session_id: str) -> SessionHead | None: ...

    async def spec_of(self, session_id: str) -> bytes | None:
        """What the session was opened with, as it is stored: also where this build cannot read it."""
        ...

    async def load_for_call(self, session_id: str) -> SessionHead | None:
        """As `load`, from memory where the session has not changed; only the turns' verdicts may be old."""
        ...

    async def sessions(self, after: ListPosition, count: int) -> Sequence[ListedSession]:
        """Up to `count` sessions behind a place, oldest first; deleted ones keep theirs."""
        ...

    async def tombstone(self, session_id: str) -> Tombstone | None:
        """What is left of the session, where it was deleted."""
        ...

    async def user_deleted(self, user: str) -> bool: ...

    async def forget_deleted(self) -> None:
        """Drop from memory what was deleted since the last time, by whichever gateway."""
        ...

    async def append_turn(
        self, turn: Turn, expires_at: float, owner: str = "", opening: SessionSpec | None = None
    ) -> Turn:
        """Store the turn in stream and head, once; `opening` creates its session where it is not there yet.

        By its reply digest a later call of `owner` finds its session, or by its id where it called tools; by
        the request digest of a turn without parent a retry does.
        Returns it as it is stored: with its relation to other attempts at the same call (`attempts`).
        Raises SessionClosed when the session has ended; SessionDeleted, UserDeleted.
        """
        ...

    async def find_continuations(self, owner: str, digests: Sequence[str]) -> Sequence[str | None]:
        """For each digest of a reply or a request, or turn id, the session remembered for this owner."""
        ...

    async def append_reward(self, reward: Reward) -> Reward:
        """Store the reward; returns what is stored under its key, which a late one carries `late` in.

        Raises SessionUnknown, SessionDeleted.
        """
        ...

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        """Close the session, with its last reward (if that key is new) and a verdict where it is known.

        Returns the outcome that is stored: an earlier one stands. Raises SessionUnknown, SessionDeleted.
        """
        ...

    async def expire(self, now: float, limit: int) -> int:
        """Close sessions whose deadline is past and that nobody finished and rewarded. Returns how many."""
        ...

    async def group_progress(self, group_id: str) -> GroupProgress:
        """How far the sessions of the group have come, and how many it is made for."""
        ...

    async def heartbeat(self, session_id: str, now: float) -> float:
        """A sign of life of an open session: it expires as if a call had ended now. Returns when.

        Raises SessionClosed when the session has ended, or its time was over before.
        """
        ...


class StreamDeleter(Protocol):
    """What removes data for good. Every method raises StorageUnavailable, and may be repeated then."""

    async def delete_session(self, session_id: str) -> Tombstone | None:
        """Remove everything that is known of the session; the trainer gets a Deletion in its place.

        Returns what is left. None where there is no such session, or somebody else has just deleted it.
        """
        ...

    async def delete_user(self, user: str) -> DeletionTotals:
        """Remove the user's sessions, and take nothing more for that name."""
        ...

    async def finish(self, now: float) -> int:
        """Do what a process that died in the middle of a deletion has left. Returns of how many sessions."""
        ...


class StreamReader(Protocol):
    """The trainer's end. Every method raises StorageUnavailable when Redis does not answer, and LeaseLost,
    having changed nothing, when another trainer has claimed the stream since."""

    def confirm(self) -> None:
        """Ask whether this trainer still is the one, before something that cannot be taken back."""
        ...

    def reclaim(self) -> Iterable[Entry]:
        """Every entry that was delivered and never acknowledged, oldest first: what a restart takes up."""
        ...

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        """Up to `count` entries that were never delivered; waits at most `block_s` for the first."""
        ...

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        """In one transaction: write the verdicts and acknowledge the entries; then trim what nobody needs.

        A session that was deleted gets no verdict. What is acknowledged again changes and counts nothing.
        """
        ...

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        """The code of each session that has a verdict; of a deleted one that which it had, else `deleted`."""
        ...

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]: ...

    def reserve(self, version: int, location: str) -> int:
        """Keep a version's number for what will lie at `location`: nothing else is published under it.

        Returns the highest number that was published or kept before: only a higher `version` is kept.
        """
        ...

    def report(self, state: Mapping[str, str | int | float]) -> None:
        """Say to the gateways where the trainer stands."""
        ...
