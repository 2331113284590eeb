"""From the stream's entries to groups whose every member has ended, or whose patience has.

    Entry ─▶ Assembler.add ─▶ sessions, by group ─▶ complete() ─▶ Group ─▶ (trained, or not) ─▶ release
                          └─▶ strays(): entries that nothing needs: of settled sessions, of deleted ones

An entry belongs to its session and leaves with it: ended members stay, unacknowledged, until their group
goes, so that a restarted trainer counts them again. A group goes without its stragglers when its deadline
passes or it is silent for long; each of them is settled, untrained, when it ends.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_queue.contract.stream import Entry
from trainer_service.groups.episode import Member, Rules, Session
from trainer_service.groups.waits import Wait

__all__ = ["Assembler", "Group", "Member", "Rules"]

SETTLED_KEPT = 100_000
"""How many settled sessions are remembered, so that what still arrives of them is known for a stray."""
GONE_KEPT = 20_000
"""How many groups that went without some of their members are remembered."""


@dataclass(frozen=True)
class Group:
    """The sessions of one task whose rewards are compared. `size` is what it was made for."""

    group_id: str
    size: int
    members: tuple[Member, ...]

    @property
    def rollouts(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.rewarded)


class Assembler:
    """Holds what was read and not yet settled. One entry is held once, however often it is delivered."""

    def __init__(
        self, rules: Rules, settled: Iterable[str] = (), gone: Mapping[str, int] | None = None
    ) -> None:
        self._rules = rules
        self._sessions: dict[str, Session] = {}
        self._held: set[str] = set()
        self._settled: dict[str, None] = dict.fromkeys(settled)
        self._gone: dict[str, int] = dict(gone or {})
        """Groups that went without some of their members, and with how many; 0 where nobody remembers."""
        self._strays: list[str] = []
        self._freed: list[str] = []
        self._groups: dict[str, set[str]] = {}
        """Session ids by group, of every session that is held."""
        self._met: tuple[set[str], set[str]] = (set(), set())
        """Sessions and groups that came since somebody asked."""

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.entry_id in self._held:
                continue
            session_id = entry.record.session_id
            if session_id in self._settled:
                self._strays.append(entry.entry_id)
                continue
            if (session := self._sessions.get(session_id)) is None:
                session = self._sessions[session_id] = Session(session_id)
                self._met[0].add(session_id)
            former = session.group_id
            freed = session.take(entry)
            self._held.add(entry.entry_id)
            self._held.difference_update(freed)
            self._freed += freed
            if session.group_id != former and session_id in self._groups.get(former, ()):
                self._leave(former, session_id)
            if session.group_id not in self._groups:
                self._groups[session.group_id] = set()
                self._met[1].add(session.group_id)
            self._groups[session.group_id].add(session_id)

    def met(self) -> tuple[Collection[str], Collection[str]]:
        """Sessions and groups that are new here; a trainer before this one may have finished with them."""
        sessions, groups = self._met
        self._met = (set(), set())
        return sessions, [group_id for group_id in groups - self._gone.keys() if not _alone(group_id)]

    def recall(self, settled: Iterable[str], gone: Iterable[str]) -> None:
        """What a trainer before this one had finished with: sessions, and groups that went without some."""
        for session_id in settled:
            self._strays += self._settle(session_id)
        for group_id in gone:
            self._gone[group_id] = 0

    def complete(self, caught_up: bool) -> list[Group]:
        """Every group that can go now, the one whose last record is oldest first.

        None is overdue before everything in the stream was read: what it lacks may be waiting there.
        """
        now_s = time.time()
        found: list[tuple[float, Group]] = []
        for group_id in self._groups:
            sessions = self._of(group_id)
            if members := self._going(group_id, sessions, caught_up, now_s):
                ordered = tuple(sorted(members, key=lambda member: member.session_id))
                size = _size(group_id, sessions) or len(members)
                heard_at = max(session.heard_at for session in sessions)
                found.append((heard_at, Group(group_id.strip(), size, ordered)))
        return [group for _, group in sorted(found, key=lambda item: (item[0], item[1].group_id))]

    def group_ids(self) -> set[str]:
        """Of every group that is held, complete or not."""
        return {group_id.strip() for group_id in self._groups}

    def release(self, group: Group) -> None:
        """Forget a group that is settled; whatever still arrives of it is a stray, or comes too late."""
        for member in group.members:
            # Records that came after the group was taken were not part of what it was settled by.
            settled = frozenset(member.entry_ids)
            self._strays += [each for each in self._settle(member.session_id) if each not in settled]
        if len(group.members) < group.size:
            self._gone.setdefault(group.group_id, len(group.members))
        _forget_oldest(self._settled, SETTLED_KEPT)
        _forget_oldest(self._gone, GONE_KEPT)

    def strays(self) -> list[str]:
        """Entries that came after their session was settled or deleted; they change nothing any more."""
        strays, self._strays = self._strays, []
        return strays

    def freed(self) -> list[str]:
        """What a deletion made useless. A restart that met it without that deletion would train it."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def settled(self) -> list[str]:
        return list(self._settled)

    @property
    def gone(self) -> dict[str, int]:
        return dict(self._gone)

    def census(self) -> tuple[int, int, int]:
        """How many sessions are held open, wait for a reward, and have ended in a group that has not."""
        sessions = self._sessions.values()
        ended = sum(session.ended(self._rules) is not None for session in sessions)
        unfinished = sum(not session.over for session in sessions)
        return unfinished, len(sessions) - unfinished - ended, ended

    def waits(self) -> list[Wait]:
        """The groups of which some members have ended and others have not."""
        found = []
        for group_id in self._groups:
            sessions = self._of(group_id)
            size = _size(group_id, sessions)
            ended = [session for session in sessions if session.ended(self._rules)]
            if size is None or not 0 < len(ended) < size or group_id in self._gone:
                continue
            rewarded = self._rewarded(sessions)
            since = min((s.rewarded_at for s in rewarded), default=max(s.heard_at for s in sessions))
            deadline_s = self._rules.group_deadline_s
            goes_at = None if deadline_s is None else since + deadline_s
            lacks = max(0, self._rules.group_min_size - len(rewarded))
            found.append(Wait(size - len(ended), since, goes_at, lacks))
        return found

    def endangered(self, version: int, besides: Iterable[Group]) -> int:
        """How many sessions have a token of just this version and are still to be trained: one step more, and
        they are too old. Not those of groups that went, or go now, with or without them."""
        going = {member.session_id for group in besides for member in group.members}
        return sum(
            session.oldest == version and not session.closed
            for group_id, session_ids in self._groups.items()
            if group_id not in self._gone and going.isdisjoint(session_ids)
            for session in (self._sessions[session_id] for session_id in session_ids)
        )

    def _going(
        self, group_id: str, sessions: Sequence[Session], caught_up: bool, now_s: float
    ) -> list[Member]:
        """The members with whom the group goes now; none while it waits."""
        rules = self._rules
        if (present := self._gone.get(group_id)) is not None:
            return [late for each in sessions if (late := each.left_behind(rules, present))]
        size = _size(group_id, sessions)
        overdue = caught_up and now_s - max(each.heard_at for each in sessions) > rules.group_wait_s
        if len(sessions) < (size or 0) and not overdue and rules.group_deadline_s is None:
            return []
        members = [member for each in sessions if (member := each.ended(rules))]
        whole = size is not None and len(members) >= size
        due = size is not None and caught_up and self._past_deadline(sessions, now_s)
        return members if whole or due or (overdue and len(members) == len(sessions)) else []

    def _past_deadline(self, sessions: Sequence[Session], now_s: float) -> bool:
        """Whether enough rollouts have waited long enough for the others. Only a reward starts the clock:
        members that failed at once say nothing of how long the others take."""
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

    def _settle(self, session_id: str) -> list[str]:
        """Let go of a session for good. Returns its entries."""
        session = self._sessions.pop(session_id)
        self._held.difference_update(session.entry_ids)
        self._settled[session_id] = None
        self._leave(session.group_id, session_id)
        return session.entry_ids

    def _leave(self, group_id: str, session_id: str) -> None:
        members = self._groups.get(group_id, set())
        members.discard(session_id)
        if not members:
            self._groups.pop(group_id, None)


def _size(group_id: str, sessions: Sequence[Session]) -> int | None:
    """What the group was made for; None when nobody said."""
    if _alone(group_id):
        return 1
    return max((session.group_size for session in sessions if session.group_size), default=None)


def _alone(group_id: str) -> bool:
    """Whether it is no group but that of a session without one."""
    return group_id.startswith(" ")


def _forget_oldest(kept: dict[str, Any], limit: int) -> None:
    while len(kept) > limit:
        del kept[next(iter(kept))]
