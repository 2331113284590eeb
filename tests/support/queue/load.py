"""Agents write and a trainer reads while Redis fails over: what the agents were told, and what is stored."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Turn
from rollout_queue.redis import key_names
from rollout_queue.redis.redis_client import open_async_redis, open_redis
from rollout_queue.redis.settings import NO_REPLICAS, RedisSettings, Replication
from rollout_queue.redis.stream_reader import StreamReader
from rollout_queue.redis.stream_writer import StreamWriter
from tests.support.claimed import claimed_reader
from tests.support.queue.records import outcome, reward, spec, turn
from tests.support.serving import NOBODY
from tests.support.waiting import PATIENCE_S, wait_until_async
from weir.audit.audit import Report, audit
from weir.audit.audit_facts import ClientAnswer
from weir.audit.audit_sources import Sources

AGENTS = 8
TURNS = 3
PAUSE_S = 0.02
"""How long agents and trainer wait before they try again."""
APPEND_WITHIN_S = 3.0
"""After a failed turn, its session cannot end for so long."""


class Load:
    """One gateway's writer and one trainer's reader, over `settings`."""

    def __init__(self, settings: RedisSettings, replication: Replication = NO_REPLICAS) -> None:
        self.settings, self.answers = settings, list[ClientAnswer]()
        self.refused = 0
        """How many calls got an error."""
        self._replication = replication
        self._stopping = asyncio.Event()

    async def during(self, fault: Callable[[], None]) -> None:
        """Agents and trainer work while `fault` runs in a thread, and until calls were answered after it."""
        redis = open_async_redis(self.settings, timeout_s=5)
        writer = StreamWriter(redis, APPEND_WITHIN_S, replication=self._replication)
        with open_redis(self.settings, timeout_s=5) as client:
            reader = claimed_reader(client)
            tasks = [asyncio.create_task(self._agent(writer, number)) for number in range(AGENTS)]
            tasks.append(asyncio.create_task(asyncio.to_thread(self._train, reader)))
            await wait_until_async(lambda: len(self.answers) > 3 * AGENTS)
            try:
                await asyncio.to_thread(fault)
                heard = len(self.answers)
                await wait_until_async(lambda: len(self.answers) > heard + 3 * AGENTS)
            finally:
                self._stopping.set()
                await asyncio.gather(*tasks)
                with contextlib.suppress(StorageUnavailable):
                    await writer.retract_failed()
                await writer.close()
                await redis.aclose()

    async def _agent(self, writer: StreamWriter, number: int) -> None:
        sessions = 0
        while not self._stopping.is_set():
            session_id, sessions = f"a{number}-{sessions}", sessions + 1
            await self._until_told(partial(writer.open_session, spec(session_id)), session_id)
            for index in range(TURNS):
                each = turn(f"{session_id}-t{index}", session_id, started_at=100.0 + index)
                try:
                    await writer.append_turn(each, expires_at=1e12)
                    self.answers.append(ClientAnswer(session_id, turn_id=each.turn_id))
                except StorageUnavailable:  # the agent got an error, and goes on with another turn
                    self.refused += 1
                    await asyncio.sleep(PAUSE_S)  # as clients do before they try again
            ends, value = outcome(session_id), reward("finish", session_id)
            finish = partial(writer.append_outcome, ends, value, None)
            await self._until_told(finish, session_id, reward_key="finish", finished=True)

    async def _until_told(self, call: Callable[[], Awaitable[object]], session_id: str, **told: Any) -> None:
        while True:
            try:
                await call()
            except StorageUnavailable:
                self.refused += 1
                if self._stopping.is_set():
                    return
                await asyncio.sleep(PAUSE_S)  # as clients do before they try again
            else:
                self.answers.append(ClientAnswer(session_id, **told))
                return

    def _train(self, reader: StreamReader) -> None:
        while not self._stopping.is_set():
            try:
                reader.read(50, 0.05)
            except StorageUnavailable:
                time.sleep(PAUSE_S)  # as a trainer does before it tries again

    def check(self, directory: Path) -> None:
        """All that was answered is stored, and reaches a trainer; the audit finds nothing."""
        assert self.lost() == []
        assert {each.turn_id for each in self.answers if each.turn_id} <= self.read()
        assert self.audited(directory).findings == ()

    def read(self) -> set[str]:
        """The turns that a trainer which starts now finds, delivered or not."""
        with open_redis(self.settings, timeout_s=PATIENCE_S) as client:
            reader = claimed_reader(client)
            entries = list(reader.reclaim())
            while new := reader.read(1000, 0.01):
                entries += new
        return {entry.record.turn_id for entry in entries if isinstance(entry.record, Turn)}

    def lost(self) -> list[ClientAnswer]:
        """The answers of which Redis has no trace, or not all."""
        with (
            open_redis(self.settings, timeout_s=PATIENCE_S) as client,
            client.pipeline(transaction=False) as pipeline,
        ):
            for each in self.answers:
                pipeline.hmget(key_names.session(each.session_id), ["spec", *each.fields])
            found = pipeline.execute()
        return [each for each, fields in zip(self.answers, found, strict=True) if None in fields]

    def audited(self, directory: Path) -> Report:
        """What the audit says of the answers, without a trainer."""
        directory.mkdir(exist_ok=True)
        sources = Sources(self.settings.redis_url, NOBODY, checkpoint_dir=directory, access=self.settings)
        return audit(sources, self.answers, readings=1)
