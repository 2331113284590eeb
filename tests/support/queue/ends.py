"""Both ends of one stream, and what a test writes and reads there."""

from collections import Counter
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from rollout_queue.contract.head import SessionHead, Tombstone
from rollout_queue.contract.records import Turn, Verdict
from rollout_queue.contract.stream import Verdicts
from rollout_queue.redis import key_names
from rollout_queue.redis.session_deletion import StreamDeleter
from rollout_queue.redis.session_retention import RedisForgetter
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.records import outcome, reward, spec, turn

NOTHING = Verdicts({}, {})
TRAINED = Verdict(code="trained", step=3, version=3)


class Ends:
    """Both ends of one stream on Redis, with a client for each, and what removes its sessions."""

    def __init__(self, writer: StreamWriter, client: AsyncRedis, redis: Redis) -> None:
        self.writer, self.client, self.redis = writer, client, redis
        self.reader, self.deleter = claimed_reader(redis), StreamDeleter(client)
        self.forgetter = RedisForgetter(client)

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
        found: Any = self.redis.hgetall(key)
        counts = {name.decode(): int(n) for name, n in found.items()}
        return {name: number for name, number in counts.items() if number}

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
