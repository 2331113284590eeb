"""One trainer reads the stream: which one may claim the lease, and how the fence stops a former holder."""

import os
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.codec import SCHEMA, encode
from rollout_queue.contract.errors import LeaseLost, StorageUnavailable
from rollout_queue.contract.records import Outcome
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import consumer_scripts, key_names
from rollout_queue.redis.lease import Holder, Lease
from rollout_queue.redis.settings import Replication
from rollout_queue.redis.stream_reader import PAGE, StreamReader
from tests.support.claimed import claimed_reader
from tests.support.queue.ends import NOTHING, TRAINED
from tests.support.redis_clients import redis_at
from tests.support.redis_faults import break_script
from tests.support.redis_process import RedisProcess
from tests.support.turned_clock import TurnedClock
from tests.support.waiting import wait_until


def claimed(redis: Redis, lease_s: float = 30.0) -> Lease:
    lease = Lease(redis, lease_s)
    assert lease.claim() is None
    return lease


def append(redis: Redis, *names: str) -> list[str]:
    written: list[Any] = [
        redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(ended(name))}) for name in names
    ]
    return [entry_id.decode() for entry_id in written]


def ended(session_id: str) -> Outcome:
    return Outcome(session_id=session_id, status="completed", created_at=1.0)


def names(reader: StreamReader, count: int = 1000) -> list[str]:
    return [entry.record.session_id for entry in reader.read(count, 0.01)]


def letters(redis: Redis) -> list[dict[bytes, bytes]]:
    raw: Any = redis.xrange(key_names.DEAD_LETTERS)
    return [fields for _, fields in raw]


def owed(redis: Redis) -> int:
    pending: Any = redis.xpending(key_names.STREAM, key_names.GROUP)
    return int(pending["pending"])


def test_a_number_is_reserved_once_a_replica_has_it(redis: Redis, tmp_path: Path) -> None:
    """Otherwise a failover would give it to other weights."""
    lease, replication = claimed(redis), Replication(1, 0.1)
    with pytest.raises(StorageUnavailable, match="0 of 1 replicas"):
        StreamReader(redis, lease.token, replication=replication).reserve(1, "file:///1")
    with closing(RedisProcess(tmp_path / "master").start()) as master:
        reader = StreamReader(master.client, claimed(master.client).token, replication=Replication(1, 60.0))
        with closing(RedisProcess(tmp_path / "replica").start()) as replica:
            replica.client.replicaof("127.0.0.1", str(master.port))
            wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up")
            assert reader.reserve(1, "file:///1") < 1
            assert replica.client.hget(key_names.RESERVED, "version") == b"1"


# Who may claim


def test_a_lease_has_one_holder_who_says_where_it_runs_until_it_is_let_go(redis: Redis) -> None:
    first = claimed(redis)
    held = Lease(redis, 30.0).claim()
    assert held is not None
    assert held.holder == first.holder
    assert f":{os.getpid()}, since 20" in str(held.holder)
    assert 1 < held.expires_in_s <= 30
    first.release()
    claimed(redis)


def test_a_lease_that_is_not_renewed_runs_out(redis: Redis) -> None:
    first = claimed(redis, 60.0)
    redis.pexpire(key_names.LEASE, 30_000)  # half of the lease passes, by Redis' clock
    first.renew()
    assert 30_000 < int(redis.pttl(key_names.LEASE)) <= 60_000
    assert Lease(redis, 30.0).claim() is not None
    redis.pexpire(key_names.LEASE, 1)
    wait_until(lambda: not redis.exists(key_names.LEASE))
    claimed(redis)


def test_a_holder_who_slept_takes_its_lease_again_if_nobody_else_did(redis: Redis) -> None:
    lease = claimed(redis)
    reader = StreamReader(redis, lease.token)
    redis.delete(key_names.LEASE)
    append(redis, "a")
    assert names(reader) == ["a"]
    lease.renew()
    assert Lease(redis, 30.0).claim() is not None


def test_a_holder_who_slept_has_lost_it_even_to_one_who_has_ended(redis: Redis) -> None:
    slept = claimed(redis)
    redis.delete(key_names.LEASE)
    other = claimed(redis)
    slept.release()
    assert Lease(redis, 30.0).claim() is not None, "only its holder lets a lease go"
    other.release()
    with pytest.raises(LeaseLost):
        slept.renew()
    assert not redis.exists(key_names.LEASE)


def test_a_process_on_another_machine_is_never_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Holder.here()
    ended = msgspec.structs.replace(here, born="never")
    assert (here.dead, ended.dead) == (False, True)
    assert not msgspec.structs.replace(ended, place="another boot").dead
    monkeypatch.setattr("rollout_queue.redis.lease.BOOT", tmp_path / "none")
    unknown = msgspec.structs.replace(Holder.here(), born="never")
    assert not unknown.dead, "where the system tells no boot from another"


