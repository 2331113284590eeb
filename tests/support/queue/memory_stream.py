"""The stream in memory, for trainers and gateways in the test's own process."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
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
    ALL_SESSIONS,
    ListedSession,
    ListPosition,
    ListScope,
    SessionHead,
    Tombstone,
    after_position,
    late_join_of,
    position_of,
    tombstone_of,
    with_terms,
)
from rollout_queue.contract.outcomes import DELETED, check_rewards, expiry, related
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Deletion, Outcome, Record, Reward, SessionSpec, Turn, Verdict
from rollout_queue.contract.stream import NO_IMAGES, Entry, GroupMembers, Verdicts
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter

Groups = MutableMapping[str, tuple[int | None, str, set[str]]]
"""The size, owner and members of each group, by its id."""


def join_group(groups: Groups, spec: SessionSpec) -> None:
    """Add the session to its group, if it has one. Raises Conflict."""
    group_id = spec.group_id
    if group_id is None:
        return
    size, owner, members = groups.get(group_id, (spec.group_size, spec.owner, set()))
    if owner != spec.owner:
        raise GroupTaken(spec.shown_group)
    if size is not None and spec.group_size not in (None, size):
        raise Conflict(f"group {spec.shown_group} has size {size}")
    size = spec.group_size if size is None else size
    if size is not None and len(members) >= size:
        raise Conflict(f"group {spec.shown_group} has its {size} sessions already")
    groups[group_id] = (size, owner, members | {spec.session_id})


def may_describe(known: SessionHead | None, deadline: float | None, now: float) -> bool:
    """Whether the session is implicit and has not ended; see `StreamWriter.describe_session`."""
    if known is None or not known.spec.implicit or known.outcome is not None or known.verdict is not None:
        return False
    return deadline is not None and deadline > now


def members_of(groups: Groups, group_ids: Collection[str]) -> Mapping[str, GroupMembers]:
    known = {group_id: groups[group_id] for group_id in group_ids if group_id in groups}
    return {
        group_id: GroupMembers(size, frozenset(members)) for group_id, (size, _, members) in known.items()
    }


@dataclass(kw_only=True)
class MemoryImages:
    """The part of `MemoryStream` that has the images."""

    pngs: dict[str, bytes] = field(default_factory=dict)
    """By hash."""

    async def images(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return self.image_bytes(hashes)

    def image_bytes(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        return {sha256: self.pngs[sha256] for sha256 in hashes if sha256 in self.pngs}

    def keep_images(self, turn: Turn, images: Mapping[str, bytes]) -> None:
        """Store the bytes of the turn's images."""
        for image in turn.images:
            if image.sha256 in images:
                self.pngs.setdefault(image.sha256, images[image.sha256])

    def drop_images(self, heads: Iterable[SessionHead]) -> None:
        """Drop the images that none of these sessions shows."""
        shown = {image.sha256 for head in heads for turn in head.turns for image in turn.images}
        self.pngs = {sha256: png for sha256, png in self.pngs.items() if sha256 in shown}


@dataclass
class MemorySessionList:
    """The sessions and the tombstones, in any order of the list."""

    heads: dict[str, SessionHead] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    deleted_users: set[str] = field(default_factory=set)

    async def sessions(
        self,
        after: ListPosition,
        count: int,
        wanted: Callable[[SessionSpec], bool] = lambda _: True,
        scope: ListScope = ALL_SESSIONS,
    ) -> Sequence[ListedSession]:
        known: list[SessionHead | Tombstone] = [*self.heads.values(), *self.tombstones.values()]
        found = {position_of(each): each for each in known}
        positions = after_position(found, after, newest_first=scope.newest_first)[:count]
        shown = {
            each: None if isinstance(session, SessionHead) and not wanted(session.spec) else session
            for each, session in found.items()
        }
        return [ListedSession(each, shown[each]) for each in positions]

    async def tombstone(self, session_id: str) -> Tombstone | None:
        return self.tombstones.get(session_id)

    async def user_deleted(self, user: str) -> bool:
        return user in self.deleted_users


@dataclass(kw_only=True)
class MemorySteps:
    """The part of `MemoryStream` that has the durable steps and the reserved versions."""

    reserved: int = -1
    """The highest version that the trainer has reserved."""
    steps: dict[int, TrainedStep] = field(default_factory=dict)
    """By the version that each made."""

    def keep_steps(self, steps: Iterable[TrainedStep]) -> None:
        self.steps |= {step.version: step for step in steps}


def with_turn_verdict(head: SessionHead, turn_id: str, verdict: Verdict, tokens: bytes | None) -> SessionHead:
    """The head with a turn's verdict, and with what a step used of the turn's tokens, if it was trained."""
    trained = head.trained_tokens if tokens is None else {**head.trained_tokens, turn_id: tokens}
    verdicts = {**head.turn_verdicts, turn_id: verdict}
    return msgspec.structs.replace(head, turn_verdicts=verdicts, trained_tokens=trained)


@dataclass
class MemoryStream(  # type: ignore[misc] # it has neither client
    MemorySessionList, MemoryImages, MemorySteps, StreamWriter, StreamReader, StreamDeleter
):
    """Both ends of one stream, and what removes its sessions."""

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

    async def load(self, session_id: str, *, turns: bool = True) -> SessionHead | None:
        return self.heads.get(session_id)

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
