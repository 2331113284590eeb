"""The stream in memory, for unit tests. The tests of the stream run over it and over Redis."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollout_queue import clock
from rollout_queue.contract.codec import decode, decode_spec, encode
from rollout_queue.contract.errors import (
    Conflict,
    GroupTaken,
    LeaseLost,
    SessionClosed,
    SessionDeleted,
    UserDeleted,
)
from rollout_queue.contract.head import (
    DeletionTotals,
    GroupProgress,
    SessionHead,
    Tombstone,
    deletion_totals,
    late_join_of,
    tombstone_of,
    with_terms,
)
from rollout_queue.contract.outcomes import DELETED, check_rewards, expiry, related
from rollout_queue.contract.records import Deletion, Outcome, Record, Reward, SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import NO_IMAGES, Entry, GroupMembers, Verdicts
from rollout_queue.memory_groups import join_group, may_describe, members_of, progress_of_group
from rollout_queue.memory_images import MemoryImages
from rollout_queue.memory_list import MemorySessionList
from rollout_queue.memory_steps import MemorySteps, with_turn_verdict


@dataclass
class MemoryStream(MemorySessionList, MemoryImages, MemorySteps):
    """StreamWriter, StreamReader and StreamDeleter of one stream."""

    groups: dict[str, tuple[int | None, str, set[str]]] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    described: set[str] = field(default_factory=set)
    continuations: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    trainer: dict[str, str | int | float] = field(default_factory=dict)
    taken_over: bool = False
    """A test sets this. The trainer's end then behaves as if another trainer had claimed the lease."""
    _waiting: list[Entry] = field(default_factory=list)
    _pending: dict[str, Entry] = field(default_factory=dict)
    _written: int = 0

    # The gateways' end

    async def close(self) -> None: ...
    async def ping(self) -> None: ...
    async def forget_deleted(self) -> None: ...
    async def retract_failed(self) -> None: ...

    async def open_session(self, spec: SessionSpec) -> tuple[SessionSpec, bool]:
        if head := self.heads.get(spec.session_id):
            return head.spec, False
        self._refuse_deleted(spec.session_id, spec.user)
        join_group(self.groups, spec)
        self.heads[spec.session_id] = SessionHead(spec=decode_spec(encode(spec)))
        self.deadlines[spec.session_id] = spec.created_at + spec.ttl_s
        return spec, True

    async def describe_session(
        self, spec: SessionSpec, now: float, *, counts: bool = False
    ) -> SessionSpec | None:
        session_id = spec.session_id
        if not may_describe(known := self.heads.get(session_id), self.deadlines.get(session_id), now):
            return known.spec if known else None
        self._refuse_deleted(session_id, spec.user)
        join_group(self.groups, spec)
        beaten_at = max(now, self.deadlines[session_id] - spec.ttl_s)
        self._change(session_id, spec=spec, beaten_at=beaten_at)
        self.deadlines[session_id] = beaten_at + spec.ttl_s
        self.described.add(session_id)
        if (late_join := late_join_of(spec, now)) is not None:
            self.append(late_join)
        return spec

    async def open_group(self, specs: Sequence[SessionSpec]) -> None:
        if (known := self.groups.get(str(specs[0].group_id))) is not None:
            _, owner, _ = known
            if owner != specs[0].owner:
                raise GroupTaken(specs[0].shown_group)
            raise Conflict(f"group {specs[0].shown_group} exists already")
        if specs[0].user in self.deleted_users:
            raise UserDeleted
        for spec in specs:
            await self.open_session(spec)

    async def load(self, session_id: str, *, turns: bool = True) -> SessionHead | None:
        return self.heads.get(session_id)

    async def spec_of(self, session_id: str) -> bytes | None:
        return encode(head.spec) if (head := self.heads.get(session_id)) else None

    async def load_for_call(self, session_id: str) -> SessionHead | None:
        return await self.load(session_id)

    async def append_turn(
        self,
        turn: Turn,
        expires_at: float,
        owner: str = "",
        opening: SessionSpec | None = None,
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> Turn:
        if opening is not None:
            await self.open_session(opening)
        head = self.heads.get(turn.session_id)
        if head is not None and turn.turn_id in head.by_id:
            return head.by_id[turn.turn_id]
        self._refuse_deleted(turn.session_id, turn.user)
        if head is None or head.outcome is not None:
            raise SessionClosed(f"session {turn.session_id} is {'closed' if head else 'unknown'}")
        turn = related(turn, head.turns)
        self.keep_images(turn, images)
        self.append(turn)
        self._change(turn.session_id, turns=(*head.turns, turn))
        if turn.session_id in self.described:
            expires_at = max(turn.finished_at, head.beaten_at) + head.spec.ttl_s
        self.deadlines[turn.session_id] = expires_at
        for digest in turn.continuation_digests:
            self.continuations[owner, digest] = turn.session_id
        return turn

    async def find_continuations(self, owner: str, digests: Sequence[str]) -> Sequence[str | None]:
        return [self.continuations.get((owner, digest)) for digest in digests]

    async def append_reward(self, reward: Reward) -> Reward:
        self._refuse_deleted(reward.session_id)
        head = self.heads[reward.session_id]
        for stored in head.rewards:
            if stored.key == reward.key:
                return stored
        check_rewards((*head.rewards, reward))
        if head.verdict is not None:
            reward = msgspec.structs.replace(reward, late=True)
        else:
            self.append(reward)
        self._change(reward.session_id, rewards=(*head.rewards, reward))
        return reward

    async def append_outcome(
        self, outcome: Outcome, reward: Reward | None, verdict: Verdict | None
    ) -> Outcome:
        self._refuse_deleted(outcome.session_id)
        head = self.heads[outcome.session_id]
        if head.outcome is not None:
            return head.outcome
        if outcome.session_id in self.described:
            outcome = with_terms(outcome, head.spec)
        if reward is not None and all(stored.key != reward.key for stored in head.rewards):
            check_rewards((*head.rewards, reward))
            self.append(reward)
            self._change(outcome.session_id, rewards=(*head.rewards, reward))
        self.append(outcome)
        self._change(outcome.session_id, outcome=outcome)
        if verdict is not None:
            self._close(outcome.session_id, verdict)
        return outcome

    async def expire(self, now: float, limit: int) -> int:
        overdue = [s for s, deadline in self.deadlines.items() if deadline <= now][:limit]
        return sum(self._expire_one(session_id, now) for session_id in overdue)

    async def group_progress(self, group_id: str) -> GroupProgress:
        return progress_of_group(self.groups, self.heads, group_id)

    async def heartbeat(self, session_id: str, now: float, at_least_s: float = 0.0) -> float:
        head = self.heads.get(session_id)
        if head is None or head.state != "open" or head.outcome is not None:
            raise SessionClosed(f"session {session_id} is {'finished' if head else 'unknown'}")
        self._change(session_id, beaten_at=now)
        expires_at = now + max(head.spec.ttl_s, at_least_s)
        self.deadlines[session_id] = max(self.deadlines[session_id], expires_at)
        return expires_at

    # The deleter

    async def delete_session(self, session_id: str) -> Tombstone | None:
        if (head := self.heads.pop(session_id, None)) is None:
            return None
        tombstone = tombstone_of(head, len(head.turns), len(head.rewards), clock.now())
        self.tombstones[session_id] = tombstone
        self.drop_images(self.heads.values())
        self.deadlines.pop(session_id, None)
        self.continuations = {key: name for key, name in self.continuations.items() if name != session_id}
        self._waiting = [entry for entry in self._waiting if entry.record.session_id != session_id]
        self._pending = {k: each for k, each in self._pending.items() if each.record.session_id != session_id}
        deletion = Deletion(
            session_id=session_id,
            created_at=tombstone.deleted_at,
            group_id=head.spec.group_id,
            group_size=head.spec.group_size,
        )
        self.append(deletion)
        self._recount("session", head.verdict, DELETED)
        return tombstone

    async def delete_user(self, user: str) -> DeletionTotals:
        self.deleted_users.add(user)
        named = [session_id for session_id, head in self.heads.items() if user in head.users]
        tombstones = [await self.delete_session(session_id) for session_id in named]
        return deletion_totals([tombstone for tombstone in tombstones if tombstone is not None])

    async def finish(self, now: float) -> int:
        return 0

    # The trainer's end

    def confirm(self) -> None:
        if self.taken_over:
            raise LeaseLost("another trainer has claimed the lease")

    def reclaim(self) -> Iterator[Entry]:
        self.confirm()
        yield from list(self._pending.values())

    def read(self, count: int, block_s: float) -> Sequence[Entry]:
        self.confirm()
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._pending.update((entry.entry_id, entry) for entry in taken)
        return taken

    def acknowledge(self, entry_ids: Sequence[str], verdicts: Verdicts) -> None:
        self.confirm()
        for session_id in verdicts.sessions.keys() & self.heads.keys():
            self._close(session_id, verdicts.sessions[session_id])
        for (session_id, turn_id), verdict in verdicts.turns.items():
            if (head := self.heads.get(session_id)) is not None:
                self._recount("turn", head.turn_verdicts.get(turn_id), verdict)
                tokens = verdicts.tokens.get((session_id, turn_id))
                self.heads[session_id] = with_turn_verdict(head, turn_id, verdict, tokens)
        self.keep_steps(verdicts.steps)
        for entry_id in entry_ids:
            self._pending.pop(entry_id, None)

    def verdict_codes(self, session_ids: Collection[str]) -> Mapping[str, str]:
        codes: dict[str, str] = {}
        for session_id in session_ids:
            if (tombstone := self.tombstones.get(session_id)) is not None:
                codes[session_id] = tombstone.verdict or "deleted"
            elif (head := self.heads.get(session_id)) is not None and head.verdict is not None:
                codes[session_id] = head.verdict.code
        return codes

    def group_members(self, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
        return members_of(self.groups, group_ids)

    def reserve(self, version: int, location: str) -> int:
        self.confirm()
        before, self.reserved = self.reserved, max(self.reserved, version)
        return before

    def report(self, state: Mapping[str, str | int | float]) -> None:
        self.confirm()
        self.trainer.update(state)

    def _refuse_deleted(self, session_id: str, user: str | None = None) -> None:
        if session_id in self.tombstones:
            raise SessionDeleted(session_id)
        if user in self.deleted_users:
            raise UserDeleted

    def append(self, record: Record) -> None:
        """Append an entry without looking at its session. Tests use it for records that come too late."""
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
        self.append(outcome)
        self._change(session_id, outcome=head.outcome or outcome)
        self._close(session_id, verdict)
        return True

    def _close(self, session_id: str, verdict: Verdict) -> None:
        self._recount("session", self.heads[session_id].verdict, verdict)
        self._change(session_id, verdict=verdict)
        self.deadlines.pop(session_id, None)

    def _recount(self, kind: str, before: Verdict | None, now: Verdict) -> None:
        if before is not None:
            self.counts[f"{kind}:{before.code}"] -= 1
        self.counts[f"{kind}:{now.code}"] = self.counts.get(f"{kind}:{now.code}", 0) + 1
