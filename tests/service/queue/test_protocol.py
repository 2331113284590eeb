"""Checks that no history of appends, reads, steps, checkpoints and crashes loses or repeats a turn.

Hypothesis generates the histories. Its long profile generates many more, and others in each run:

    pytest tests/service/queue/test_protocol.py --hypothesis-profile long
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import LeaseLost, SessionClosed, SessionDeleted, StorageUnavailable
from rollout_queue.contract.head import LIST_START, SessionHead
from rollout_queue.contract.packed_tokens import TrainedTokens
from rollout_queue.contract.published_policy import TrainedStep
from rollout_queue.contract.records import Outcome, Record, Reward, SessionSpec, Span, Status, Turn, Verdict
from rollout_queue.redis import consumer_scripts, key_names, session_deletion, stream_reader, turn_store
from rollout_queue.redis.lease import FencedScript
from rollout_queue.redis.lua import FENCED, Script
from rollout_queue.redis.stream_pages import Pages, RawEntry
from tests.support.hypothesis_profiles import LONG_EXAMPLES, long
from tests.support.queue.protocol import CALM, CUTS, Killed, Knife, System
from tests.support.queue.records import turn as made_turn
from tests.support.redis_clients import redis_at
from tests.support.redis_faults import break_script
from trainer_service import intake
from trainer_service.groups.acknowledgement import Acknowledgement
from trainer_service.intake import Acknowledger, Intake
from trainer_service.storage import checkpoint, durable_files, run_state
from trainer_service.storage.run_state import LedgerStep, RunState

LONG = long()
HISTORIES = settings(
    max_examples=LONG_EXAMPLES if LONG else 20,
    stateful_step_count=60 if LONG else 40,
    derandomize=not LONG,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
PHASES = (Phase.generate, Phase.shrink) if LONG else (Phase.generate,)
SHORT_LIVED_S, AFTER_THEM, AFTER_ALL = 10.0, 1e5, 1e13


@dataclass
class Known:
    """What the agents of one session were told: which turns are stored, and whether it ended or was
    deleted."""

    spec: SessionSpec
    turns: dict[str, Turn] = field(default_factory=dict)
    ended: bool = False
    deleted: bool = False
    scrubbed: bool = False


@dataclass(frozen=True)
class Stored:
    """What disk and Redis have between two actions."""

    trained: list[str]
    """The turns in the weights that a new trainer would restore."""
    ledger: list[LedgerStep]
    heads: dict[str, SessionHead]
    records: list[Record]
    waiting: list[Record]
    """The records that are pending or not delivered."""

    @property
    def owed(self) -> list[str]:
        return [record.turn_id for record in self.waiting if isinstance(record, Turn)]


class Protocol(RuleBasedStateMachine):
    """Rules for agents, a gateway, a trainer, and faults."""

    url: str
    knife: Knife
    sessions = Bundle("sessions")

    @initialize(checkpoint_every_steps=st.sampled_from([None, 1, 2, 3]), looks=st.integers(0, 3))
    def begin(self, checkpoint_every_steps: int | None, looks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.known: dict[str, Known] = {}
        self.buried: Counter[str] = Counter()
        """Verdicts that were counted for turns of sessions that were deleted later."""
        self.clock = 100.0
        self.system = System(self.url, self.knife, Path(self.folder.name), checkpoint_every_steps, looks)

    # Agents

    @rule(target=sessions, size=st.integers(1, 2), ttl_s=st.sampled_from([SHORT_LIVED_S, 1e9]))
    def open(self, size: int, ttl_s: float) -> Any:
        return multiple(*self._open(size, ttl_s))

    @rule(target=sessions)
    def play(self) -> Any:
        """Play two sessions that are trained unless a fault comes between."""
        return multiple(*self._play())

    @rule(session_id=sessions)
    def append(self, session_id: str) -> None:
        known, self.clock = self.known[session_id], self.clock + 1
        turn_id = f"{session_id}-t{len(known.turns)}"
        span = Span(self.system.fleet.versions[-1], 0, 2)
        fields = {"group_id": known.spec.group_id, "versions": (span,), "finished_at": self.clock}
        turn = made_turn(turn_id, session_id, **fields)
        try:
            self._append(turn, known)
        except SessionDeleted:
            assert known.deleted
        except SessionClosed:
            assert known.ended
        else:
            assert not known.ended
            assert not known.deleted
            known.turns[turn_id] = turn

    @rule(session_id=sessions)
    def append_again(self, session_id: str) -> None:
        """Answers were lost, so that this gateway or another repeats the appends."""
        known = self.known[session_id]
        for turn in known.turns.values():
            with pytest.raises(SessionDeleted) if known.deleted else nullcontext():
                self._append(turn, known)

    @rule(session_id=sessions, value=st.sampled_from([0.0, 1.0]), key=st.sampled_from(["a", "b"]))
    def reward(self, session_id: str, value: float, key: str) -> None:
        reward = Reward(session_id=session_id, value=value, key=key, created_at=self.clock)
        try:
            self.system.run(self.system.writer.append_reward(reward))
        except SessionDeleted:
            assert self.known[session_id].deleted

    @rule(
        session_id=sessions,
        value=st.sampled_from([None, 0.0, 1.0, 1.0]),
        status=st.sampled_from(["completed", "completed", "completed", "failed"]),
    )
    def finish(self, session_id: str, value: float | None, status: Status) -> None:
        known = self.known[session_id]
        outcome = Outcome(
            session_id=session_id,
            status=status,
            created_at=self.clock,
            group_id=known.spec.group_id,
            group_size=known.spec.group_size,
        )
        reward = (
            None
            if value is None
            else Reward(session_id=session_id, value=value, key="end", created_at=self.clock)
        )
        verdict = Verdict(code="failed") if status == "failed" else None
        try:
            self.system.run(self.system.writer.append_outcome(outcome, reward, verdict))
        except SessionDeleted:
            assert known.deleted
        else:
            known.ended = True

    @rule(session_id=sessions, dies=st.booleans())
    def delete(self, session_id: str, dies: bool) -> None:
        """The gateway may die before it has removed the session's records from the streams."""
        self._delete(session_id, dies)

    @rule()
    def scrub(self) -> None:
        self.system.run(self.system.deleter.finish(AFTER_ALL))
        for known in self.known.values():
            known.scrubbed = known.deleted

    @rule()
    def expire(self) -> None:
        self._expire(AFTER_THEM)

    @rule()
    def restart_gateway(self) -> None:
        self.system.restart_gateway()

    # The trainer

    @rule()
    def turn(self) -> None:
        before = self._learned_of_deleted()
        self.system.trainer.run_once()
        assert self._learned_of_deleted() == before

    @rule()
    def save(self) -> None:
        """An operator requests a checkpoint."""
        self.system.shared_state.request_checkpoint()
        self.system.trainer.run_once()

    @rule(target=sessions, place=st.sampled_from(CUTS), busy=st.booleans())
    def kill(self, place: str, busy: bool) -> Any:
        """The trainer dies at `place`, or at the end of this pass of its loop if it does not get there."""
        names = self._play() if busy else []
        with suppress(Killed), self.knife.ready(place, _die):
            self.system.trainer.run_once()
        self.system.start_trainer()
        return multiple(*names)

    @rule(place=st.sampled_from(["acknowledge", "acknowledge: done", "announce", "announce: done"]))
    def kill_at_start(self, place: str) -> None:
        with suppress(Killed), self.knife.ready(place, _die):
            self.system.start_trainer()
            return
        self.system.start_trainer()

    @rule(place=st.sampled_from(["read: done", "acknowledge: done"]))
    def lose_an_answer(self, place: str) -> None:
        """The connection breaks after Redis has run the command."""
        with self.knife.ready(place, _break):
            self.system.trainer.run_once()

    @rule(place=st.sampled_from(CALM), goes_on=st.booleans())
    def sleep_through_a_takeover(self, place: str, goes_on: bool) -> None:
        """A stopped process continues with late writes, after another has begun to train."""
        after: list[object] = []
        sleeper = self.system.trainer

        def take_over() -> None:
            self.system.start_trainer()
            if goes_on:
                self.system.trainer.run_once()
            after.append(self._seen_by_all())

        def sleep_and_go_on() -> None:
            sleeper.run_once()
            if not after:
                take_over()
            sleeper.run_once()

        with pytest.raises(LeaseLost), self.knife.ready(place, take_over):
            sleep_and_go_on()
        assert self._seen_by_all() == after[0]

    @rule(place=st.sampled_from(CUTS), session_id=sessions)
    def delete_meanwhile(self, place: str, session_id: str) -> None:
        """A session is deleted between two actions of the trainer."""
        with self.knife.ready(place, lambda: self._delete(session_id, False)):
            self.system.trainer.run_once()

    @invariant()
    def holds(self) -> None:
        stored = self._stored()
        self.nothing_is_lost_or_twice(stored)
        self.the_ledger_says_what_the_weights_contain(stored)
        self.what_taught_a_version_is_durable(stored)
        self.versions_grow()
        self.what_is_deleted_leaves_the_stream(stored)
        self.verdicts_are_counted_once(stored)

    # What must hold at any time

    def nothing_is_lost_or_twice(self, stored: Stored) -> None:
        assert _once(self.system.weights.trained), "trained twice, in memory"
        assert _once(stored.trained), "trained twice, in a checkpoint"
        assert _once(stored.owed), "twice in the stream"
        for session_id, known in self.known.items():
            if known.deleted:
                assert session_id not in stored.heads
                continue
            head = stored.heads[session_id]
            assert set(head.by_id) == set(known.turns)
            for turn_id in known.turns:
                verdict = head.turn_verdicts.get(turn_id) or head.verdict
                if verdict is None:
                    assert turn_id in stored.owed, f"{turn_id} is lost"
                else:
                    assert (verdict.code == "trained") == (turn_id in stored.trained), f"{turn_id}: {verdict}"

    def the_ledger_says_what_the_weights_contain(self, stored: Stored) -> None:
        assert [turn_id for row in stored.ledger for turn_id in row.turns] == stored.trained
        assert [row.step for row in stored.ledger] == list(range(1, len(stored.ledger) + 1))
        assert _grows([row.version for row in stored.ledger])

    def what_taught_a_version_is_durable(self, stored: Stored) -> None:
        """A turn has numbers if its verdict is `trained`, and they are those of the step that lasts. So have
        the steps and the index of their sessions."""
        versions = {turn_id: row.version for row in stored.ledger for turn_id in row.turns}
        taught: dict[str, int] = {}
        for session_id, head in stored.heads.items():
            own = {name for name, verdict in head.turn_verdicts.items() if verdict.code == "trained"}
            assert set(head.trained_tokens) == own
            for turn_id in own:
                numbers = TrainedTokens.unpack(head.trained_tokens[turn_id])
                assert numbers.advantage_mean == stored.trained.index(turn_id)
                taught[session_id] = versions[turn_id]
        redis: Any = self.system.redis
        indexed = redis.zrange(key_names.TRAINED, 0, -1, withscores=True)
        assert {name.decode(): int(version) for name, version in indexed} == taught
        steps = [msgspec.json.decode(each, type=TrainedStep) for each in redis.zrange(key_names.STEPS, 0, -1)]
        by_version = {row.version: row.step for row in stored.ledger}
        assert [by_version.get(each.version) for each in steps] == [each.step for each in steps]

    def versions_grow(self) -> None:
        told = [(each["version"], each["manifest_sha256"]) for each in self.system.fleet.announced]
        assert _grows([version for version, _ in dict.fromkeys(told)])

    def what_is_deleted_leaves_the_stream(self, stored: Stored) -> None:
        scrubbed = {name for name, known in self.known.items() if known.scrubbed}
        left = {each.session_id for each in stored.records if isinstance(each, Turn | Reward | Outcome)}
        assert not left & scrubbed

    def verdicts_are_counted_once(self, stored: Stored) -> None:
        found: Any = self.system.redis.hgetall(key_names.VERDICTS)
        counted = {name.decode(): int(count) for name, count in found.items()}
        expected = Counter(self.buried)
        for head in stored.heads.values():
            expected += _verdicts(head)
        expected["session:deleted"] += sum(known.deleted for known in self.known.values())
        assert +Counter(counted) == +expected

    def teardown(self) -> None:
        """End all sessions; then the trainer must settle every one."""
        if not hasattr(self, "system"):
            return
        try:
            self._expire(AFTER_ALL)
            self._train_all()
            assert not self._stored().waiting
            self.holds()
            assert all(head.verdict for head in self._heads().values()), "a session without an end"
        finally:
            self.system.close()
            self.folder.cleanup()

    # Inside

    def _train_all(self) -> None:
        for _ in range(4):
            self.system.shared_state.request_checkpoint()
            self.system.trainer.run_once()

    def _open(self, size: int, ttl_s: float) -> list[str]:
        """Open a group of this size. A single session has no group."""
        group = {"group_id": f"g{len(self.known)}", "group_size": size} if size > 1 else {}
        names = [f"s{len(self.known)}-{index}" for index in range(size)]
        for session_id in names:
            spec = SessionSpec(session_id=session_id, ttl_s=ttl_s, created_at=self.clock, **group)  # type: ignore[arg-type]
            self.system.run(self.system.writer.open_session(spec))
            self.known[session_id] = Known(spec)
        return names

    def _play(self) -> list[str]:
        """Play a group of two sessions with different rewards."""
        names = self._open(2, 1e9)
        for value, session_id in enumerate(names):
            self.append(session_id)
            self.finish(session_id, float(value), "completed")
        return names

    def _append(self, turn: Turn, known: Known) -> None:
        self.system.run(self.system.writer.append_turn(turn, turn.finished_at + known.spec.ttl_s))

    def _delete(self, session_id: str, dies: bool) -> None:
        known = self.known[session_id]
        head = self.system.run(self.system.writer.load(session_id))
        with pytest.MonkeyPatch.context() as patch:
            if dies:
                break_script(patch, self.system.async_redis, session_deletion.REMOVE_ENTRIES)
            tombstone = self.system.run(self.system.deleter.delete_session(session_id))
        assert (tombstone is None) == known.deleted
        if head is not None and tombstone is not None:
            assert tombstone.turns == len(known.turns)
            self.buried += Counter(f"turn:{verdict.code}" for verdict in head.turn_verdicts.values())
            known.deleted, known.scrubbed = True, not dies

    def _expire(self, now: float) -> None:
        self.system.run(self.system.writer.expire(now, 1000))
        for session_id, head in self._heads().items():
            self.known[session_id].ended = head.outcome is not None

    def _learned_of_deleted(self) -> set[str]:
        deleted = {t for known in self.known.values() if known.deleted for t in known.turns}
        return deleted & set(self.system.weights.trained)

    def _heads(self) -> dict[str, SessionHead]:
        listed = self.system.run(self.system.writer.sessions(LIST_START, 10**6))
        return {place.session_id: each for place, each in listed if isinstance(each, SessionHead)}

    def _stored(self) -> Stored:
        redis: Any = self.system.redis
        (group,) = redis.xinfo_groups(key_names.STREAM)
        delivered, pending = _place(group["last-delivered-id"]), set(self._pending())
        records, waiting = list[Record](), list[Record]()
        for entry_id, fields in redis.xrange(key_names.STREAM):
            records.append(decode(fields[key_names.STREAM_FIELD]))
            if entry_id in pending or _place(entry_id) > delivered:
                waiting.append(records[-1])
        return Stored(*self.system.durable(), self._heads(), records, waiting)

    def _pending(self) -> list[bytes]:
        redis: Any = self.system.redis
        found = redis.xpending_range(key_names.STREAM, key_names.GROUP, "-", "+", 10**6)
        return [each["message_id"] for each in found]

    def _seen_by_all(self) -> object:
        """All shared state that one trainer could damage for another."""
        redis: Any = self.system.redis
        return (
            self.system.durable(),
            self._pending(),
            redis.xinfo_groups(key_names.STREAM)[0]["last-delivered-id"],
            redis.hgetall(key_names.VERDICTS),
            len(self.system.fleet.announced),
        )


