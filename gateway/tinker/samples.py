"""Makes samples in the background, so that a client polls for them as for the result of a command.

asample ─▶ promise in Redis ─▶ task: answers, recorded as turns; scores of the prompt ─▶ result in Redis

A promise whose gateway has died is gone after LEASE_S; the SDK then asks for the sample again.
"""

import asyncio
import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.callers.identity import Caller
from gateway.cancellation import cancel_and_wait
from gateway.edge.errors import ANSWERABLE, api_error
from gateway.errors import EngineFault, LimitReached, NoServer, invalid
from gateway.fleet.scoring import PromptScorer, PromptScores
from gateway.generations.generation import Call, Generation, Pinned, UnreadCall, tokens_of
from gateway.generations.generator import for_each
from gateway.parts import GatewayParts
from gateway.tinker.datums import WantedScores, sample_response
from gateway.tinker.paths import PromiseId
from gateway.tinker.promises import Announcements, SamplePromises
from rollout_queue import clock
from rollout_queue.contract.errors import QueueError, StorageUnavailable
from rollout_queue.contract.head import SessionHead
from rollout_queue.contract.outcomes import OPENED_UNTRAINED
from rollout_queue.contract.records import Outcome

logger = logging.getLogger(__name__)

RENEW_EVERY_S = 10.0
MOST_ATTEMPTS, PAUSE_S = 100, 2.0
"""Attempts at one sample, and the pause between two. Each attempt waits for a server by itself."""


class WantedSample(msgspec.Struct, frozen=True):
    """What one asample asks for."""

    promise: PromiseId
    call: Call
    n: int
    pinned: Pinned
    scores: WantedScores
    user: str | None = None
    """The user of the client session. The call names the client session itself as its user, so that its
    samples are found and deleted as those of a user."""

    @property
    def session_id(self) -> str:
        """The session that records the answers: no other sample has it."""
        return f"sample-{hashlib.sha256(str(self.promise).encode()).hexdigest()[:32]}"

    @property
    def sequence_ids(self) -> list[str]:
        return [f"{self.session_id}.{index}" for index in range(self.n)]


def turn_of(sequence_id: str, attempt: int = 0) -> str:
    """The id of the turn that records a sequence; each attempt at the sample has others."""
    named = f"{sequence_id}/{attempt}" if attempt else sequence_id
    return hashlib.sha256(named.encode()).hexdigest()[:32]


