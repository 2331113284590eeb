"""Which answered writes a real Redis keeps when it is killed, when it loses power, and when it is full."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from redis import Redis

from rollout_queue.contract.codec import decode
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.packed_tokens import Logprobs, TokenIds
from rollout_queue.contract.records import Outcome, Reward, Span, Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.lease import Lease
from rollout_queue.redis.losses import losses_in
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at, redis_at
from tests.support.redis_process import RedisProcess
from tests.support.serving import NOBODY
from weir.audit.audit import audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources

OUTPUT = 20
TOKENS = list(range(300))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    redis = RedisProcess(tmp_path / "redis").start()
    redis.client.hset(key_names.POLICIES, "0", "{}")
    yield redis
    redis.close()


def long_turn(session_id: str, number: int, context: list[int] = TOKENS) -> Turn:
    return turn(
        f"{session_id}-t{number}",
        session_id,
        context_ids=TokenIds(context),
        output_ids=TokenIds(TOKENS[:OUTPUT]),
        logprobs=Logprobs([-0.5] * OUTPUT),
        versions=(Span(0, 0, OUTPUT),),
        started_at=100.0 + number,
        finished_at=101.0 + number,
    )


class Heard(NamedTuple):
    """One answer to a client, and the length of Redis' file at that time."""

    answer: ClientAnswer
    written: int


async def talk(redis: RedisProcess, sessions: int) -> list[Heard]:
    """Write sessions one after another, as a gateway does; return the answers that its clients would get."""
    connection = async_redis_at(redis.url)
    writer, heard = StreamWriter(connection), list[Heard]()

    def told(session_id: str, **what: Any) -> None:
        heard.append(Heard(ClientAnswer(session_id, **what), redis.written))

    for session_id in (f"s{number}" for number in range(sessions)):
        await writer.open_session(spec(session_id))
        told(session_id)
        for number in range(2):
            await writer.append_turn(long_turn(session_id, number), expires_at=1e12)
            told(session_id, turn_id=f"{session_id}-t{number}")
        await writer.append_outcome(outcome(session_id), reward("finish", session_id), None)
        told(session_id, reward_key="finish", finished=True)
    await writer.close()
    await connection.aclose()
    return heard


def fields_in_stream(redis: Redis) -> list[tuple[str, str]]:
    entries: Any = redis.xrange(key_names.STREAM)
    records = [decode(fields[key_names.STREAM_FIELD]) for _, fields in entries]
    found = []
    for record in records:
        name = "outcome"
        if isinstance(record, Turn):
            name = f"t:{record.turn_id}"
        elif isinstance(record, Reward):
            name = f"r:{record.key}"
        found.append((record.session_id, name))
    return found


def fields_of_heads(redis: Redis) -> list[tuple[str, str]]:
    heads: Any = {key: redis.hkeys(key) for key in redis.scan_iter(key_names.session("*"))}
    return [
        (key.decode().removeprefix(key_names.session("")), field.decode())
        for key, fields in heads.items()
        for field in fields
        if field not in (b"spec", b"magnitude", b"turns") and not field.startswith(b"e:")
    ]


def audited(redis: RedisProcess, directory: Path, heard: list[Heard]) -> set[str]:
    """The subjects of the audit's findings, without a trainer."""
    directory.mkdir(exist_ok=True)
    sources = Sources(redis.url, NOBODY, checkpoint_dir=directory)
    report = audit(sources, [each.answer for each in heard], readings=1)
    assert {finding.rule for finding in report.findings} <= {"answered"}
    return {finding.subject for finding in report.findings}


def subjects(answer: ClientAnswer, session_there: bool) -> list[str]:
    """The subjects that the audit must name for an answer that is lost."""
    gone = [] if session_there else [f"session {answer.session_id}"]
    return gone + [f"session {answer.session_id} {field}" for field in answer.fields]


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_killed_redis_keeps_all_that_it_answered(redis: RedisProcess, tmp_path: Path, end: str) -> None:
    heard = asyncio.run(talk(redis, 10))
    if end == "kill":
        redis.kill()
    else:
        assert redis.terminate() == 0
    redis.start()
    assert audited(redis, tmp_path / "none", heard) == set()


