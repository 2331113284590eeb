"""A new trainer knows which sessions a dead one has given verdicts, even if no checkpoint says so, and leaves
none of their entries pending."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
from redis import Redis

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Outcome, Reward, SessionSpec, Verdict
from rollout_queue.memory import MemoryStream
from rollout_queue.redis import keys
from rollout_queue.redis.deletion import RedisDeleter
from rollout_queue.redis.reader import RedisReader
from rollout_queue.redis.retention import RedisForgetter
from rollout_queue.redis.writer import RedisWriter
from tests.support.claimed import claimed_reader
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.trainer_service.crash import Crash
from tests.support.trainer_service.harness import Harness, MakeHarness
from tests.support.trainer_service.redis_agents import NOBODY, RedisAgents
from weir.audit.audit import audit
from weir.audit.sources import Sources

ENDINGS = ("killed before a checkpoint", "killed after a checkpoint", "told to stop", "its disk was lost")


class Agents(RedisAgents):
    """Agents whose rewards and outcomes arrive late."""

    def reward(self, session_id: str, value: float) -> None:
        asyncio.run(self._late(Reward(session_id=session_id, value=value, key="more", created_at=104.0)))

    def finish(self, session_id: str, value: float, group: tuple[str, int]) -> None:
        where: dict[str, Any] = {"session_id": session_id, "created_at": 104.0}
        outcome = Outcome(status="completed", group_id=group[0], group_size=group[1], **where)
        asyncio.run(self._late(Reward(value=value, key="finish", **where), outcome))

    def delete(self, session_id: str) -> None:
        asyncio.run(self._delete(session_id))

    def open(self, session_id: str, group: tuple[str, int]) -> None:
        spec = SessionSpec(session_id=session_id, created_at=100.0, group_id=group[0], group_size=group[1])
        asyncio.run(self._open(spec))

    def forget(self) -> None:
        asyncio.run(self._forget())

    async def _open(self, spec: SessionSpec) -> None:
        async with async_redis_at(self._url) as redis:
            writer = RedisWriter(redis)
            await writer.open_session(spec)
            await writer.close()

    async def _forget(self) -> None:
        async with async_redis_at(self._url) as redis:
            assert (await RedisForgetter(redis).forget(0.0, 100)).due

    async def _late(self, reward: Reward, outcome: Outcome | None = None) -> None:
        async with async_redis_at(self._url) as redis:
            writer = RedisWriter(redis)
            if outcome is None:
                await writer.append_reward(reward)
            else:
                await writer.append_outcome(outcome, reward, None)
            await writer.close()

    async def _delete(self, session_id: str) -> None:
        async with async_redis_at(self._url) as redis:
            assert await RedisDeleter(redis).delete_session(session_id) is not None


class System:
    """Agents, and one trainer after the other, on a real Redis."""

    def __init__(self, make_harness: MakeHarness, redis: Redis, url: str) -> None:
        self.redis, self._url, self._make_harness = redis, url, make_harness
        self.agents = Agents(url)
        self._disk = "run"
        self.harness = self.start()

    def start(self, **algorithm: Any) -> Harness:
        stream = cast(MemoryStream, claimed_reader(self.redis))
        self.harness = self._make_harness(self._disk, stream=stream, algorithm=algorithm).start()
        return self.harness

    def ends(self, how: str) -> None:
        """End the trainer in one of the ways in `ENDINGS`, and start its successor."""
        if how == "told to stop":
            self.harness.save()
        if how == "its disk was lost":
            self._disk = "another"
        self.start()

    def verdict(self, session_id: str) -> tuple[str, str] | None:
        told: Any = self.redis.hget(keys.session(session_id), "verdict")
        return (json.loads(told)["code"], json.loads(told)["detail"]) if told else None

    def pending(self) -> int:
        """How many delivered entries are not acknowledged. Checks that all entries are delivered."""
        (group,) = cast(Any, self.redis.xinfo_groups(keys.STREAM))
        newest = cast(Any, self.redis.xinfo_stream(keys.STREAM))["last-generated-id"]
        assert group["last-delivered-id"] == newest
        return int(group["pending"])

    def findings(self) -> tuple[object, ...]:
        sources = Sources(self._url, NOBODY, checkpoint_dir=self.harness.settings.checkpoint_dir)
        return audit(sources, readings=1).findings


@pytest.fixture
def system(make_harness: MakeHarness, redis_url: str) -> Iterator[System]:
    with redis_at(redis_url) as redis:
        redis.flushdb()
        redis.hset(keys.POLICIES, "0", "{}")
        yield System(make_harness, redis, redis_url)


def settled_in_silence(system: System, how: str, late: str = "") -> None:
    """Group `flat` has equal rewards and gets its verdicts without a step. A further reward of the session
    `late` arrives after the trainer's last read and before these verdicts. Then the trainer ends."""
    if how == "killed after a checkpoint":
        system.agents.group("a", [1.0, 0.0])
        assert system.harness.trainer.run_once()
    system.agents.group("flat", [1.0, 1.0])
    acknowledge = system.harness.stream.acknowledge

    def just_too_late(*given: Any) -> None:
        if late:
            system.agents.reward(late, 0.5)
        acknowledge(*given)
        if how != "told to stop":
            raise Crash

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(system.harness.stream, "acknowledge", just_too_late)
        system.harness.trainer.run_once()
    assert all(system.verdict(member) is not None for member in ("flat-0", "flat-1"))
    system.ends(how)


@pytest.mark.parametrize("how", ENDINGS)
def test_a_reward_that_came_too_late_for_its_verdict_is_acknowledged_by_the_next_trainer(
    system: System, how: str
) -> None:
    settled_in_silence(system, how, late="flat-0")
    verdict = system.verdict("flat-0")
    assert not system.harness.trainer.run_once()
    assert system.pending() == 0
    assert system.verdict("flat-0") == verdict
    assert system.findings() == ()


