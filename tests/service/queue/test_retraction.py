"""A turn whose append failed without an answer is not trained, even if Redis stored it."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.cancellation import cancel_and_wait
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.records import Turn
from rollout_queue.redis.settings import NO_REPLICAS, Replication
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.redis_clients import async_redis_at
from tests.support.redis_process import RedisProcess
from tests.support.waiting import PATIENCE_S, wait_until
from trainer_service.rows.rows import exclusions

WITHIN_S = 1.5


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path / "redis").start()
    yield process
    process.process.send_signal(signal.SIGCONT)
    process.close()


@asynccontextmanager
async def writing(url: str, timeout_s: float = WITHIN_S, **more: Any) -> AsyncIterator[StreamWriter]:
    async with leaving(url, timeout_s, **more) as writer:
        yield writer
        await writer.close()


class Muffler:
    """Forwards commands to a Redis, and withholds every answer while it is `shut`."""

    def __init__(self, port: int) -> None:
        self._port, self.shut, self.url = port, False, ""
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Muffler"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        yield self
        server.close()
        await cancel_and_wait(list(self._tasks))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", self._port)
        for copying in (self._copy(reader, below, False), self._copy(above, writer, True)):
            self._tasks.add(asyncio.create_task(copying))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if not (answers and self.shut):
                    sink.write(data)
        sink.close()
        with suppress(ConnectionError):
            await sink.wait_closed()


async def head_of(writer: StreamWriter) -> SessionHead:
    head = await writer.load("s1")
    assert head is not None
    return head


async def test_a_stalled_redis_stores_no_turn_after_its_client_was_told_that_it_failed(
    redis: RedisProcess,
) -> None:
    async with writing(redis.url, PATIENCE_S) as other, writing(redis.url, within_s=WITHIN_S) as writer:
        await other.open_session(spec())
        await writer.append_turn(turn("t0"), 1e10)  # from here on, the connection is open
        redis.process.send_signal(signal.SIGSTOP)
        with pytest.raises(StorageUnavailable):
            await writer.append_turn(turn("t1"), 1e10)
        await asyncio.sleep(WITHIN_S)  # Redis is stalled until the deadline has passed
        redis.process.send_signal(signal.SIGCONT)
        await other.append_turn(turn("t2"), 1e10)
        await writer.retract_failed()
        assert (await head_of(other)).by_id.keys() == {"t0", "t2"}


async def test_a_stored_turn_whose_answer_was_lost_becomes_an_orphan(redis: RedisProcess) -> None:
    async with Muffler(redis.port).open() as muffler, writing(muffler.url) as writer:
        await writer.open_session(spec())
        await writer.append_turn(turn("t0"), 1e10)
        muffler.shut = True
        with pytest.raises(StorageUnavailable):
            await writer.append_turn(turn("t1"), 1e10)
        muffler.shut = False
        await writer.append_turn(turn("t2"), 1e10)  # the client asks again, and does not say so
        async with asyncio.timeout(PATIENCE_S):
            while not await ended(writer):
                pass
        turns = [each.record for each in claimed_reader(redis.client).read(100, 0.01)]
        verdicts = exclusions([each for each in turns if isinstance(each, Turn)])
        assert verdicts.keys() == {"t1", "t1-retracted"}
        assert verdicts["t1"].code == "orphan_retry"
        assert "told that the call failed" in verdicts["t1"].detail


async def test_a_failed_turn_is_retracted_although_its_gateway_is_gone_and_another_ends_the_session(
    redis: RedisProcess,
) -> None:
    """The retraction is there before the client is told, so nothing has to come after that."""
    async with (
        Muffler(redis.port).open() as muffler,
        writing(redis.url, PATIENCE_S) as other,
        leaving(muffler.url, WITHIN_S) as killed,
    ):
        await other.open_session(spec())
        await killed.append_turn(turn("t0"), 1e10)
        await killed.load("s1")  # both of its clients have a connection
        muffler.shut = True
        with pytest.raises(StorageUnavailable):
            await killed.append_turn(turn("t1"), 1e10)
        await other.append_outcome(outcome(), reward("finish"), None)
    excluded = exclusions(turns_in(redis))
    assert excluded.keys() == {"t1", "t1-retracted"}


async def test_a_turn_that_replicas_did_not_confirm_is_retracted_before_its_client_is_told(
    redis: RedisProcess, tmp_path: Path
) -> None:
    replica = RedisProcess(tmp_path / "replica").start(replicaof=f"127.0.0.1 {redis.port}")
    try:
        wait_until(lambda: redis.client.set("any", "value") and redis.client.wait(1, 100))
        one = Replication(1, 1.0)
        async with leaving(redis.url, PATIENCE_S, replication=one) as killed, writing(redis.url) as other:
            await other.open_session(spec())
            await other.append_turn(turn("t0"), 1e10)
            replica.process.send_signal(signal.SIGSTOP)
            with pytest.raises(StorageUnavailable):
                await killed.append_turn(turn("t1"), 1e10)
            await other.append_outcome(outcome(), reward("finish"), None)
        assert exclusions(turns_in(redis)).keys() == {"t1", "t1-retracted"}
    finally:
        replica.process.send_signal(signal.SIGCONT)
        replica.close()


async def test_a_writer_closes_when_no_turn_can_be_stored_any_more_that_has_failed(
    redis: RedisProcess,
) -> None:
    """Redis, which stands still, comes back before that."""
    async with writing(redis.url, PATIENCE_S) as other:
        await other.open_session(spec())
        async with writing(redis.url, within_s=WITHIN_S) as writer:
            await writer.append_turn(turn("t0"), 1e10)
            redis.process.send_signal(signal.SIGSTOP)
            with pytest.raises(StorageUnavailable):
                await writer.append_turn(turn("t1"), 1e10)
            asyncio.get_running_loop().call_later(WITHIN_S, redis.process.send_signal, signal.SIGCONT)
        await other.append_outcome(outcome(), reward("finish"), None)
        assert exclusions(turns_in(redis)).keys() - {"t1", "t1-retracted"} == set()
        assert (await head_of(other)).by_id.keys() <= {"t0", "t1", "t1-retracted"}


def turns_in(redis: RedisProcess) -> list[Turn]:
    records = [each.record for each in claimed_reader(redis.client).read(100, 0.01)]
    return [each for each in records if isinstance(each, Turn)]


@asynccontextmanager
async def leaving(
    url: str, timeout_s: float, within_s: float = PATIENCE_S, replication: Replication = NO_REPLICAS
) -> AsyncIterator[StreamWriter]:
    """A writer of a gateway that is killed: it does nothing at its end."""
    client = async_redis_at(url)
    yield StreamWriter(client, within_s, replication=replication, timeout_s=timeout_s)
    await client.aclose()


async def ended(writer: StreamWriter) -> bool:
    """End the session. That fails while a failed turn of it may still be stored."""
    with suppress(StorageUnavailable):
        await writer.append_outcome(outcome(), reward("finish"), None)
        return True
    return False
