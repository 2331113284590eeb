"""The stream in a dictionary: for unit tests, held to the same behaviour as Redis by the same tests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollout_queue.codec import decode, decode_spec, encode
from rollout_queue.errors import Conflict, SessionClosed
from rollout_queue.head import SessionHead
from rollout_queue.records import Outcome, Record, Reward, SessionSpec, Turn, Verdict
from rollout_queue.redis_writer import expiry
from rollout_queue.stream import Entry, Verdicts


@dataclass
class MemoryStream:
    """Both ends of one stream: StreamWriter and StreamReader. Nothing outlives the process."""

    heads: dict[str, SessionHead] = field(default_factory=dict)
    groups: dict[str, tuple[int | None, str, set[str]]] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    continuations: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    trainer: dict[str, str | int | float] = field(default_factory=dict)
    _waiting: list[Entry] = field(default_factory=list)
    _pending: dict[str, Entry] = field(default_factory=dict)
    _written: int = 0

    # The gateways' end

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        if head := self.heads.get(spec.session_id):
            return head.spec, False
        if spec.group_id is not None:
            self._join(spec, spec.group_id)
        self.heads[spec.session_id] = SessionHead(spec=decode_spec(encode(spec)))
        self.deadlines[spec.session_id] = spec.created_at + spec.ttl_s
        return spec, True

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        if specs[0].group_id in self.groups:
            raise Conflict(f"group {specs[0].group_id} exists already")
        for spec in specs:
            await self.open_session(spec)

    async def load(self, session_id: str) -> SessionHead | None:
        return self.heads.get(session_id)

    async def sessions(self, start: int, count: int) -> Sequence[SessionHead]:
        by_age = sorted(self.heads.values(), key=lambda head: head.spec.created_at)
        return by_age[start : start + count]

    async def append_turn(self, turn: Turn, expires_at: float, owner: str = "") -> None:
        head = self.heads.get(turn.session_id)
        if head is not None and turn.turn_id in head.by_id:
            return
        if head is None or head.outcome is not None:
            raise SessionClosed(f"session {turn.session_id} is {'closed' if head else 'unknown'}")
        self._append(turn)
        self._change(turn.session_id, turns=(*head.turns, turn))
        self.deadlines[turn.session_id] = expires_at
        if turn.reply_digest:
            self.continuations[owner, turn.reply_digest] = turn.session_id

    async def find_continuation(self, owner: str, reply_digests: Sequence[str]) -> str | None:
        found = (self.continuations.get((owner, digest)) for digest in reply_digests)
        return next((session_id for session_id in found if session_id), None)

    async def append_reward(self, reward: Reward) -> Reward:
        head = self.heads[reward.session_id]
        for stored in head.rewards:
            if stored.key == reward.key:
                return stored
        if head.verdict is not None:
            reward = msgspec.structs.replace(reward, late=True)
        else:
            self._append(reward)
        self._change(reward.session_id, rewards=(*head.rewards, reward))
        return reward

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        head = self.heads[outcome.session_id]
        if head.outcome is not None:
            return head.outcome
        if reward is not None and all(stored.key != reward.key for stored in head.rewards):
            self._append(reward)
            self._change(outcome.session_id, rewards=(*head.rewards, reward))
        self._append(outcome)
        self._change(outcome.session_id, outcome=outcome)
        if verdict is not None:
            self._close(outcome.session_id, verdict)
        return outcome

    async def expire(self, now: float, limit: int) -> int:
        overdue = [s for s, deadline in self.deadlines.items() if deadline <= now][:limit]
        return sum(self._expire_one(session_id, now) for session_id in overdue)

    async def group_progress(self, group_id: str) -> tuple[int, int]:
        size, _, members = self.groups.get(group_id, (None, "", set()))
        ended = sum(self.heads[member].outcome is not None for member in members)
        return ended, size or len(members)

    # The trainer's end

    def reclaim(self) -> Iterator[Entry]:
        yield from list(self._pending.values())

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._pending.update((entry.entry_id, entry) for entry in taken)
        return taken

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        for session_id, verdict in verdicts.sessions.items():
            self._close(session_id, verdict)
        for (session_id, turn_id), verdict in verdicts.turns.items():
            known = self.heads[session_id].turn_verdicts
            self._change(session_id, turn_verdicts={**known, turn_id: verdict})
            self._count(f"turn:{verdict.code}")
        for entry_id in entry_ids:
            self._pending.pop(entry_id, None)

    def report(self, state: Mapping[str, str | int | float]) -> None:
        self.trainer.update(state)

    # Inside

    def _join(self, spec: SessionSpec, group_id: str) -> None:
        size, owner, members = self.groups.get(group_id, (spec.group_size, spec.owner, set()))
        if owner != spec.owner:
            raise Conflict(f"group {group_id} belongs to another client key")
        if size is not None and spec.group_size not in (None, size):
            raise Conflict(f"group {group_id} has size {size}")
        if size is None:
            size = spec.group_size
        if size is not None and len(members) >= size:
            raise Conflict(f"group {group_id} has its {size} sessions already")
        self.groups[group_id] = (size, owner, members | {spec.session_id})

    def _append(self, record: Record) -> None:
        self._written += 1
        self._waiting.append(Entry(f"{self._written}-0", decode(encode(record))))

    def _change(self, session_id: str, **fields: object) -> None:
        self.heads[session_id] = msgspec.structs.replace(self.heads[session_id], **fields)

    def _expire_one(self, session_id: str, now: float) -> bool:
        head = self.heads[session_id]
        del self.deadlines[session_id]
        if head.state == "finished":
            return False
        outcome, verdict = expiry(head.spec, now)
        self._append(outcome)
        self._change(session_id, outcome=head.outcome or outcome)
        self._close(session_id, verdict)
        return True

    def _close(self, session_id: str, verdict: Verdict) -> None:
        self._change(session_id, verdict=verdict)
        self._count(f"session:{verdict.code}")
        self.deadlines.pop(session_id, None)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
