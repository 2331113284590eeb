"""Collects the entries of the stream into sessions, and the sessions into complete groups.

    Entry ─▶ Assembler.add ─▶ sessions, by group ─▶ complete ─▶ Group ─▶ (trained, or not) ─▶ release
                          └─▶ take_useless_entries: of sessions that have been released, or deleted

A session keeps its entries until its group is released. The entries stay unacknowledged until then, so that a
restarted trainer reads them again. A group is complete when all its members have ended. It is released
without its missing members in three cases: it does not need them (`over_sampling`); its deadline has passed;
or it has had no record for `group_wait_s` and every member with a record has ended. A member that ends later
is not trained.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from rollout_queue import clock
from rollout_queue.contract.stream import Entry
from trainer_service.groups.episode import Member, Rules, Session


class SessionCounts(NamedTuple):
    """How many of the sessions in the assembler have not ended, wait for a reward, or have ended."""

    unfinished: int
    unrewarded: int
    """The agent has finished them, and no reward has come."""
    ended: int
    """They have ended. Their group is not complete, or waits for its step."""


class GroupWait(NamedTuple):
    """A group of which some members have ended and others have not. Times are in seconds since 1970."""

    missing: int
    """How many members have not ended. Members of which no record was read count too."""
    since: float
    """When its first rewarded member ended. If no rewarded member has ended, the time of its last record."""
    goes_at: float | None
    """When the group is trained without the missing members; None if it has no deadline."""
    lacks: int
    """How many more rewarded members it needs before the deadline applies."""


def describe_sessions(counts: SessionCounts) -> str | None:
    """How many of the sessions that were read wait for what; None if there are none."""
    one = (
        (counts.unfinished, "is unfinished", "are unfinished"),
        (counts.unrewarded, "waits for a reward", "wait for a reward"),
        (counts.ended, "has ended", "have ended"),
    )
    said = [f"{number} {single if number == 1 else several}" for number, single, several in one if number]
    return f"of the sessions read, {', '.join(said)}" if said else None


def describe_waits(waits: Sequence[GroupWait], now_s: float) -> str | None:
    """How many groups wait, for how many members, and how much longer; None when no group waits."""
    if not waits:
        return None
    oldest = min(waits, key=lambda wait: wait.since)
    groups, members = len(waits), sum(wait.missing for wait in waits)
    waiting = f"{groups} group waits" if groups == 1 else f"{groups} groups wait"
    missing = "1 unfinished member" if members == 1 else f"{members} unfinished members"
    sentence = f"{waiting} for {missing}; the oldest has waited {max(0.0, now_s - oldest.since):.0f} s"
    if oldest.goes_at is None:
        return sentence
    if oldest.lacks:
        return f"{sentence}, and is trained without them when {oldest.lacks} more have a reward"
    return f"{sentence}, and is trained without them in {max(0.0, oldest.goes_at - now_s):.0f} s"


__all__ = ["Assembler", "Group", "Member", "Rules"]

SETTLED_KEPT = 100_000
"""How many released sessions are remembered, so that their late entries are recognised."""
GONE_KEPT = 20_000
"""How many groups are remembered that were released without some of their members."""


@dataclass(frozen=True)
class Group:
    """The sessions of one task whose rewards are compared."""

    group_id: str
    size: int
    """The number of members that the group was opened for."""
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """Unique, unlike the group's own id: a session without a group makes a group under its own id, which
        may also be the id of a real group. A session is in one group only."""
        return self.members[0].session_id

    @property
    def task_id(self) -> str | None:
        return next((member.task_id for member in self.members if member.task_id is not None), None)

    @property
    def rollouts(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.rewarded)


class Assembler:
    """Holds the sessions that were read and are not released. It ignores an entry that it holds already."""

    def __init__(
        self, rules: Rules, settled: Iterable[str] = (), gone: Mapping[str, int] | None = None
    ) -> None:
        self._rules = rules
        self._sessions: dict[str, Session] = {}
        self._held: set[str] = set()
        self.settled: dict[str, None] = dict.fromkeys(settled)
        """The sessions that were released most recently, the newest last."""
        self.gone: dict[str, int] = dict(gone or {})
        """The groups that were released while members were missing, and how many members each had; 0 if not
        known."""
        self._late: list[str] = []
        self._freed: list[str] = []
        self._groups: dict[str, set[str]] = {}
        """The ids of the sessions here, by group."""
        self._new_sessions: set[str] = set()
        self._new_groups: set[str] = set()

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.entry_id in self._held:
                continue
            session_id = entry.record.session_id
            if session_id in self.settled:
                self._late.append(entry.entry_id)
                continue
            if (session := self._sessions.get(session_id)) is None:
                session = self._sessions[session_id] = Session(session_id)
                self._new_sessions.add(session_id)
            former = session.group_id
            freed = session.take(entry, self._rules.experts_width)
            self._held.add(entry.entry_id)
            self._held.difference_update(freed)
            self._freed += freed
            if session.group_id != former and session_id in self._groups.get(former, ()):
                self._leave(former, session_id)
            if session.group_id not in self._groups:
                self._groups[session.group_id] = set()
                self._new_groups.add(session.group_id)
            self._groups[session.group_id].add(session_id)

    def take_new_ids(self) -> tuple[Collection[str], Collection[str]]:
        """The sessions and groups whose first entry has come since the last call. The caller asks which of
        them an earlier trainer process has released."""
        sessions, self._new_sessions = self._new_sessions, set()
        groups, self._new_groups = self._new_groups, set()
        return sessions, [group_id for group_id in groups - self.gone.keys() if not _alone(group_id)]

    def mark_finished(self, settled: Iterable[str], gone: Iterable[str]) -> None:
        """Forget the `settled` sessions, which an earlier trainer process has released, and remember that it
        released the groups `gone` without some of their members."""
        for session_id in settled:
            self._late += self._forget(session_id)
        for group_id in gone:
            self.gone[group_id] = 0

    def complete(self, caught_up: bool) -> list[Group]:
        """The groups that no longer wait. The group whose last record is the oldest comes first.

        `caught_up` says that the whole stream was read. Until then, every group waits for its missing
        members, because their records may still be in the stream.
        """
        now_s = clock.now()
        found: list[tuple[float, str, str, Group]] = []
        for group_id in self._groups:
            sessions = self._of(group_id)
            if members := self._going(group_id, sessions, caught_up, now_s):
                ordered = tuple(sorted(members, key=attrgetter("session_id")))
                size = _size(group_id, sessions) or len(members)
                last_record_at = max(session.last_record_at for session in sessions)
                group = Group(group_id.strip(), size, ordered)
                found.append((last_record_at, group.group_id, group_id, group))
        return [group for *_, group in sorted(found)]  # no two groups have the same id here

    def group_ids(self) -> set[str]:
        """The ids of all groups here, complete or not."""
        return {group_id.strip() for group_id in self._groups}

    def release(self, group: Group) -> None:
        """Forget a group that was trained or got its verdicts. Entries that arrive for it later are late."""
        for member in group.members:
            # The caller acknowledges the entries in `group`. The session may have received others since then.
            acknowledged = frozenset(member.entry_ids)
            self._late += [each for each in self._forget(member.session_id) if each not in acknowledged]
        if len(group.members) < group.size:
            self.gone.setdefault(group.group_id, len(group.members))
        _forget_oldest(self.settled, SETTLED_KEPT)
        _forget_oldest(self.gone, GONE_KEPT)

    def take_useless_entries(self) -> tuple[list[str], list[str]]:
        """The entries since the last call that have no effect: first those of deleted sessions, which must be
        acknowledged before the entry of the deletion, because a restarted trainer could read them without the
        deletion, and train them; then those that came after their session was released or deleted."""
        found = self._freed, self._late
        self._freed, self._late = [], []
        return found

    def counts(self) -> SessionCounts:
        sessions = self._sessions.values()
        ended = sum(session.ended(self._rules) is not None for session in sessions)
        unfinished = sum(not session.over for session in sessions)
        return SessionCounts(unfinished, len(sessions) - unfinished - ended, ended)

    def waits(self) -> list[GroupWait]:
        """The groups of which some members have ended and others have not."""
        found = []
        for group_id in self._groups:
            sessions = self._of(group_id)
            size = _size(group_id, sessions)
            ended = [session for session in sessions if session.ended(self._rules)]
            rewarded = self._rewarded(sessions)
            missing = 0 if size is None else min(size - len(ended), self._rules.needed(size) - len(rewarded))
            if not ended or missing <= 0 or group_id in self.gone:
                continue
            since = min((s.rewarded_at for s in rewarded), default=max(s.last_record_at for s in sessions))
            deadline_s = self._rules.group_deadline_s
            goes_at = None if deadline_s is None else since + deadline_s
            lacks = max(0, self._rules.group_min_size - len(rewarded))
            found.append(GroupWait(missing, since, goes_at, lacks))
        return found

    def count_oldest_at(self, version: int, besides: Iterable[Group]) -> int:
        """How many sessions may still be trained and have `version` as the oldest version of their tokens.
        Sessions of the groups `besides`, and of groups that were released, do not count."""
        going = {member.session_id for group in besides for member in group.members}
        return sum(
            session.oldest == version and not session.closed
            for group_id, session_ids in self._groups.items()
            if group_id not in self.gone and going.isdisjoint(session_ids)
            for session in (self._sessions[session_id] for session_id in session_ids)
        )

    def _going(
        self, group_id: str, sessions: Sequence[Session], caught_up: bool, now_s: float
    ) -> list[Member]:
        """The members that the group is released with now; none while the group waits."""
        rules = self._rules
        if (present := self.gone.get(group_id)) is not None:
            return [late for each in sessions if (late := each.late_member(rules, present))]
        size = _size(group_id, sessions)
        overdue = caught_up and now_s - max(each.last_record_at for each in sessions) > rules.group_wait_s
        needed = rules.needed(size or 0)
        if len(sessions) < needed and not overdue and rules.group_deadline_s is None:
            return []
        members = [member for each in sessions if (member := each.ended(rules))]
        if size is not None and needed < size and caught_up and (first := self._first(sessions, needed)):
            return [member for member in members if not member.rewarded or member.session_id in first]
        whole = size is not None and len(members) >= size
        due = size is not None and caught_up and self._past_deadline(sessions, now_s)
        return members if whole or due or (overdue and len(members) == len(sessions)) else []

    def _first(self, sessions: Sequence[Session], needed: int) -> set[str]:
        """The ids of the `needed` members that were rewarded first; none while there are fewer. Later members
        do not change the group while it waits for its step: it may be learned already."""
        rewarded = sorted(self._rewarded(sessions), key=lambda each: (each.rewarded_at, each.session_id))
        return {each.session_id for each in rewarded[:needed]} if len(rewarded) >= needed else set()

    def _past_deadline(self, sessions: Sequence[Session], now_s: float) -> bool:
        """Whether the group has enough rewarded members, and the first of them has waited longer than the
        deadline. Failed members do not start the deadline: they do not show how long the others need."""
        if self._rules.group_deadline_s is None:
            return False
        rewarded = self._rewarded(sessions)
        if len(rewarded) < self._rules.group_min_size:
            return False
        return now_s - min(each.rewarded_at for each in rewarded) > self._rules.group_deadline_s

    def _rewarded(self, sessions: Sequence[Session]) -> list[Session]:
        return [each for each in sessions if (ended := each.ended(self._rules)) and ended.rewarded]

    def _of(self, group_id: str) -> list[Session]:
        return [self._sessions[session_id] for session_id in self._groups[group_id]]

    def _forget(self, session_id: str) -> list[str]:
        """Forget a session, and remember that it was released. Returns its entries."""
        session = self._sessions.pop(session_id)
        self._held.difference_update(session.entry_ids)
        self.settled[session_id] = None
        self._leave(session.group_id, session_id)
        return session.entry_ids

    def _leave(self, group_id: str, session_id: str) -> None:
        members = self._groups.get(group_id, set())
        members.discard(session_id)
        if not members:
            self._groups.pop(group_id, None)


def _size(group_id: str, sessions: Sequence[Session]) -> int | None:
    """How many members the group was opened for; None while no record has said it."""
    if _alone(group_id):
        return 1
    return max((session.group_size for session in sessions if session.group_size), default=None)


def _alone(group_id: str) -> bool:
    """Whether the group is one session without a group id."""
    return group_id.startswith(" ")


def _forget_oldest(kept: dict[str, int] | dict[str, None], limit: int) -> None:
    while len(kept) > limit:
        del kept[next(iter(kept))]