def test_a_lease_that_nobody_can_read_keeps_others_off_until_it_runs_out(redis: Redis) -> None:
    redis.set(key_names.LEASE, b"\xffsomebody", px=30_000)
    assert Lease(redis, 30.0).claim() is not None
    redis.pexpire(key_names.LEASE, 1)
    wait_until(lambda: not redis.exists(key_names.LEASE))
    claimed(redis)


# What the fence refuses


@pytest.fixture
def late(redis: Redis) -> StreamReader:
    """The reader of a trainer that has read "a", and slept while another trainer claimed the lease."""
    redis.hset(key_names.session("a"), "spec", b"")
    first = claimed(redis)
    reader = StreamReader(redis, first.token)
    append(redis, "a")
    assert names(reader) == ["a"]
    redis.delete(key_names.LEASE)
    claimed(redis)
    append(redis, "b")
    return reader


def test_a_former_holder_reads_nothing(late: StreamReader, redis: Redis) -> None:
    with pytest.raises(LeaseLost, match="another trainer"):
        late.read(10, 0.01)
    with pytest.raises(LeaseLost):
        list(late.reclaim())
    assert owed(redis) == 1


def test_a_former_holder_acknowledges_and_writes_nothing(late: StreamReader, redis: Redis) -> None:
    pending: Any = redis.xpending(key_names.STREAM, key_names.GROUP)
    read = [pending["min"].decode()]
    writes: list[Callable[[], object]] = [
        lambda: late.acknowledge(read, Verdicts({"a": TRAINED}, {("a", "t"): TRAINED})),
        lambda: late.report({"version": 7}),
        lambda: late.reserve(7, "file:///7"),
        late.confirm,
    ]
    for write in writes:
        with pytest.raises(LeaseLost):
            write()
    assert owed(redis) == 1
    assert redis.hkeys(key_names.session("a")) == [b"spec"]
    assert not redis.exists(key_names.VERDICTS, key_names.TRAINER, key_names.RESERVED)
    assert redis.xlen(key_names.STREAM) == 2


def test_a_trainer_that_was_stopped_while_it_waited_for_news_takes_none(redis: Redis) -> None:
    reader = StreamReader(redis, claimed(redis).token)

    def news(*_: object, **__: object) -> bool:
        redis.delete(key_names.LEASE)
        claimed(redis)
        append(redis, "a")
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis, "xread", news)
        with pytest.raises(LeaseLost):
            reader.read(10, 0.01)
    assert owed(redis) == 0


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_claim_between_the_look_at_the_fence_and_the_read_is_seen(
    redis: Redis, taken_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = StreamReader(redis, claimed(redis).token)
    append(redis, "a")
    connect, answers = redis.connection_pool.get_connection, list[Any]()

    def connect_and_sleep() -> Any:
        """The reader checks the fence in its first two answers; then it sleeps."""
        monkeypatch.setattr(redis.connection_pool, "get_connection", connect)
        connection: Any = connect()
        read = connection.read_response

        def read_and_sleep() -> Any:
            answers.append(read())
            if len(answers) == 2:
                redis.delete(key_names.LEASE)
                redis.set(key_names.FENCE, b"another's" if taken_over else answers[1])
            return answers[-1]

        monkeypatch.setattr(connection, "read_response", read_and_sleep)
        return connection

    monkeypatch.setattr(redis.connection_pool, "get_connection", connect_and_sleep)
    with pytest.raises(LeaseLost) if taken_over else nullcontext():
        assert names(reader) == ["a"]
    assert owed(redis) == (0 if taken_over else 1)


# What does not stop the reader


@pytest.mark.parametrize("lost", ["the group", "the stream"])
def test_a_reader_goes_on_where_it_was_when_its_group_is_lost(redis: Redis, lost: str) -> None:
    """What was pending is found again, and what was acknowledged, the last entry included, is not."""
    reader = claimed_reader(redis)
    first, _, last = append(redis, "a", "b", "c")
    assert names(reader) == ["a", "b", "c"]
    reader.acknowledge([first, last], NOTHING)
    assert redis.xlen(key_names.STREAM) == 2, "the last delivered entry stays"
    if lost == "the group":
        redis.xgroup_destroy(key_names.STREAM, key_names.GROUP)
    else:
        redis.delete(key_names.STREAM)
        last_ms = int(last.partition("-")[0])
        wait_until(lambda: redis.time()[0] * 1000 + redis.time()[1] // 1000 > last_ms)  # ids go on from there
    append(redis, "d")
    with pytest.raises(StorageUnavailable):
        names(reader)
    found = [entry.record.session_id for entry in reader.reclaim()] + names(reader)
    assert found == (["b", "d"] if lost == "the group" else ["d"])
    assert owed(redis) == len(found)
    assert names(claimed_reader(redis)) == []


@pytest.mark.parametrize("ran_out", [False, True])
def test_a_lost_fence_is_written_again_by_the_trainer_whose_lease_had_not_run_out(
    redis: Redis, turned: TurnedClock, ran_out: bool
) -> None:
    lease = claimed(redis, 30.0)
    reader = StreamReader(redis, lease.token)
    append(redis, "a")
    redis.delete(key_names.FENCE, key_names.LEASE)
    with pytest.raises(StorageUnavailable, match="weir:trainer_fence"):
        names(reader)
    turned.turn(31.0 if ran_out else 10.0)
    with pytest.raises(LeaseLost, match="start this one again") if ran_out else nullcontext():
        lease.renew()
    with pytest.raises(LeaseLost) if ran_out else nullcontext():
        assert [entry.record.session_id for entry in reader.reclaim()] + names(reader) == ["a"]


def test_news_is_heard_while_waiting(redis: Redis) -> None:
    reader = claimed_reader(redis)
    append(redis, "a")
    assert names(reader) == ["a"]
    assert names(reader) == []
    with redis_at("redis://{host}:{port}/{db}".format(**redis.get_connection_kwargs())) as other:
        xread = redis.xread

        def waits(*given: Any, **named: Any) -> Any:
            append(other, "b")  # after the reader has found nothing and before it waits
            return xread(*given, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis, "xread", waits)
            started = time.monotonic()
            assert [entry.record.session_id for entry in reader.read(10, 60.0)] == ["b"]
    assert time.monotonic() - started < 30, "it did not wait for the time that it was given"


def test_a_read_stops_short_only_where_there_is_no_more(redis: Redis) -> None:
    reader = claimed_reader(redis)
    written = [f"s{number}" for number in range(2 * PAGE + 10)]
    append(redis, *written[:PAGE])
    redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b""})
    append(redis, *written[PAGE:])
    assert names(reader, PAGE + 10) == written[: PAGE + 10]
    assert names(reader) == written[PAGE + 10 :]
    assert [entry.record.session_id for entry in reader.reclaim()] == written