def test_wherever_a_power_cut_ends_the_file_heads_and_stream_tell_one_story(
    redis: RedisProcess, tmp_path: Path
) -> None:
    """Cut through every kind of append, from the end backwards. The cut records are gone from heads and
    stream, and the audit names them."""
    heard = asyncio.run(talk(redis, 3))
    last = heard[-5:]
    cuts = [last[0].written]
    for before, after in pairwise(last):
        length = after.written - before.written
        cuts += [before.written + length // 3, after.written - 1, after.written]
    for cut in sorted(set(cuts), reverse=True):
        redis.terminate()
        redis.cut(cut)
        redis.start()
        assert sorted(fields_of_heads(redis.client)) == sorted(fields_in_stream(redis.client))
        there = {each.answer.session_id for each in heard if each.written <= cut}
        gone = [each.answer for each in heard if each.written > cut]
        expected = {said for each in gone for said in subjects(each, each.session_id in there)}
        assert audited(redis, tmp_path / "none", heard) == expected, cut
    assert expected, "something was cut"


def test_after_a_power_cut_both_ends_go_on_by_themselves(redis: RedisProcess, tmp_path: Path) -> None:
    """Gateway and trainer are not restarted. The gateway's cache has a turn that Redis lost, and the next
    turn must not extend that turn."""

    async def gateway() -> None:
        client = async_redis_at(redis.url)
        writer = StreamWriter(client)
        await writer.open_session(spec("s"))
        await writer.append_turn(long_turn("s", 0), expires_at=1e12)
        assert reader.read(10, 0.1)
        kept = redis.written
        assert await writer.load_for_call("s")
        await writer.append_turn(long_turn("s", 1), expires_at=1e12)
        assert len(reader.read(10, 0.1)) == 1
        redis.kill()
        redis.cut(kept)
        redis.start()
        await writer.append_reward(
            reward("finish", "s")
        )  # so that the session has as many fields as before the cut
        head = await writer.load_for_call("s")
        assert head is not None
        assert [each.turn_id for each in head.turns] == ["s-t0"]
        await writer.append_turn(long_turn("s", 2), expires_at=1e12)
        await writer.append_outcome(outcome("s"), None, None)
        await writer.close()
        await client.aclose()

    with redis_at(redis.url) as client:
        lease = Lease(client, 1000.0)
        assert lease.claim() is None
        reader = StreamReader(client, lease.token)
        asyncio.run(gateway())
        told = [entry.record for entry in reader.read(10, 0.1)]
    assert [getattr(record, "turn_id", None) for record in told if isinstance(record, Turn)] == ["s-t2"]
    assert [type(record) for record in told] == [Reward, Turn, Outcome]
    assert audited(redis, tmp_path / "none", []) == set()


# Full


def test_a_trainer_that_has_read_more_than_redis_knows_says_so(redis: RedisProcess) -> None:
    client = redis.client
    lease = Lease(client, 1000.0)
    lease.claim()
    reader = StreamReader(client, lease.token)
    asyncio.run(talk(redis, 1))
    assert reader.read(1000, 0.1)
    before = redis.written
    asyncio.run(talk(redis, 2))
    assert reader.read(1000, 0.1)
    redis.kill()
    redis.cut(to=before)
    redis.start()
    with suppress(StorageUnavailable):
        reader.read(1000, 0.1)
    asyncio.run(talk(redis, 3))  # what comes now hides nothing
    list(reader.reclaim())
    (loss,) = losses_in(cast(Any, client.hgetall(key_names.LOSSES)))
    assert "came back with an older state" in loss.said


async def fill(url: str) -> int:
    """Append turns until Redis refuses one; return how many it has stored."""
    connection = async_redis_at(url)
    writer, taken = StreamWriter(connection), 0
    await writer.open_session(spec("s"))
    try:
        while True:
            await writer.append_turn(long_turn("s", taken, TOKENS * 40), expires_at=1e12)
            taken += 1
    except StorageUnavailable:
        return taken
    finally:
        await writer.close()
        await connection.aclose()


def limit(redis: Redis, room: int) -> None:
    info: Any = redis.info("memory")
    redis.config_set("maxmemory", info["used_memory"] + room)


@pytest.mark.parametrize("trainer_was_there", [False, True])
def test_a_trainer_frees_a_redis_that_is_full(redis: RedisProcess, trainer_was_there: bool) -> None:
    """A trainer that never read the stream before frees Redis, too. Every action of a trainer writes to
    Redis, and a full Redis must refuse none of these writes."""
    client = redis.client
    if trainer_was_there:
        first = Lease(client, 1000.0)
        first.claim()
        StreamReader(client, first.token)
        first.release()
    limit(client, 3_000_000)
    taken = asyncio.run(fill(redis.url))
    assert taken > 10
    client.config_set("maxmemory", 1)  # now not even the smallest write fits
    lease = Lease(client, 1000.0)
    assert lease.claim() is None
    reader = StreamReader(client, lease.token)
    entries = reader.read(1000, 0.1)
    assert len(entries) == taken
    # The trainer reads the pending entries again, as after a crash.
    assert [entry.entry_id for entry in reader.reclaim()] == [entry.entry_id for entry in entries]
    assert [reader.reserve(number, f"file:///{number}") for number in (1, 2)] == [0, 1]
    before: Any = client.info("memory")
    verdict = Verdict(code="trained", step=1, version=1)
    verdicts = Verdicts({"s": verdict}, {("s", f"s-t{number}"): verdict for number in range(taken)})
    reader.acknowledge([entry.entry_id for entry in entries], verdicts)
    after: Any = client.info("memory")
    assert client.xlen(key_names.STREAM) <= 1
    assert before["used_memory"] - after["used_memory"] > 1_000_000
    assert client.hget(key_names.session("s"), "verdict") == msgspec.json.encode(verdict)
    client.delete(key_names.LEASE)
    lease.renew()
    lease.release()