def test_an_unknown_verdict_of_a_newer_build_counts_as_a_verdict(system: System) -> None:
    settled_in_silence(system, "killed before a checkpoint", late="flat-0")
    system.redis.hset(keys.session("flat-0"), "verdict", json.dumps({"code": "enlightened", "from": 2030}))
    system.redis.hset(keys.session("flat-1"), "verdict", b"\xff?")
    system.agents.reward("flat-0", 1.0)
    system.start()
    assert not system.harness.trainer.run_once()
    assert system.pending() == 0


@pytest.mark.parametrize("how", ENDINGS)
def test_repeated_entries_of_a_settled_session_are_acknowledged_and_not_trained(
    system: System, how: str
) -> None:
    system.agents.group("live", [1.0, 0.0])
    entries: Any = system.redis.xrange(keys.STREAM)
    assert system.harness.trainer.run_once()
    settled_in_silence(system, how)
    for _, fields in entries:
        system.redis.xadd(keys.STREAM, fields)
    assert not system.harness.trainer.run_once()
    assert system.pending() == 0
    assert system.redis.hget(keys.VERDICTS, "session:trained") in (b"2", b"4")


@pytest.mark.parametrize("how", ENDINGS)
def test_members_that_are_deleted_after_their_groups_end_leave_no_entries(system: System, how: str) -> None:
    settled_in_silence(system, how)
    for member in ("flat-0", "flat-1"):  # after the second, nothing is left of the group
        system.agents.delete(member)
        assert not system.harness.trainer.run_once()
        assert system.pending() == 0
        system.ends(how)
    assert system.redis.hget(keys.VERDICTS, "session:deleted") == b"2"
    assert system.findings() == ()


@pytest.mark.parametrize("deleted", [(), ("a", "b")])
def test_a_straggler_of_a_group_that_ended_without_a_step_is_late_after_a_crash_too(
    system: System, deleted: tuple[str, ...]
) -> None:
    """This also holds if only tombstones are left of the group's other members."""
    system.start(group_deadline_s=60.0)
    system.agents.episode("late", None, ("g", 3))
    for session_id in ("a", "b"):
        system.agents.episode(session_id, 1.0, ("g", 3))
    assert not system.harness.trainer.run_once()
    assert system.verdict("a") is not None
    for session_id in deleted:
        system.agents.delete(session_id)
    system.start(group_deadline_s=60.0)
    assert not system.harness.trainer.run_once()
    assert system.pending() == 2, "the two turns of the member that is still open"
    system.agents.finish("late", 1.0, ("g", 3))
    assert not system.harness.trainer.run_once()
    assert system.verdict("late") == ("group_incomplete", "its group went on without it")
    assert system.pending() == 0
    assert system.findings() == ()


def test_a_straggler_is_late_too_if_the_other_members_are_forgotten(system: System) -> None:
    system.start(group_deadline_s=60.0)
    system.agents.open("late", ("g", 3))
    for session_id in ("a", "b"):
        system.agents.episode(session_id, 1.0, ("g", 3))
    assert not system.harness.trainer.run_once()
    assert system.verdict("a") is not None
    system.agents.forget()
    assert system.verdict("a") is None
    system.start(group_deadline_s=60.0)
    system.agents.episode("late", 1.0, ("g", 3))
    assert not system.harness.trainer.run_once()
    assert system.verdict("late") == ("group_incomplete", "its group went on without it")
    assert system.pending() == 0


def test_a_member_with_a_gateways_verdict_counts_in_its_group(system: System) -> None:
    """The gateway gives the verdict before the trainer has read the session's records."""
    system.agents.episode("a", 1.0, ("g", 3))
    system.agents.episode("b", 0.0, ("g", 3))
    failed = Verdict(code="failed", detail="the agent said so")
    system.agents.episode("failed", None, ("g", 3), status="failed", verdict=failed)
    assert system.harness.trainer.run_once()
    assert system.verdict("a") == ("trained", "")
    assert system.pending() == 0


def test_a_group_without_a_size_begins_anew_when_members_come_later(system: System) -> None:
    def pair(*session_ids: str) -> None:
        for value, session_id in enumerate(session_ids):
            system.agents.episode(session_id, float(value), cast(Any, ("g", None)))

    system.start(group_wait_s=1.0)
    pair("a", "b")
    assert system.harness.trainer.run_once()
    system.start(group_wait_s=1.0)
    pair("c", "d")
    assert system.harness.trainer.run_once()
    assert [row.sessions for row in system.harness.checkpoints.ledger(0, 9)] == [["a", "b"], ["c", "d"]]


def test_an_entry_of_a_session_that_redis_lost_waits_like_one_of_a_new_session(system: System) -> None:
    settled_in_silence(system, "killed before a checkpoint", late="flat-0")
    system.redis.delete(keys.session("flat-0"))
    assert not system.harness.trainer.run_once()
    assert system.pending() == 1


def test_the_search_for_finished_sessions_waits_for_redis(system: System) -> None:
    settled_in_silence(system, "killed before a checkpoint", late="flat-0")
    reader = cast(RedisReader, system.harness.stream)
    calls: list[int] = []
    ask = reader.verdict_codes

    def away_once(session_ids: Any) -> Any:
        calls.append(len(session_ids))
        if len(calls) == 1:
            raise StorageUnavailable("Redis went")
        return ask(session_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "verdict_codes", away_once)
        assert not system.harness.trainer.run_once()
    assert calls == [1, 1]
    assert system.pending() == 0