@dataclass
class SampleMaker:
    """The samples that this gateway process makes."""

    gateway: GatewayParts
    promises: SamplePromises
    announcements: Announcements
    most: int
    """How many sequences it samples at once; one client key gets half of them."""
    patience_s: float
    """How long a sample waits for engines."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _owners: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._scorer = PromptScorer(self.gateway.sampler)

    async def start(self, wanted: WantedSample, caller: Caller, digest: str) -> None:
        """Promise the sample, and begin to make it, unless it is promised already.

        Raises LimitReached, StorageUnavailable, and InvalidRequest for a number with another content.
        """
        if await self.promises.known(wanted.promise, digest):
            return
        self._check_room(wanted.n, caller.owner)
        self.gateway.admission.check_call(caller.owner)
        self._owners[caller.owner] += wanted.n
        try:
            first = await self.promises.begin(wanted.promise, digest)
        except BaseException:
            self._leave(caller.owner, wanted.n)
            raise
        if not first:
            self._leave(caller.owner, wanted.n)
            return
        task = asyncio.create_task(self._make(wanted, caller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._leave(caller.owner, wanted.n))

    def _check_room(self, n: int, owner: str) -> None:
        share = max(1, self.most // 2)
        if n > share:
            raise invalid("num_samples", f"at most {share} (gateway.tinker.max_samples)")
        held = self._owners.total(), self._owners[owner]
        if held[0] + n > self.most or held[1] + n > share:
            message = f"{held[0]} sequences are sampled, {held[1]} of them for this key; try again"
            raise self.gateway.metrics.refused(LimitReached(message, code="samples_limit", retry_s=1))

    async def close(self) -> None:
        """End all samples; their promises are gone, so clients ask for them again elsewhere."""
        await cancel_and_wait(list(self._tasks))

    def _leave(self, owner: str, n: int) -> None:
        self._owners[owner] -= n
        if not self._owners[owner]:
            del self._owners[owner]

    async def _make(self, wanted: WantedSample, caller: Caller) -> None:
        making, announced = asyncio.create_task(self._made(wanted, caller)), asyncio.Event()
        try:
            with self.announcements.listening(str(wanted.promise), announced.set):
                while not making.done():
                    await _first_of(making, announced)
                    if not making.done() and not await self._renew(wanted.promise):
                        await cancel_and_wait([making])
                        return
            await self._keep(wanted.promise, making.result())
        except asyncio.CancelledError:
            await cancel_and_wait([making])
            await self._drop(wanted.promise)
            raise

    async def _made(self, wanted: WantedSample, caller: Caller) -> bytes | dict[str, str]:
        """The sample as the SDK reads it, or why there is none."""
        try:
            return await self._sample_when_possible(wanted, caller)
        except ANSWERABLE as error:
            refusal = api_error(error)
            return {"error": refusal.message, "category": "user" if refusal.status < 500 else "server"}
        except Exception:  # outermost frame of the task: a bug
            logger.exception("the sample %s failed", wanted.promise)
            return {"error": "internal error; the gateway's log has it", "category": "server"}

    async def _sample_when_possible(self, wanted: WantedSample, caller: Caller) -> bytes:
        """Make the sample; wait for engines that are not there: a promise may take long."""
        until = clock.monotonic() + self.patience_s
        for attempt in range(MOST_ATTEMPTS - 1):
            try:
                return await self._sample(wanted, caller, attempt)
            except (NoServer, EngineFault) as error:
                if clock.monotonic() > until:
                    raise
                logger.warning("the sample %s is tried again: %s", wanted.promise, error.message)
                await clock.sleep(PAUSE_S)
        return await self._sample(wanted, caller, MOST_ATTEMPTS - 1)

    async def _sample(self, wanted: WantedSample, caller: Caller, attempt: int) -> bytes:
        gateway = self.gateway
        spec = gateway.sessions.new_spec(caller, wanted.session_id, inferred=True)
        spec = msgspec.structs.replace(spec, train=False, user=wanted.user)
        head = SessionHead(spec=spec, stored=False)
        client = UnreadCall(str(wanted.promise), 0, 0, gateway.metrics.of("tinker"))
        calls, heavy = [wanted.call], len(wanted.call.prompt_ids or ()) > HEAVY_TOKENS
        generations = await gateway.generator.begin(
            head, calls, wanted.n, wanted.pinned, "sample-", heavy, client
        )
        for sequence_id, generation in zip(wanted.sequence_ids, generations, strict=True):
            generation.turn_id = turn_of(sequence_id, attempt)
        scoring = asyncio.create_task(self._scores(wanted, generations[0]))
        try:
            session = await gateway.in_flight.enter(head)
            try:
                await for_each(gateway.generator.sample, generations)
                await for_each(gateway.recorder.record, generations)
            finally:
                gateway.in_flight.leave(session)
            scores = await scoring
        finally:
            await cancel_and_wait([scoring])
            if any(generation.ids for generation in generations):
                gateway.admission.spend(caller.owner, sum(tokens_of(generations, wanted.n)))
        await self._finish(generations)
        answer = functools.partial(
            sample_response, generations, wanted.call.top_logprobs, wanted.scores, scores
        )
        return answer() if wanted.scores.targets is None else await asyncio.to_thread(answer)

    async def _scores(self, wanted: WantedSample, generation: Generation) -> PromptScores | None:
        query = wanted.scores.query
        if query is None:
            return None
        ids: Sequence[int] = wanted.call.prompt_ids or ()
        rid = f"scores.{generation.turn_id}"
        owner = generation.head.spec.owner
        return await self._scorer.score(rid, wanted.session_id, owner, generation.allowed, ids, query)

    async def _finish(self, generations: Sequence[Generation]) -> None:
        """End the session of the sample: nothing more comes."""
        session_id = generations[0].head.spec.session_id
        outcome = Outcome(session_id=session_id, status="completed", created_at=clock.now())
        await self.gateway.writer.append_outcome(outcome, None, OPENED_UNTRAINED)

    async def _renew(self, promise: PromiseId) -> bool:
        """Returns False if the sample was cancelled."""
        try:
            return await self.promises.renew(promise)
        except StorageUnavailable as error:
            logger.warning("the promise of sample %s cannot be renewed: %s", promise, error)
            return True

    async def _keep(self, promise: PromiseId, made: bytes | dict[str, Any]) -> None:
        try:
            await self.promises.keep(promise, made)
        except QueueError as error:
            logger.error("the sample %s is not stored: %s", promise, error)
            if isinstance(made, bytes):
                await self._keep(promise, {"error": f"it is not stored: {error}", "category": "server"})

    async def _drop(self, promise: PromiseId) -> None:
        try:
            await asyncio.shield(self.promises.drop(promise))
        except QueueError as error:
            logger.warning("the promise of sample %s stays until it expires: %s", promise, error)


async def _first_of(making: asyncio.Task[Any], announced: asyncio.Event) -> None:
    """Wait until the sample is made, something is announced about its promise, or it is time to renew it."""
    hearing = asyncio.create_task(announced.wait())
    try:
        await clock.wait_tasks([making, hearing], RENEW_EVERY_S, asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait([hearing])
    announced.clear()


HEAVY_TOKENS = 8192
"""A longer prompt is looked for in a thread."""
