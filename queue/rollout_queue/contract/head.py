"""The head of a session: everything that is stored of the session at one moment, and what is seen of it.

SessionHead ─▶ TurnSums                 what a list of sessions shows without reading any tokens
            ─▶ ListedSession            at its position in the list of all sessions by age
            ─▶ SessionProgress          is it open, or complete, or waits for a reward? the same of a group
deleted     ─▶ Tombstone                keeps the id from being used again
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from rollout_queue.contract.errors import InvalidRecord
from rollout_queue.contract.outcomes import orphans_of, total
from rollout_queue.contract.packed_tokens import TokenIds
from rollout_queue.contract.records import (
    LateJoin,
    Outcome,
    Record,
    Relation,
    Reward,
    SessionSpec,
    Turn,
    TurnImage,
    Verdict,
)


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


def deletion_totals(tombstones: list[Tombstone]) -> DeletionTotals:
    """The sum over the sessions of one user."""
    turns, rewards = sum(each.turns for each in tombstones), sum(each.rewards for each in tombstones)
    return DeletionTotals(len(tombstones), turns, rewards)


def user_digest(user: str) -> str:
    """Identifies a deleted user without storing the name."""
    return hashlib.sha256(user.encode()).hexdigest()


NONE = "-"


class TurnSums(msgspec.Struct, frozen=True, gc=False):
    """What is known of a session's turns without their tokens."""

    turns: int = 0
    output_len: int = 0
    """How many tokens were sampled."""
    finished_at: float | None = None
    """When the last turn ended, seconds since the epoch; None without turns."""
    first_version: int | None = None
    """The oldest version that sampled a token; None if no token was sampled."""
    last_version: int | None = None


def decode_sums(raw: bytes) -> TurnSums:
    """The sums from the field `turns` of a session's hash, which APPEND_TURN writes: five numbers.

    Raises InvalidRecord.
    """
    try:
        turns, output_len, finished_at, first, last = raw.decode().split()
        return TurnSums(int(turns), int(output_len), float(finished_at), _version(first), _version(last))
    except ValueError as error:
        raise InvalidRecord(f"the sums of the turns cannot be read: {raw[:100]!r}") from error


def _version(text: str) -> int | None:
    return None if text == NONE else int(text)


SessionState = Literal["open", "waiting_reward", "finished"]
TERMS = ("group_id", "group_size", "task_id", "train")
"""What an outcome repeats of its session's spec."""


class TrainedBranch(NamedTuple):
    """Turns from a root to a tip, each with only the tokens that it adds to its parent."""

    turns: tuple[Turn, ...]
    trained: frozenset[str]
    """The turns, by id, that are trained in this branch and in no other."""


