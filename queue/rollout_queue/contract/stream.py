"""The protocols of the stream's two ends: gateways write, the trainer reads.

    gateway ── append (record + session head, one transaction) ──▶ stream ── read ──▶ trainer
       ▲                                                             │
       └────────────── verdicts, in the head ◀── acknowledge ────────┘ after a durable checkpoint

`redis.writer`, `redis.deletion` and `redis.reader` implement the protocols on Redis, `memory` implements them
for unit tests; the same tests run over both. The writer is asynchronous because a gateway serves many calls
at once; the reader blocks because a trainer has nothing else to do.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from rollout_queue.contract.head import (
    ALL_SESSIONS,
    DeletionTotals,
    GroupProgress,
    ListedSession,
    ListPosition,
    ListScope,
    SessionHead,
    Tombstone,
)
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Outcome, Record, Reward, SessionSpec, Turn, Verdict

NO_IMAGES: Mapping[str, bytes] = {}
NO_TOKENS: Mapping[tuple[str, str], bytes] = {}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """An entry of the stream: a record, with the id that Redis gave it."""

    entry_id: str
    record: Record


class Verdicts(NamedTuple):
    """Verdicts of sessions and of their turns, and the durable steps that trained them."""

    sessions: Mapping[str, Verdict]
    turns: Mapping[tuple[str, str], Verdict]
    """The keys are pairs of session id and turn id."""
    tokens: Mapping[tuple[str, str], bytes] = NO_TOKENS
    """The packed `TrainedTokens` of turns with the verdict `trained`, by the same keys."""
    steps: Sequence[TrainedStep] = ()


class GroupMembers(NamedTuple):
    """The sessions that were opened in a group, deleted ones too. `size` is None for a group of no fixed
    size."""

    size: int | None
    members: frozenset[str]
    forgotten: int = 0
    """How many members were forgotten, that is, removed some time after their verdict."""


class StreamWriter(Protocol):
    """The gateways' end. Every method raises StorageUnavailable when it could not store or read."""

    async def close(self) -> None: ...

    async def ping(self) -> None:
        """Wait for a sign that the queue works."""
        ...

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        """Create the session, or find the one with that id. Returns it, and whether it was created.

        Raises Conflict when its group has another size or owner, or is full; SessionDeleted; UserDeleted.
        """
        ...

    async def describe_session(
        self, spec: SessionSpec, now: float, *, counts: bool = False
    ) -> SessionSpec | None:
        """Give the implicit session with this id the spec `spec`, unless it was described or has ended.

        Its time to live begins again at `now`, but it does not expire earlier than before. The trainer learns
        of its group at once (`LateJoin`). With `counts`, it counts as a session for training from now on
        (`keys.UNTRAINED`); with `spec.train` false, it no longer does. Returns the spec that is stored now;
        None if there is no such session.
        Raises Conflict when its group has another size or owner, or is full; UserDeleted.
        """
        ...

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        """Create a group with all of its sessions, or nothing.

        Raises Conflict when the group exists; UserDeleted.
        """
        ...

    async def load(self, session_id: str, *, turns: bool = True) -> SessionHead | None:
        """The session. With `turns` false it is read without turns, and `turns` is empty."""
        ...

    async def spec_of(self, session_id: str) -> bytes | None:
        """The stored bytes of the session's spec, which this build may be unable to decode."""
        ...

    async def load_for_call(self, session_id: str) -> SessionHead | None:
        """The same as `load`, but from memory if this process has seen every record of the session. The
        verdicts may then be out of date."""
        ...

    async def sessions(
        self,
        after: ListPosition,
        count: int,
        wanted: Callable[[SessionSpec], bool] = lambda _: True,
        scope: ListScope = ALL_SESSIONS,
    ) -> Sequence[ListedSession]:
        """Up to `count` sessions after a position, in the order of `scope`. Deleted sessions keep their
        position.

        A session whose spec `wanted` refuses is not read, and is None in the list. The scope may leave out
        sessions of other groups and users, and need not.
        """
        ...

    async def tombstone(self, session_id: str) -> Tombstone | None:
        """The tombstone of the session; None if it was not deleted."""
        ...

    async def user_deleted(self, user: str) -> bool: ...

    async def forget_deleted(self) -> None:
        """Drop from memory the sessions that any gateway has deleted since the last call."""
        ...

    async def append_turn(
        self,
        turn: Turn,
        expires_at: float,
        owner: str = "",
        opening: SessionSpec | None = None,
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> Turn:
        """Store the turn in stream and head, once. If its session does not exist, `opening` creates it.

        `images` has the bytes of the turn's images, by hash. They are stored with it, once for all sessions,
        and kept until the last session that shows them is deleted or forgotten.

        Later calls of `owner` find the session (`find_continuations`) by the turn's reply digest; if the turn
        called tools, also by its id; if it has no parent, also by its request digest.
        Returns the turn as stored, with its relation to other attempts at the same call (`attempts`).
        Raises SessionClosed when the session has ended; SessionDeleted, UserDeleted. When this raises
        StorageUnavailable, the turn is not trained, even if Redis has stored it (`retract_failed`).
        """
        ...

    async def images(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        """The stored images among these, by hash."""
        ...

    async def retract_failed(self) -> None:
        """Retract the turns that Redis may have stored although it did not answer their append; and if it was
        away, note which of the last records it has lost."""
        ...

    async def find_continuations(self, owner: str, digests: Sequence[str]) -> Sequence[str | None]:
        """The session of `owner` for each reply digest, request digest or turn id; None if there is
        none."""
        ...

    async def append_reward(self, reward: Reward) -> Reward:
        """Store the reward. Returns the reward that is stored under its key. The returned reward is `late` if
        the session had a verdict already.

        Raises SessionUnknown, SessionDeleted.
        """
        ...

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        """Close the session. Store a last `reward` too, unless its key exists, and the `verdict` if one is
        given. The outcome gets the group and the task that the session has by then (`describe_session`).

        Returns the stored outcome, which may be an earlier one. Raises SessionUnknown, SessionDeleted.
        """
        ...

    async def expire(self, now: float, limit: int) -> int:
        """Close sessions whose deadline has passed and that have no outcome or no reward. Returns how
        many."""
        ...

    async def group_progress(self, group_id: str) -> GroupProgress:
        """How far the sessions of the group have come, and the size of the group."""
        ...

    async def heartbeat(self, session_id: str, now: float, at_least_s: float = 0.0) -> float:
        """Note that the agent of an open session is alive: the session expires as if a call had ended at
        `now`, and stays open for at least `at_least_s`, even if its time to live is shorter.

        Returns when it expires, seconds since the epoch. Raises SessionClosed when the session has ended or
        has expired.
        """
        ...


class StreamDeleter(Protocol):
    """Deletes data permanently. Every method may raise StorageUnavailable, and may be repeated then."""

    async def delete_session(self, session_id: str) -> Tombstone | None:
        """Remove everything that is stored of the session, and append a Deletion for the trainer.

        Returns the tombstone. None if no such session exists, or another call has just deleted it.
        """
        ...

    async def delete_user(self, user: str) -> DeletionTotals:
        """Delete the user's sessions, and refuse new data for that name from now on."""
        ...

    async def finish(self, now: float) -> int:
        """Finish deletions that another process left unfinished. Returns the number of sessions."""
        ...


class StreamReader(Protocol):
    """The trainer's end. A trainer first claims the lease, which admits one trainer at a time.

    Every method raises StorageUnavailable when Redis does not answer. Every method but `verdict_codes`,
    `group_members` and `image_bytes` raises LeaseLost, and changes nothing, when another trainer has claimed
    the lease since.
    """

    def confirm(self) -> None:
        """Check that no other trainer has claimed the lease, before an action that cannot be undone."""
        ...

    def reclaim(self) -> Iterable[Entry]:
        """Every entry that was delivered and not acknowledged, oldest first. The trainer calls this when it
        starts, and after Redis was unavailable."""
        ...

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        """Up to `count` entries that were never delivered. Waits at most `block_s` seconds for the first."""
        ...

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        """Write the verdicts, acknowledge the entries, and free their memory, in as many transactions as its
        size needs.

        If it ends between two of them, entries are left, and everything before is written: verdicts of turns
        first, then the steps and all verdicts of sessions, then entries. What a step used of a turn's tokens
        is stored with the turn's verdict. Up to 512 sessions get their verdicts in one transaction. A
        deleted session gets nothing. Repeating an acknowledgement changes and counts nothing.
        """
        ...

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        """The verdict code of each session that has a verdict.

        For a deleted session it is the code that the session had, or `deleted`.
        """
        ...

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
        """The members of each of these groups; of a group of no fixed size, perhaps none."""
        ...

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        """The stored images among these, by hash."""
        ...

    def reserve(self, version: int, location: str) -> int:
        """Reserve a version number for the weights that will lie at `location`.

        No other weights are published under it. Returns the highest number that was published or reserved
        before; `version` is reserved only if it is higher.
        """
        ...

    def report(self, state: Mapping[str, str | int | float]) -> None:
        """Store the trainer's status for the gateways."""
        ...
