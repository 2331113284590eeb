"""What an audit knows: small frozen values, without the tokens themselves.

heads of sessions ─┐
stream, pending ───┼─▶ Evidence ─▶ rules ─▶ Finding, Finding, …
durable ledger ────┤
answers of clients ┘
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from rollout_queue.contract.records import Verdict
from rollout_queue.contract.tombstone import Tombstone


class TurnFact(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A turn as its session's head has it."""

    turn_id: str
    tokens: int
    """Output tokens: what training it would train."""
    generation: int
    """Turns that were sampled in one go, and not only alike, have the same."""
    versions: tuple[int, ...]
    verdict: Verdict | None = None
    """Its own; None where it has none yet, or its session's is its."""
    barred: str | None = None
    """Why it may never be trained; None when it may."""
    set_aside: bool = False
    """Its entry lies among the dead letters: no build that ran as trainer could read it."""


class SessionFact(msgspec.Struct, frozen=True, kw_only=True):
    """A session's head."""

    session_id: str
    group_id: str | None
    turns: tuple[TurnFact, ...]
    ends: frozenset[str]
    """The fields of its rewards and its outcome, as far as the trainer is to see them."""
    unheard: frozenset[str]
    """Those that it is not to see: late rewards, and what was set aside."""
    verdict: Verdict | None
    unreadable: Mapping[str, bytes]
    """Fields that this build cannot read, with the digest of their bytes."""

    @property
    def fields(self) -> frozenset[str]:
        """The fields of the head for which the stream has or had an entry."""
        turns = {f"t:{turn.turn_id}" for turn in self.turns}
        return frozenset(turns | self.ends | self.unheard | self.unreadable.keys())


class StreamFact(msgspec.Struct, frozen=True, kw_only=True):
    """What of the stream nobody has acknowledged."""

    entries: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Entry ids by session, and by the field of its head that the entry filled."""
    unreadable: Mapping[str, bytes]
    """Entries that this build cannot read, with the digest of their bytes."""
    pending: int
    """Delivered to a trainer."""
    undelivered: int
    vanished: int
    """Pending entries that were deleted from the stream."""

    def of(self, session_id: str, field: str) -> tuple[str, ...]:
        return self.entries.get(session_id, {}).get(field, ())


class LedgerRow(msgspec.Struct, frozen=True):
    """What one durable optimizer step trained, as the trainer's ledger says it."""

    step: int
    version: int
    durable: bool
    turns: list[str]
    sessions: list[str]
    tokens: int


class Ledger(msgspec.Struct, frozen=True):
    """Every durable step, oldest first, and where that was read."""

    rows: tuple[LedgerRow, ...]
    source: str
    remark: str | None = None
    """What the reader should know of the source."""


class GroupFact(msgspec.Struct, frozen=True):
    size: int | None
    members: frozenset[str]
    forgotten: int = 0
    """Of its members, how many were settled and are forgotten."""


class ClientAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a client was told had been done: a line of the file of `--answers`."""

    session_id: str
    turn_id: str | None = None
    reward_key: str | None = None
    finished: bool = False
    """The client heard that the session is finished."""

    @property
    def fields(self) -> list[str]:
        """The fields of the session's head that must be there for it."""
        turn = [f"t:{self.turn_id}"] if self.turn_id is not None else []
        reward = [f"r:{self.reward_key}"] if self.reward_key is not None else []
        return turn + reward + (["outcome"] if self.finished else [])


class Evidence(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One look at everything. On a live system its parts are some moments apart."""

    sessions: Mapping[str, SessionFact]
    known_sessions: frozenset[str]
    """Every session that was ever opened, as the list of sessions has them."""
    stream: StreamFact
    ledger: Ledger
    tombstones: Mapping[str, Tombstone] = {}
    groups: Mapping[str, GroupFact] = {}
    counts_before: Mapping[str, int] = {}
    """The counters of verdicts before the heads were read, and after."""
    counts_after: Mapping[str, int] = {}
    forgotten_before: Mapping[str, int] = {}
    """The same of what is forgotten of them; and the trained tokens of that."""
    forgotten_after: Mapping[str, int] = {}
    policies: frozenset[int] = frozenset()
    dead_letters: Mapping[bytes, str] = {}
    """Entry id by the digest of its bytes."""
    answers: tuple[ClientAnswer, ...] = ()

    @property
    def forgotten_sessions(self) -> int:
        counts = self.forgotten_after.items()
        return sum(number for name, number in counts if name.startswith("session:"))

    @cached_property
    def vanished_answers(self) -> frozenset[str]:
        """Sessions that a client was told of, and of which nothing is left."""
        told = {answer.session_id for answer in self.answers}
        return frozenset(told - self.sessions.keys() - self.tombstones.keys())

    @property
    def may_be_forgotten(self) -> bool:
        """Whether these may all be among the forgotten ones, whose names nobody keeps."""
        return len(self.vanished_answers) <= self.forgotten_sessions

    @cached_property
    def trained_by(self) -> Mapping[str, tuple[LedgerRow, ...]]:
        """The durable rows that name a turn, one for each time."""
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
    """Something that must not be, in a sentence that names its ids."""

    kind: Kind
    subject: str
    """What it is about: with `kind` and `rule`, the same in every look at the same fault."""
    rule: str
    sentence: str
    session_id: str | None = None
    turn_id: str | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.kind, self.rule, self.subject
