"""Retracts turns whose append Redis did not answer: their clients were told that the call failed.

append ──▶ no answer ──▶ pending ──retract──▶ stored: a retraction is appended ──▶ the client gets an error
                                        └──▶ not stored: it may still be ──▶ the client gets an error
                                             tried again until the deadline of the append ◀──┘

A retraction is an aborted turn that replaces the stored one, as a retry would. So the stored turn is an
orphan for every trainer, also for one of an older build.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from redis.asyncio import Redis

from rollout_queue import clock
from rollout_queue.contract.attempts import retraction_id
from rollout_queue.contract.codec import encode
from rollout_queue.contract.errors import StorageUnavailable
from rollout_queue.contract.records import Turn
from rollout_queue.contract.tokens import Logprobs, TokenIds
from rollout_queue.redis import keys
from rollout_queue.redis.availability import stored
from rollout_queue.redis.connection.replicas import Argument, Confirm
from rollout_queue.redis.scripts import records as record_scripts

logger = logging.getLogger(__name__)

AT_ONCE_S = 1.0
"""How long a client waits for the retraction before it gets its error. Often Redis takes it, because only a
connection was lost, or replicas are late. Then it is there even if this process ends at once."""
AGAIN_S = 0.1
"""How often a process that ends tries to retract."""
MOST_PENDING = 10_000
"""Turns that may be pending at once. Each call that ends while Redis does not answer may add one."""


class PendingRetraction(NamedTuple):
    """The retraction to append if the turn is stored; and the last moment to store it, by Redis' clock."""

    retraction: Turn
    deadline_ms: int


class Retractions:
    """The turns of this process that are still to be retracted, by turn id."""

    def __init__(self, redis: Redis, confirm: Confirm | None) -> None:
        """`confirm` is None if no replica is waited for."""
        self._redis, self._confirm = redis, confirm
        self._retract = redis.register_script(record_scripts.RETRACT)
        self._pending: dict[str, PendingRetraction] = {}
        self._one_at_a_time = asyncio.Lock()

    def add(self, turn: Turn, deadline_ms: int) -> None:
        """Note that the append of the turn was not answered."""
        if len(self._pending) >= MOST_PENDING:
            logger.error("turn %s may be stored, although its client was told that it failed", turn.turn_id)
            return
        self._pending[turn.turn_id] = PendingRetraction(_retraction_of(turn), deadline_ms)

    async def settle_at_once(self, turn_id: str) -> None:
        """Retract the turn, with all others, if that is possible now."""
        with suppress(StorageUnavailable, TimeoutError):
            async with clock.real_timeout(AT_ONCE_S), self._one_at_a_time:
                if turn_id in self._pending:
                    await self._settle(list(self._pending))

    async def close(self, within_s: float) -> None:
        """Retract all pending turns, or wait until none of them can be stored any more."""
        with suppress(TimeoutError):
            async with clock.real_timeout(within_s):
                while self._pending:
                    with suppress(StorageUnavailable):
                        await self.settle_all()
                    if self._pending:
                        await clock.sleep(AGAIN_S)
        if self._pending:
            named = ", ".join(self._pending)
            logger.error("turns %s may be stored, although their clients were told that they failed", named)

    async def settle(self, session_id: str) -> None:
        """Retract the pending turns of one session. Raises StorageUnavailable if that is not possible yet."""
        await self._settle([name for name, each in self._pending.items() if _belongs(each, session_id)])
        if any(_belongs(each, session_id) for each in self._pending.values()):
            raise StorageUnavailable(f"Redis may still store a failed turn of session {session_id}")

    async def settle_all(self) -> None:
        """Retract all pending turns whose deadline has passed. Raises StorageUnavailable."""
        await self._settle(list(self._pending))

    async def _settle(self, turn_ids: Collection[str]) -> None:
        for turn_id in turn_ids:
            if (pending := self._pending.get(turn_id)) is None:
                continue
            reply = await self._retracted(turn_id, pending)
            if reply == b"early":
                continue
            self._pending.pop(turn_id, None)
            if reply == b"decided":
                logger.error("turn %s got its verdict, although its client was told that it failed", turn_id)
            elif reply == b"retracted":
                logger.warning("turn %s is retracted: its client was told that it failed", turn_id)

    async def _retracted(self, turn_id: str, pending: PendingRetraction) -> bytes:
        retraction, deadline_ms = pending
        named: list[str] = [keys.session(retraction.session_id), keys.STREAM]
        arguments: list[Argument] = [f"t:{turn_id}", f"t:{retraction.turn_id}", encode(retraction)]
        arguments.append(str(deadline_ms))
        reply: bytes
        if self._confirm is None:  # the script's text is sent, because it may be that no answer comes
            # bounded: one turn
            reply = await stored(self._redis.eval(record_scripts.RETRACT, len(named), *named, *arguments))
        else:
            reply = await self._confirm(self._retract, named, arguments)
        return reply


def _belongs(pending: PendingRetraction, session_id: str) -> bool:
    return pending.retraction.session_id == session_id


def _retraction_of(turn: Turn) -> Turn:
    return Turn(
        turn_id=retraction_id(turn.turn_id),
        session_id=turn.session_id,
        parent_id=turn.turn_id,
        group_id=turn.group_id,
        task_id=turn.task_id,
        policy=turn.policy,
        lineage=turn.lineage,
        user=turn.user,
        relation="retry",
        reason="storage_unavailable",
        context_ids=TokenIds(),
        output_ids=TokenIds(),
        logprobs=Logprobs(),
        versions=(),
        finish="abort",
        train=turn.train,
        started_at=turn.finished_at,
        finished_at=turn.finished_at,
        retry_of=turn.turn_id,
    )