def _die() -> None:
    raise Killed


def _break() -> None:
    raise StorageUnavailable("the connection broke")


def _place(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


def _once(names: list[str]) -> bool:
    return len(names) == len(set(names))


def _grows(numbers: list[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


def _verdicts(head: SessionHead) -> Counter[str]:
    counted = Counter(f"turn:{verdict.code}" for verdict in head.turn_verdicts.values())
    if head.verdict is not None:
        counted[f"session:{head.verdict.code}"] += 1
    return counted


@pytest.fixture
def machine(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Protocol]]:
    """The protocol on this Redis, without waits and without syncs of the disk."""

    knife = Knife()

    def cut(path: Path, content: bytes) -> None:
        knife.at(path.name)
        durable_files.write_atomically(path, content)

    redis = redis_at(redis_url)
    redis.config_set("hz", 500)  # how often Redis checks whether a blocking read has timed out
    monkeypatch.setattr(checkpoint, "write_atomically", cut)
    monkeypatch.setattr(run_state, "write_atomically", cut)
    monkeypatch.setattr(intake, "BLOCK_S", 0.001)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield type("Protocol", (Protocol,), {"url": redis_url, "knife": knife})
    redis.config_set("hz", 10)
    redis.close()


@pytest.mark.hypothesis
@pytest.mark.timeout(36_000 if LONG else 600)
def test_no_history_loses_or_repeats_a_turn(machine: type[Protocol]) -> None:
    run_state_machine_as_test(machine, settings=HISTORIES)


def acknowledges_before_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    state = Intake.run_state

    def run_state(intake: Intake, *given: Any) -> RunState:
        made = state(intake, *given)
        intake.acknowledge()
        return made

    patch.setattr(Intake, "run_state", run_state)


def forgets_what_it_owes(patch: pytest.MonkeyPatch) -> None:
    contain = Acknowledger.contain
    patch.setattr(Acknowledger, "contain", lambda owing: contain(owing) and Acknowledgement([], {}, []))


def appends_as_often_as_asked(patch: pytest.MonkeyPatch) -> None:
    once = "if stored then return {before, before} end"
    text = turn_store.APPEND_TURN.text
    assert once in text
    patch.setattr(turn_store, "APPEND_TURN", Script[Any](text.replace(once, "")))


def has_no_fence(patch: pytest.MonkeyPatch) -> None:
    class UnfencedPages(Pages):
        """Reads with the token of the current holder."""

        def __init__(self, redis: Redis, token: str) -> None:
            super().__init__(redis, token)
            self.redis = redis

        def page(self, count: int, what: bytes) -> list[RawEntry] | None:
            fence: Any = self.redis.get(key_names.FENCE)
            return Pages(self.redis, fence.decode()).page(count, what)

    patch.setattr(stream_reader, "Pages", UnfencedPages)
    for name in ("CONFIRM", "READ", "DELIVERED_LAST", "ACKNOWLEDGE", "FREE", "SET_ASIDE", "REPORT"):
        script = getattr(consumer_scripts, name)
        assert script.text.startswith(FENCED)
        unfenced = FencedScript[Any]("")
        Script.__init__(unfenced, script.text.removeprefix(FENCED))
        patch.setattr(consumer_scripts, name, unfenced)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(acknowledges_before_the_checkpoint, marks=pytest.mark.long),
        pytest.param(forgets_what_it_owes, marks=pytest.mark.long),
        appends_as_often_as_asked,
        has_no_fence,
    ],
)
def test_a_planted_fault_is_found(
    machine: type[Protocol], fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, SessionClosed, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=settings(HISTORIES, phases=PHASES, max_examples=1000))
