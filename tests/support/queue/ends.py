"""Both ends of one stream, in memory or on Redis, and what a test writes and reads there."""

from collections import Counter
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.head import SessionHead, Tombstone
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import StreamDeleter, StreamReader, StreamWriter, Verdicts
from rollout_queue.memory import MemoryStream
from rollout_queue.redis import key_names
from rollout_queue.redis.session_deletion import RedisDeleter
from rollout_queue.redis.session_retention import RedisForgetter
from rollout_queue.redis.stream_reader import RedisReader
from rollout_queue.redis.stream_writer import RedisWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.records import outcome, reward, spec, turn

NOTHING = Verdicts({}, {})
TRAINED = Verdict(code="trained", step=3, version=3)


class Ends:
    """Both ends of one stream, and what removes its sessions."""

    redis: Redis | None = None
    """The Redis of the stream; None if it is in memory."""

    def __init__(self, writer: StreamWriter, reader: StreamReader, deleter: StreamDeleter) -> None:
        self.writer, self.reader, self.deleter = writer, reader, deleter

    async def episode(self, name: str = "s1", turns: int = 1, **terms: Any) -> None:
        """Write a session that has ended with a reward and has no verdict."""
        await self.writer.open_session(spec(name, **terms))
        for number in range(turns):
            await self.writer.append_turn(turn(f"{name}-t{number}", name), 200.0)
        await self.writer.append_outcome(outcome(name), reward("finish", name), None)

    async def head(self, session_id: str = "s1") -> SessionHead:
        head = await self.writer.load(session_id)
        assert head is not None
        return head

    async def called(self, session_id: str = "s1") -> SessionHead:
        """The head that a call finds."""
        head = await self.writer.load_for_call(session_id)
        assert head is not None
        return head

    async def deleted(self, session_id: str = "s1") -> Tombstone:
        """Delete the session."""
        tombstone = await self.deleter.delete_session(session_id)
        assert tombstone is not None
        return tombstone

    def read(self) -> list[Any]:
        return [entry.record for entry in self.reader.read(1000, 0.01)]

    def acknowledge(self, verdicts: Verdicts = NOTHING) -> None:
        """The trainer reads all entries, and acknowledges them with these verdicts."""
        entries = self.reader.read(1000, 0.01)
        self.reader.acknowledge([entry.entry_id for entry in entries], verdicts)

    def learn(self, verdict: Verdict = TRAINED) -> None:
        """The trainer reads all entries, and acknowledges them: their sessions and turns get this verdict."""
        entries = self.reader.read(1000, 0.01)
        records = [entry.record for entry in entries]
        turns = [(each.session_id, each.turn_id) for each in records if isinstance(each, Turn)]
        sessions = dict.fromkeys((each.session_id for each in records), verdict)
        verdicts = Verdicts(sessions, dict.fromkeys(turns, verdict))
        self.reader.acknowledge([entry.entry_id for entry in entries], verdicts)

    def counts(self, key: str = key_names.VERDICTS) -> dict[str, int]:
        """How many sessions and turns have each verdict, without zeros."""
        if isinstance(self.writer, MemoryStream):
            found: Any = self.writer.counts
        else:
            assert self.redis is not None
            found = self.redis.hgetall(key)
        counts = {name if isinstance(name, str) else name.decode(): int(n) for name, n in found.items()}
        return {name: number for name, number in counts.items() if number}


class RedisEnds(Ends):
    """A stream on Redis. Gateway and trainer have different clients."""

    redis: Redis
    writer: RedisWriter
    reader: RedisReader

    def __init__(self, writer: RedisWriter, client: AsyncRedis, redis: Redis) -> None:
        self.client, self.redis = client, redis
        self.forgetter = RedisForgetter(client)
        super().__init__(writer, claimed_reader(redis), RedisDeleter(client))

    async def forgotten(self, most: int = 100) -> Counter[str]:
        """Forget settled sessions of any age; return their verdicts."""
        return (await self.forgetter.forget(0, most)).verdicts

    def left(self) -> set[str]:
        """Every key except those of the stream and the trainer."""
        names: Any = self.redis.keys()
        return {name.decode() for name in names} - {key_names.STREAM, key_names.FENCE, key_names.LEASE}

    def records(self, key: str = key_names.STREAM) -> list[bytes]:
        """The bytes of all records in a stream, in their order."""
        found: Any = self.redis.xrange(key)
        return [fields[key_names.STREAM_FIELD] for _, fields in found]