@pytest.mark.parametrize(
    "packed",
    [
        b"\x02" + encode(ended("newer"))[1:],
        b"\xffgarbage",
        bytes([SCHEMA]) + b"\xc1",
        bytes([SCHEMA]) + b"\x81\xa4type\xa7unknown",
        bytes([SCHEMA]) + b"\x82\xa4type\xa4turn\xa8sampling\x81\xa4used\x81\xa1a" + b"\x91" * 100_000,
        b"",
        encode(ended("cut"))[:-3],
    ],
    ids=["schema 2", "garbage", "no MessagePack", "unknown tag", "deeply nested", "empty", "cut short"],
)
def test_what_nobody_can_read_is_set_aside_and_stops_nothing(redis: Redis, packed: bytes) -> None:
    reader = claimed_reader(redis)
    append(redis, "before")
    poison: Any = redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: packed})
    append(redis, "after")
    assert names(reader) == ["before", "after"]
    (letter,) = letters(redis)
    assert (letter[key_names.STREAM_FIELD], letter[b"entry"]) == (packed, poison)
    assert letter[b"error"]
    reader.acknowledge([entry.entry_id for entry in reader.reclaim()], NOTHING)
    assert owed(redis) == 0
    assert redis.xlen(key_names.STREAM) == 1  # the last delivered entry stays in the stream


def test_an_entry_that_is_none_of_ours_is_set_aside_whole(redis: Redis) -> None:
    reader = claimed_reader(redis)
    redis.xadd(key_names.STREAM, {b"who": b"me", b"what": b"\x00"})
    assert names(reader) == []
    (letter,) = letters(redis)
    assert (letter[b"who"], letter[b"what"]) == (b"me", b"\x00")


@pytest.fixture
def unread(redis: Redis) -> tuple[Lease, StreamReader, str]:
    """A trainer with its reader, and two entries that were delivered to it: a sound one, and one of a newer
    build, whose id is given."""
    lease = claimed(redis)
    reader = StreamReader(redis, lease.token)
    append(redis, "sound")
    newer: Any = redis.xadd(key_names.STREAM, {key_names.STREAM_FIELD: b"\x02newer"})
    redis.xreadgroup(key_names.GROUP, key_names.CONSUMER, {key_names.STREAM: ">"})
    return lease, reader, newer


