"""Makes answers for which no client waits: `background: true` in Responses. Their clients read them by id.

POST ──▶ stored as in progress ──▶ reply            task ──▶ sampled, recorded as a turn, stored as completed
"""

import asyncio
import logging
from collections import Counter

from gateway.cancellation import cancel_and_wait
from gateway.dialects.base import BackgroundReply, RecordedAnswer
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.edge.request import HeldBody
from gateway.errors import LimitReached
from gateway.generations.generation import Generation, tokens_of
from gateway.parts import GatewayParts
from rollout_queue import clock
from rollout_queue.contract.errors import QueueError, StorageUnavailable
from rollout_queue.http.errors import ApiError

logger = logging.getLogger(__name__)

RENEW_EVERY_S = 1.0
"""How often a task renews its record. A renewal shows whether any gateway has cancelled or deleted it."""


STORE_FAILURE_S = 5.0
"""How long an answer that was ended may take to be stored as failed."""


class BackgroundAnswers:
    """The answers that this gateway makes in the background, within limits in all and per owner."""

    def __init__(self, in_all: int, per_key: int) -> None:
        self._in_all = in_all
        self._per_key = per_key
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners: Counter[str] = Counter()
        self._stopping = False

    async def start(
        self, gateway: GatewayParts, reply: BackgroundReply, generation: Generation, held: HeldBody
    ) -> bytes:
        """Store the answer as in progress, and begin to make it. Returns the body of the reply. The images of
        the call count until the answer is made.

        Raises LimitReached, StorageUnavailable, Deleted.
        """
        owner = generation.head.spec.owner
        for count, limit in ((self._owners.total(), self._in_all), (self._owners[owner], self._per_key)):
            if count >= limit:
                message = f"{count} answers are made in the background, of {limit} allowed; try again"
                raise gateway.metrics.refused(LimitReached(message, code="background_limit", retry_s=1))
        self._owners[owner] += 1
        try:
            body = await reply.begin(generation)
        except BaseException:
            self._leave(owner)
            raise
        task = asyncio.create_task(self._make(gateway, reply, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._leave(owner))
        kept = held.moved()
        task.add_done_callback(lambda _: kept.close())
        return body

    def end_all(self) -> None:
        """End every answer; each is stored as failed."""
        if not self._stopping:
            self._stopping = True
            for task in self._tasks:
                task.cancel()

    async def close(self, patience_s: float) -> None:
        """Wait for all answers, and end those that take longer."""
        if self._tasks:
            await clock.wait_tasks(self._tasks, patience_s)
        self.end_all()
        if self._tasks:
            await clock.wait_tasks(self._tasks, STORE_FAILURE_S)
        await cancel_and_wait(list(self._tasks))

    def _leave(self, owner: str) -> None:
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]

    async def _make(self, gateway: GatewayParts, reply: BackgroundReply, generation: Generation) -> None:
        """Make one answer, until it is complete, cancelled or ended."""
        sampling, wanted = asyncio.create_task(_sample(gateway, reply, generation)), True
        try:
            session = await gateway.in_flight.enter(generation.head)
            try:
                while wanted and not sampling.done():
                    await clock.wait_tasks([sampling], RENEW_EVERY_S)
                    wanted = sampling.done() or await _renewed(reply)
            finally:
                gateway.in_flight.leave(session)
        finally:
            await cancel_and_wait([sampling])
            await gateway.recorder.record_unrecorded([generation])
            if not wanted:
                await _fail(reply, ApiError(410, "the session was deleted"))
            elif self._stopping and sampling.cancelled():
                await _fail(reply, ApiError(503, "the gateway stopped before the answer was complete"))
            if generation.ids:
                gateway.admission.spend(generation.head.spec.owner, sum(tokens_of([generation], 1)))


async def _sample(gateway: GatewayParts, reply: BackgroundReply, generation: Generation) -> None:
    try:
        await gateway.generator.sample(generation)
        recorded = RecordedAnswer(generation, *await gateway.recorder.record(generation))
        await reply.end(recorded)
    except ANSWERABLE as error:
        await _fail(reply, api_error(error))
    except Exception:  # outermost frame of the task: a bug
        logger.exception("an answer in the background failed")
        await _fail(reply, ApiError(500, "internal error"))


async def _renewed(reply: BackgroundReply) -> bool:
    try:
        return await reply.renew()
    except StorageUnavailable as error:
        logger.warning("an answer in the background cannot be renewed: %s", error)
        return True


async def _fail(reply: BackgroundReply, error: ApiError) -> None:
    try:
        await reply.fail(error)
    except QueueError as failure:
        logger.error("an answer in the background failed (%s), which is not stored: %s", error, failure)
