"""The values that an audit works on: small and frozen, with counts of tokens instead of tokens.

heads of sessions ─┐
stream, pending ───┼─▶ Evidence ─▶ rules ─▶ Finding, Finding, …
durable ledger ────┤
answers of clients ┘
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from rollout_queue.contract.head import Tombstone
from rollout_queue.contract.records import Verdict


class TurnFact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A turn as its session's head has it."""

    turn_id: str
    tokens: int
    """The number of output tokens, which are the tokens that a step trains."""
    generation: int
    """A hash that is the same in two records of one generation, and differs between two generations, even if
    they sampled the same tokens."""
    versions: tuple[int, ...]
    verdict: Verdict | None = None
    """The turn's own verdict; None if only its session has one, or neither has."""
    barred: str | None = None
    """Why the turn must not be trained; None if it may be."""
    numbers: int | None = None
    """The number of tokens of which a step has stored numbers; None if none has, or if a newer build wrote
    them; -1 if they cannot be read."""
    set_aside: bool = False
    """Whether the turn's entry is in the dead letters, because the trainer could not decode it."""


class SessionFact(msgspec.Struct, frozen=True, kw_only=True):
    """A session's head: what Redis stores about the session."""

    session_id: str
    group_id: str | None
    turns: tuple[TurnFact, ...]
    ends: frozenset[str]
    """The fields of the session's outcome and of those rewards that the trainer gets."""
    unheard: frozenset[str]
    """The fields that the trainer does not get, or can do without: late rewards, late joins, and fields whose
    entry is in the dead letters."""
    verdict: Verdict | None
    unreadable: Mapping[str, bytes]
    """Fields that this build cannot decode, with the digest of their bytes."""
    images: frozenset[str] = frozenset()
    """The hashes of the images that its turns show."""

    @property
    def fields(self) -> frozenset[str]:
        """The fields of the head that have or had an entry in the stream."""
        turns = {f"t:{turn.turn_id}" for turn in self.turns}
        return frozenset(turns | self.ends | self.unheard | self.unreadable.keys())


class StreamFact(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of the stream that are not acknowledged."""

    entries: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Entry ids, by session and by the field of the session's head that holds the same record."""
    unreadable: Mapping[str, bytes]
    """Entries that this build cannot decode, with the digest of their bytes."""
    pending: int
    """How many entries were delivered to a trainer and are not acknowledged."""
    undelivered: int
    vanished: int
    """How many pending entries were deleted from the stream."""

    def of(self, session_id: str, field: str) -> tuple[str, ...]:
        return self.entries.get(session_id, {}).get(field, ())


class LedgerRow(msgspec.Struct, frozen=True):
    """What one durable optimizer step trained, according to the trainer's ledger."""

    step: int
    version: int
    durable: bool
    turns: list[str]
    sessions: list[str]
    tokens: int

    @property
    def of_commands(self) -> bool:
        """Whether commands of a user's loop have made the step, and no turns."""
        return not self.turns and not self.sessions


class Ledger(msgspec.Struct, frozen=True):
    """Every durable step, oldest first, and where they were read from."""

    rows: tuple[LedgerRow, ...]
    source: str
    remark: str | None = None
    """A note about the source for the report."""


class GroupFact(msgspec.Struct, frozen=True):
    """A group and its members. `size` is None for a group of no fixed size."""

    size: int | None
    members: frozenset[str]
    forgotten: int = 0
    """How many members of the group were forgotten, that is, removed by retention."""


class ClientAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a client was told is stored: one line of the `--answers` file."""

    session_id: str
    turn_id: str | None = None
    reward_key: str | None = None
    finished: bool = False
    """Whether the client was told that the session is finished."""

    @property
    def fields(self) -> list[str]:
        """The fields that the session's head must have because of this answer."""
        turn = [f"t:{self.turn_id}"] if self.turn_id is not None else []
        reward = [f"r:{self.reward_key}"] if self.reward_key is not None else []
        return turn + reward + (["outcome"] if self.finished else [])


class Evidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that one reading found. On a live system its parts were read at different moments."""

    sessions: Mapping[str, SessionFact]
    known_sessions: frozenset[str]
    """Every session in the list of sessions."""
    stream: StreamFact
    ledger: Ledger
    tombstones: Mapping[str, Tombstone] = {}
    taught: Mapping[str, int] = {}
    """The sessions in the index of trained ones, with the version that each has taught."""
    groups: Mapping[str, GroupFact] = {}
    counts_before: Mapping[str, int] = {}
    """The counters of verdicts, read before the heads; `counts_after` was read after them."""
    counts_after: Mapping[str, int] = {}
    forgotten_before: Mapping[str, int] = {}
    """How many sessions and turns of each verdict were forgotten, and how many trained tokens they had; read
    before the heads."""
    forgotten_after: Mapping[str, int] = {}
    policies: frozenset[int] = frozenset()
    dead_letters: Mapping[bytes, str] = {}
    """The ids of the dead letters, by the digest of their bytes."""
    missing_images: frozenset[str] = frozenset()
    """The hashes of images that are not stored, of those that sessions show."""
    answers: tuple[ClientAnswer, ...] = ()
    losses: tuple[str, ...] = ()
    """What gateways and the trainer have noted that Redis lost, in sentences."""

    @property
    def forgotten_sessions(self) -> int:
        counts = self.forgotten_after.items()
        return sum(number for name, number in counts if name.startswith("session:"))

    @cached_property
    def vanished_answers(self) -> frozenset[str]:
        """Sessions in the answers that have neither a head nor a tombstone."""
        answered = {answer.session_id for answer in self.answers}
        return frozenset(answered - self.sessions.keys() - self.tombstones.keys())

    @property
    def may_be_forgotten(self) -> bool:
        """Whether at least as many sessions were forgotten as there are `vanished_answers`."""
        return len(self.vanished_answers) <= self.forgotten_sessions

    @cached_property
    def trained_by(self) -> Mapping[str, tuple[LedgerRow, ...]]:
        """The ledger rows that name a turn, by turn id; more than one is a fault."""
        found: dict[str, tuple[LedgerRow, ...]] = {}
        for row in self.ledger.rows:
            for turn_id in row.turns:
                found[turn_id] = (*found.get(turn_id, ()), row)
        return found

    @cached_property
    def rows_by_step(self) -> Mapping[int, LedgerRow]:
        return {row.step: row for row in self.ledger.rows}

    @cached_property
    def turns(self) -> Mapping[str, tuple[SessionFact, TurnFact]]:
        return {turn.turn_id: (session, turn) for session in self.sessions.values() for turn in session.turns}


Kind = Literal["lost", "duplicated", "unexplained"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault, with a sentence that names the ids."""

    kind: Kind
    subject: str
    """What the fault is about. `kind`, `rule` and `subject` of a fault are the same in every reading."""
    rule: str
    sentence: str
    session_id: str | None = None
    turn_id: str | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.kind, self.rule, self.subject