def test_an_unreadable_entry_is_set_aside_once(redis: Redis, unread: tuple[Lease, StreamReader, str]) -> None:
    """Also one that was delivered before, and if the answer to the first attempt was lost."""
    _, reader, _ = unread
    twice = [reader.reclaim(), reader.reclaim()]
    (read, _) = [next(entries) for entries in twice]
    assert [list(entries) for entries in twice] == [[], []]
    reader.acknowledge([read.entry_id], NOTHING)
    assert [letter[key_names.STREAM_FIELD] for letter in letters(redis)] == [b"\x02newer"]
    assert owed(redis) == 0


def test_an_unreadable_entry_that_was_deleted_meanwhile_is_not_set_aside(
    redis: Redis, unread: tuple[Lease, StreamReader, str]
) -> None:
    _, reader, newer = unread
    entries = reader.reclaim()
    next(entries)
    redis.xdel(key_names.STREAM, newer)
    assert list(entries) == []
    assert not letters(redis)


def test_a_former_holder_sets_nothing_aside(redis: Redis, unread: tuple[Lease, StreamReader, str]) -> None:
    entries = unread[1].reclaim()
    next(entries)
    redis.delete(key_names.LEASE)
    claimed(redis)
    with pytest.raises(LeaseLost):
        list(entries)
    assert not letters(redis)
    assert owed(redis) == 2


def test_entries_that_were_deleted_are_no_longer_owed(redis: Redis) -> None:
    reader = claimed_reader(redis)
    first, *_, last = append(redis, *(f"s{number}" for number in range(PAGE + 5)))
    names(reader)
    redis.xdel(key_names.STREAM, first, last)
    assert len(list(reader.reclaim())) == PAGE + 3
    assert owed(redis) == PAGE + 3
    reader.acknowledge([], NOTHING)
    assert redis.xlen(key_names.STREAM) == PAGE + 3


def test_one_entry_that_nobody_acknowledges_keeps_no_later_ones(redis: Redis) -> None:
    """A session of days, beside millions of short ones."""
    reader = claimed_reader(redis)
    straggler, *others = append(redis, *(f"s{number}" for number in range(2 * PAGE + 5)))
    names(reader)
    for first in range(0, len(others), PAGE):
        reader.acknowledge(others[first : first + PAGE], NOTHING)
    assert [entry.entry_id for entry in reader.reclaim()] == [straggler]
    assert redis.xlen(key_names.STREAM) == 2  # the last delivered entry stays in the stream
    append(redis, "new")
    assert names(reader) == ["new"]


def test_a_trim_that_fails_repeats_nothing(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    redis.hset(key_names.session("a"), "spec", b"")
    reader = claimed_reader(redis)
    entry_ids = append(redis, "a", "b", "c")
    names(reader)

    with pytest.MonkeyPatch.context() as patch:
        break_script(patch, redis, consumer_scripts.FREE)
        reader.acknowledge(entry_ids[:2], Verdicts({"a": TRAINED}, {}))
    assert "stay in the stream" in caplog.text
    assert redis.xlen(key_names.STREAM) == 3
    assert redis.hgetall(key_names.VERDICTS) == {b"session:trained": b"1"}
    reader.acknowledge(entry_ids[2:], NOTHING)
    assert redis.xlen(key_names.STREAM) == 1


def test_a_large_acknowledgement_is_one(redis: Redis) -> None:
    reader = claimed_reader(redis)
    count = 8_200  # more values than Lua hands over at once
    with redis.pipeline(transaction=False) as pipeline:
        for number in range(count):
            pipeline.hset(key_names.session(f"s{number}"), "spec", b"")
            pipeline.xadd(key_names.STREAM, {key_names.STREAM_FIELD: encode(ended(f"s{number}"))})
        pipeline.execute()
    entries = reader.read(count, 0.01)
    assert len(entries) == count
    verdicts = Verdicts({entry.record.session_id: TRAINED for entry in entries}, {})
    reader.acknowledge([entry.entry_id for entry in entries], verdicts)
    assert owed(redis) == 0
    assert redis.hgetall(key_names.VERDICTS) == {b"session:trained": str(count).encode()}


def test_a_write_that_redis_refuses_is_storage_unavailable(redis: Redis) -> None:
    reader = claimed_reader(redis)
    redis.set(key_names.TRAINER, b"no hash")
    with pytest.raises(StorageUnavailable, match="WRONGTYPE"):
        reader.report({"version": 7})


def test_a_redis_that_is_away_is_storage_unavailable() -> None:
    with Redis.from_url("redis://127.0.0.1:1/0") as nobody, pytest.raises(StorageUnavailable):
        Lease(nobody, 30.0).claim()
