"""From the stream's entries to groups whose every member has ended.

    Entry ─▶ Assembler.add ─▶ sessions, by group ─▶ complete() ─▶ Group ─▶ (trained, or not) ─▶ release
                          └─▶ strays(): records of sessions that are settled already

An entry belongs to its session and leaves with it: ended members stay, unacknowledged, until their group
goes, so that a restarted trainer counts them again.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_queue.records import Outcome, Reward, Turn, Verdict
from rollout_queue.stream import Entry
from trainer_service.turns import contradiction

SETTLED_KEPT = 100_000
"""How many settled sessions are remembered, so that what still arrives of them is known for a stray."""
LARGEST_REWARD = 1e9
"""Of a session, either way. Far beyond it the gradient overflows float32, and no restart would help."""


class Rules(NamedTuple):
    """What decides that a session or a group is complete."""

    vocab_size: int
    train_truncated: bool
    group_wait_s: float


@dataclass(frozen=True)
class Member:
    """A session that has ended. Its verdict is None when it can be trained, or when the gateway gave one."""

    session_id: str
    entry_ids: tuple[str, ...]
    turns: tuple[Turn, ...]
    reward: float | None
    verdict: Verdict | None

    @property
    def rewarded(self) -> bool:
        return self.verdict is None and self.reward is not None


@dataclass(frozen=True)
class Group:
    """The sessions of one task whose rewards are compared. `size` is what it was made for."""

    group_id: str
    size: int
    members: tuple[Member, ...]

    @property
    def rollouts(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.rewarded)


@dataclass
class _Session:
    """What the stream has said of one session so far."""

    session_id: str
    entry_ids: list[str] = field(default_factory=list)
    turns: dict[str, Turn] = field(default_factory=dict)
    rewards: dict[str, Reward] = field(default_factory=dict)
    outcome: Outcome | None = None
    closed: bool = False
    """Whether the gateway ended it with a verdict of its own: failed, abandoned or expired."""
    heard_at: float = 0.0
    _ended: Member | None = None
    _judged: bool = False
    """Whether `_ended` is true of everything taken so far; looking at every token is not for every tick."""

    @property
    def group_id(self) -> str:
        """A session without a group is a group of its own; the blank keeps it apart from any real id."""
        named = self.outcome.group_id if self.outcome else None
        named = named or next((turn.group_id for turn in self.turns.values() if turn.group_id), None)
        return named or f" {self.session_id}"

    def take(self, entry: Entry) -> None:
        """Add a record; one that is here already adds its entry only."""
        self.entry_ids.append(entry.entry_id)
        self._judged = False
        match entry.record:
            case Turn() as turn:
                self.turns.setdefault(turn.turn_id, turn)
                self.heard_at = max(self.heard_at, turn.finished_at)
            case Reward() as reward:
                self.rewards.setdefault(reward.key, reward)
                self.heard_at = max(self.heard_at, reward.created_at)
            case Outcome() as outcome:
                self.closed |= outcome.status in ("failed", "abandoned")
                self.outcome = self.outcome or outcome
                self.heard_at = max(self.heard_at, outcome.created_at)

    def ended(self, rules: Rules) -> Member | None:
        """The session as a member of its group; None while something of it is still to come."""
        if not self._judged:
            self._ended, self._judged = self._judge(rules), True
        return self._ended

    def _judge(self, rules: Rules) -> Member | None:
        if self.outcome is None:
            return None
        turns = tuple(self.turns.values())
        if self.closed:
            return self._member(turns, None, None)
        if not self.outcome.train:
            return self._member(
                turns, None, Verdict(code="not_for_training", detail="opened with train: false")
            )
        if self.outcome.status == "truncated" and not rules.train_truncated:
            return self._member(
                turns, None, Verdict(code="truncated", detail="truncated sessions are not trained")
            )
        if not self.rewards:
            return None
        reward = sum(self.rewards[key].value for key in sorted(self.rewards))
        if not abs(reward) <= LARGEST_REWARD:  # nor NaN, which infinities may add up to
            detail = f"a reward of {reward:g} is beyond {LARGEST_REWARD:g}"
            return self._member(turns, None, Verdict(code="invalid", detail=detail))
        if not turns:
            return self._member(turns, reward, Verdict(code="invalid", detail="the session has no turn"))
        if broken := contradiction(turns, rules.vocab_size):
            return self._member(turns, reward, Verdict(code="invalid", detail=broken))
        return self._member(turns, reward, None)

    def _member(self, turns: tuple[Turn, ...], reward: float | None, verdict: Verdict | None) -> Member:
        return Member(self.session_id, tuple(self.entry_ids), turns, reward, verdict)


class Assembler:
    """Holds what was read and not yet settled. One entry is held once, however often it is delivered."""

    def __init__(self, rules: Rules, settled: Iterable[str] = ()) -> None:
        self._rules = rules
        self._sessions: dict[str, _Session] = {}
        self._held: set[str] = set()
        self._settled: dict[str, None] = dict.fromkeys(settled)
        self._strays: list[str] = []
        self._groups: dict[str, set[str]] = {}
        """Session ids by group, of every session that is held."""

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.entry_id in self._held:
                continue
            session_id = entry.record.session_id
            if session_id in self._settled:
                self._strays.append(entry.entry_id)
                continue
            self._held.add(entry.entry_id)
            session = self._sessions.setdefault(session_id, _Session(session_id))
            former = session.group_id
            session.take(entry)
            if session.group_id != former and session_id in self._groups.get(former, ()):
                self._leave(former, session_id)
            self._groups.setdefault(session.group_id, set()).add(session_id)

    def complete(self, caught_up: bool) -> list[Group]:
        """Every group that can go now, the one whose last record is oldest first.

        None is overdue before everything in the stream was read: what it lacks may be waiting there.
        """
        now_s = time.time()
        found: list[tuple[float, Group]] = []
        for group_id, session_ids in self._groups.items():
            sessions = [self._sessions[session_id] for session_id in session_ids]
            size, heard_at = self._size(group_id), max(session.heard_at for session in sessions)
            overdue = caught_up and now_s - heard_at > self._rules.group_wait_s
            if len(sessions) < (size or 0) and not overdue:
                continue
            members = [member for session in sessions if (member := session.ended(self._rules))]
            known_size = size is not None and len(members) >= size
            if known_size or (overdue and members and len(members) == len(sessions)):
                ordered = tuple(sorted(members, key=lambda member: member.session_id))
                found.append((heard_at, Group(group_id.strip(), size or len(members), ordered)))
        return [group for _, group in sorted(found, key=lambda item: (item[0], item[1].group_id))]

    def release(self, group: Group) -> None:
        """Forget a group that is settled; whatever still arrives of it is a stray."""
        for member in group.members:
            session = self._sessions.pop(member.session_id)
            self._held.difference_update(session.entry_ids)
            # Records that came after the group was taken were not part of what it was settled by.
            self._strays += session.entry_ids[len(member.entry_ids) :]
            self._settled[member.session_id] = None
            self._leave(session.group_id, member.session_id)
        while len(self._settled) > SETTLED_KEPT:
            del self._settled[next(iter(self._settled))]

    def strays(self) -> list[str]:
        """Entries that came after their session was settled; they change nothing any more."""
        strays, self._strays = self._strays, []
        return strays

    @property
    def settled(self) -> list[str]:
        return list(self._settled)

    def census(self) -> tuple[int, int, int]:
        """How many sessions are held open, wait for a reward, and have ended in a group that has not."""
        sessions = self._sessions.values()
        ended = sum(session.ended(self._rules) is not None for session in sessions)
        unfinished = sum(session.outcome is None for session in sessions)
        return unfinished, len(sessions) - unfinished - ended, ended

    def _size(self, group_id: str) -> int | None:
        """What the group was made for; None when nobody said."""
        if group_id.startswith(" "):
            return 1
        outcomes = (self._sessions[session_id].outcome for session_id in self._groups[group_id])
        return max(
            (outcome.group_size for outcome in outcomes if outcome and outcome.group_size), default=None
        )

    def _leave(self, group_id: str, session_id: str) -> None:
        members = self._groups.get(group_id, set())
        members.discard(session_id)
        if not members:
            self._groups.pop(group_id, None)