class SessionHead(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A session's spec with its turns (oldest first), rewards, outcome and verdicts."""

    spec: SessionSpec
    turns: tuple[Turn, ...] = ()
    rewards: tuple[Reward, ...] = ()
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    turn_verdicts: Mapping[str, Verdict] = {}
    trained_tokens: Mapping[str, bytes] = {}
    """The packed `TrainedTokens` of trained turns, by turn id."""
    beaten_at: float = 0.0
    """The time of the last heartbeat, seconds since the epoch; 0 if there was none."""
    unread: TurnSums | None = None
    """What is known of the turns if the head was read without them; None if `turns` has all of them."""
    stored: bool = True
    """False for a session that does not exist yet, because its first turn will open it."""

    @property
    def state(self) -> SessionState:
        if self.outcome is None:
            return "open" if self.verdict is None else "finished"
        if self.reward is None and self.verdict is None:
            return "waiting_reward"
        return "finished"

    @property
    def reward(self) -> float | None:
        """The sum of all rewards; None while there is none."""
        return total(self.rewards)

    @property
    def expires_at(self) -> float:
        """Seconds since the epoch: the last of creation, call and heartbeat, plus the time to live."""
        last_call = self.sums.finished_at or self.spec.created_at
        return max(self.spec.created_at, last_call, self.beaten_at) + self.spec.ttl_s

    @cached_property
    def sums(self) -> TurnSums:
        """Sums over all turns, also if the head was read without them."""
        if self.unread is not None:
            return self.unread
        versions = [span.version for turn in self.turns for span in turn.versions]
        return TurnSums(
            len(self.turns),
            sum(len(turn.output_ids) for turn in self.turns),
            max((turn.finished_at for turn in self.turns), default=None),
            min(versions, default=None),
            max(versions, default=None),
        )

    @cached_property
    def by_id(self) -> Mapping[str, Turn]:
        return {turn.turn_id: turn for turn in self.turns}

    @property
    def users(self) -> Sequence[str]:
        """The users for whom the session was opened or one of its calls was made, sorted."""
        named = {self.spec.user, *(turn.user for turn in self.turns)}
        return sorted(user for user in named if user is not None)

    @cached_property
    def orphans(self) -> Mapping[str, str]:
        """The turns that a retry has replaced, by id, with the id of that retry."""
        return orphans_of(self.turns)

    def relation_of(self, turn: Turn) -> Relation:
        """How the turn follows its session. A recorded turn becomes a retry if the attempt that it replaces
        is recorded after it."""
        return "retry" if turn.turn_id in self.orphans.values() else turn.relation

    def lineage_of(self, turn: Turn) -> list[Turn]:
        """The turns from the root of `turn`'s branch down to `turn` itself."""
        branch = [turn]
        while branch[-1].parent_id is not None:
            branch.append(self.by_id[branch[-1].parent_id])
        return branch[::-1]

    def branch_ids(self, turn: Turn) -> tuple[TokenIds, TokenIds]:
        """The full prompt of `turn` (every token before its own output) and its output."""
        prompt = TokenIds()
        for ancestor in self.lineage_of(turn)[:-1]:
            prompt += ancestor.context_ids
            prompt += ancestor.output_ids
        prompt += turn.context_ids
        return prompt, turn.output_ids

    def branch_images(self, turn: Turn) -> tuple[TurnImage, ...]:
        """The images of the full prompt of `turn`, with their places in it."""
        images: list[TurnImage] = []
        length = 0
        for each in self.lineage_of(turn):
            images += [image.moved(length) for image in each.images]
            length += len(each.context_ids) + len(each.output_ids)
        return tuple(images)

    def trained_branches(self, trainable: Collection[str]) -> Iterator[TrainedBranch]:
        """The branches that together hold the turns of `trainable` (turn ids), sorted by the age of their
        tips, oldest first. A turn that several branches share is trained in the first of them. A turn that
        sampled no token is trained in none.

        Raises InvalidRecord if a turn of `trainable` has no way to a root that has a prompt.
        """
        branches = [self._branch(turn) for turn in self.turns if turn.turn_id in trainable]
        inner = {turn.turn_id for branch in branches for turn in branch[:-1]}
        left = set(trainable)
        for branch in sorted(branches, key=lambda branch: (branch[-1].started_at, branch[-1].turn_id)):
            if branch[-1].turn_id in inner:
                continue
            trained = frozenset(turn.turn_id for turn in branch if turn.output_ids) & left
            left -= trained
            if trained:
                yield TrainedBranch(branch, trained)

    def _branch(self, tip: Turn) -> tuple[Turn, ...]:
        branch = [tip]
        while (parent_id := branch[-1].parent_id) is not None:
            parent = self.by_id.get(parent_id)
            if parent is None or len(branch) == len(self.turns):
                raise InvalidRecord(f"turn {tip.turn_id} has no way to a root")
            branch.append(parent)
        if not branch[-1].context_ids:
            raise InvalidRecord(f"turn {branch[-1].turn_id} has no prompt")
        return tuple(reversed(branch))

    def rewards_of(self, turn: Turn) -> Iterator[Reward]:
        return (reward for reward in self.rewards if reward.turn_id == turn.turn_id)


def tombstone_of(head: SessionHead, turns: int, rewards: int, deleted_at: float) -> Tombstone:
    """The tombstone of a session that had these turns and rewards. `deleted_at`: seconds since the epoch."""
    return Tombstone(
        session_id=head.spec.session_id,
        name=head.spec.name,
        owner=head.spec.owner,
        created_at=head.spec.created_at,
        deleted_at=deleted_at,
        turns=turns,
        rewards=rewards,
        verdict=head.verdict.code if head.verdict else None,
    )


def with_terms(outcome: Outcome, spec: SessionSpec) -> Outcome:
    """The outcome with the terms that its session has by now."""
    return msgspec.structs.replace(outcome, **{name: getattr(spec, name) for name in TERMS})


def late_join_of(spec: SessionSpec, now: float) -> LateJoin | None:
    """The record of a session that was described at `now` (seconds since the epoch); None without a group."""
    if spec.group_id is None:
        return None
    return LateJoin(
        session_id=spec.session_id, created_at=now, group_id=spec.group_id, group_size=spec.group_size
    )


def field_of(record: Record) -> str:
    """The field of the session's head that holds the same record; "deletion" for a Deletion (it has none)."""
    match record:
        case Turn():
            return f"t:{record.turn_id}"
        case Reward():
            return f"r:{record.key}"
        case Outcome():
            return "outcome"
        case LateJoin():
            return "joined"
        case _:
            return "deletion"


class ListPosition(NamedTuple):
    """The position of one session, by creation time and then by id. It stays valid without the session."""

    created_at: float
    session_id: str


LIST_START = ListPosition(float("-inf"), "")
"""The position before every session."""
LIST_END = ListPosition(float("inf"), "")
"""The position after every session, where a list begins that has the newest first."""


class ListScope(NamedTuple):
    """Which sessions a list looks at, and in which order. A group, a user or a version spares it looking at
    others."""

    newest_first: bool = False
    group_id: str | None = None
    user: str | None = None
    trained_version: int | None = None
    """The version that the step which trained the sessions has made."""
    turns: bool = True
    """Whether the sessions are read with their turns."""

    @property
    def start(self) -> ListPosition:
        return LIST_END if self.newest_first else LIST_START


ALL_SESSIONS = ListScope()


def after_position(
    positions: Iterable[ListPosition], position: ListPosition, *, newest_first: bool
) -> list[ListPosition]:
    """Those of the positions that come after one position, in the order of the list."""
    if newest_first:
        return sorted((each for each in positions if each < position), reverse=True)
    return sorted(each for each in positions if each > position)


class ListedSession(NamedTuple):
    """A position with its session or tombstone. `found` is None if the session was removed meanwhile."""

    position: ListPosition
    found: SessionHead | Tombstone | None


def position_of(session: SessionHead | Tombstone) -> ListPosition:
    known = session if isinstance(session, Tombstone) else session.spec
    return ListPosition(known.created_at, known.session_id)


SessionStage = Literal["open", "waiting_reward", "ended", "decided"]
"""`open`: the session has no outcome. `waiting_reward`: it has ended, and a reward is still to come. `ended`:
it has ended, and needs no reward or has one. `decided`: it has a verdict."""


class SessionProgress(NamedTuple):
    """The stage of one session. `spec` is None if the session was deleted, was never opened or cannot be
    read."""

    session_id: str
    stage: SessionStage
    spec: SessionSpec | None = None
    outcome: Outcome | None = None
    readable: bool = True


class GroupProgress(NamedTuple):
    """The number of sessions that a group is made for, and how many have reached each stage."""

    size: int
    ended: int
    """Sessions that are `ended` or `decided`."""
    open: int = 0
    unrewarded: int = 0

    @property
    def missing(self) -> int:
        """How many sessions have not been opened yet."""
        return max(0, self.size - self.ended - self.open - self.unrewarded)

    @property
    def waiting_for(self) -> str:
        """What the group waits for, in words; empty when it is complete."""
        parts = [
            (self.open, "goes on", "go on"),
            (self.unrewarded, "waits for a reward", "wait for a reward"),
            (self.missing, "is not opened yet", "are not opened yet"),
        ]
        return ", ".join(f"{count} {one if count == 1 else many}" for count, one, many in parts if count)


def group_progress(size: int | None, stages: Iterable[SessionStage]) -> GroupProgress:
    """Counts the stages of a group's sessions. If `size` is None, the group has no fixed size: then its
    size is the number of `stages`."""
    counted = list(stages)
    going, unrewarded = counted.count("open"), counted.count("waiting_reward")
    return GroupProgress(size or len(counted), len(counted) - going - unrewarded, going, unrewarded)


def stage(outcome: Outcome | None, *, has_verdict: bool, has_reward: bool) -> SessionStage:
    if has_verdict:
        return "decided"
    if outcome is None:
        return "open"
    if has_reward or not outcome.train or outcome.status in ("failed", "abandoned"):
        return "ended"
    return "waiting_reward"
