"""Rewards the sessions that wait for it.

gateway's list ─▶ the first rule that matches ─▶ its queue ─▶ its workers: read · grade · post the reward
      ▲                                                                │ failed: again after a pause
      └── read again every few seconds ◀───────────────────────────────┘ failed to the last: a dead letter

The gateway alone knows which sessions wait. So two services may run, and one that is killed loses nothing:
the key of a reward is the rule's name, and the gateway stores one reward for each key.
"""

import asyncio
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reward_service.dispatch.attempt import AttemptFailed, SessionGrader, SessionReward
from reward_service.dispatch.gateway import (
    GatewayRefusal,
    GatewayAway,
    RewardOutcome,
    SessionGateway,
    SessionTooLarge,
)
from reward_service.dispatch.memory import DeadLetter, DispatchMemory
from reward_service.dispatch.rules import AnyRule, DispatchSettings
from reward_service.dispatch.sessions import SessionToGrade, WaitingSession
from reward_service.judging.models import JUDGE_PREFIX
from reward_service.metrics import RewardMetrics

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""The pause before a reward that the gateway did not take is posted again; it doubles each time."""
POSTS = 12
"""How often a reward is posted while the gateway cannot take it; with pauses of up to a minute."""
GATEWAY_PAUSE_S = 5.0
"""A session that could not be read or rewarded is left for so long, and for at most twice this time."""


@dataclass(frozen=True)
class RuleQueue:
    """A rule, what grades for it, and the ids of the sessions that wait for it."""

    rule: AnyRule
    grader: SessionGrader
    waiting: asyncio.Queue[str]


class Dispatcher:
    """Finds, grades and rewards sessions until it is cancelled."""

    def __init__(
        self,
        gateway: SessionGateway,
        graders: Sequence[tuple[AnyRule, SessionGrader]],
        settings: DispatchSettings,
        metrics: RewardMetrics,
    ) -> None:
        self._gateway, self._settings, self._metrics = gateway, settings, metrics
        self._queues = [RuleQueue(rule, grader, asyncio.Queue(settings.queue)) for rule, grader in graders]
        self.memory = DispatchMemory(settings.remembered)
        self.gateway_fault: str | None = "the gateway's list was not read yet" if graders else None
        """Why the last reading of the list failed; None if it did not."""

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many sessions wait for each rule."""
        return {queue.rule.name: queue.waiting.qsize() for queue in self._queues}

    async def run(self) -> None:
        """Read the list and grade, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues:
                for _ in range(queue.rule.concurrency):
                    tasks.create_task(self._work(queue))
            tasks.create_task(self._read_again_and_again())

    async def _read_again_and_again(self) -> None:
        while True:
            try:
                await self._read_list()
            except (GatewayAway, GatewayRefusal, SessionTooLarge) as error:
                if self.gateway_fault != str(error):  # once per reason
                    logger.warning("sessions cannot be listed: %s", error)
                self.gateway_fault = str(error)
            except Exception:  # a bug here must not end the dispatcher without a word
                logger.exception("sessions cannot be listed")
                self.gateway_fault = "internal error; the log has it"
            else:
                self.gateway_fault = None
            self._metrics.read_list(failed=self.gateway_fault is not None)
            await asyncio.sleep(self._settings.poll_every_s)

    async def _read_list(self) -> None:
        self.memory.begin_reading()
        async for page in self._gateway.waiting():
            for session in page:
                self._enqueue(session)
        self.memory.end_reading()

    def _enqueue(self, session: WaitingSession) -> None:
        """Give the session to its rule, unless the rule's queue is full: the next reading finds it again."""
        queue = self._queue_of(session)
        if queue is None or not self.memory.takes(session.session_id) or queue.waiting.full():
            return
        self.memory.begin(session.session_id)
        queue.waiting.put_nowait(session.session_id)

    def _queue_of(self, session: WaitingSession) -> RuleQueue | None:
        if session.session_id.startswith(JUDGE_PREFIX):
            return None
        matching = (each for each in self._queues if each.rule.matches(session.task_id, session.metadata))
        return next(matching, None)

    async def _work(self, queue: RuleQueue) -> None:
        while True:
            session_id = await queue.waiting.get()
            try:
                await self._handle(queue, session_id)
            except GatewayAway as error:  # no fault of the grader: a later reading finds it again
                logger.warning("session %s is left for later: %s", session_id, error)
                self.memory.postpone(session_id, GATEWAY_PAUSE_S * random.uniform(1.0, 2.0))
            except Exception:  # a bug here costs this session one attempt, and not the worker
                logger.exception("session %s could not be handled", session_id)
                self._failed(queue.rule, session_id, AttemptFailed("internal error"))
            finally:
                self.memory.end(session_id)

    async def _handle(self, queue: RuleQueue, session_id: str) -> None:
        """Read, grade and reward one session. Raises GatewayAway."""
        rule = queue.rule
        try:
            session = await self._gateway.session(session_id)
            if session is None or not session.waits:
                outcome = RewardOutcome.GONE if session is None else RewardOutcome.ALREADY
                self._ended(rule, session_id, outcome.value)
                return
            reward = await self._grade(queue, session)
            if reward is None:
                self.memory.leave_alone(session_id)
                self._metrics.session(rule.name, "no_opinion")
                return
            outcome = await self._post(rule, session_id, reward)
        except (GatewayRefusal, SessionTooLarge) as error:
            self._failed(rule, session_id, AttemptFailed(str(error), final=True))
        except AttemptFailed as error:
            self._failed(rule, session_id, error)
        else:
            self._ended(rule, session_id, outcome.value)

    async def _grade(self, queue: RuleQueue, session: SessionToGrade) -> SessionReward | None:
        """Raises AttemptFailed."""
        attempt = self.memory.failures(session.session_id) + 1
        with self._metrics.attempt(queue.rule.name):
            try:
                async with asyncio.timeout(queue.rule.timeout_s):
                    return await queue.grader.grade(session, attempt)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within {queue.rule.timeout_s} s") from error

    async def _post(self, rule: AnyRule, session_id: str, reward: SessionReward) -> RewardOutcome:
        """Post again while the gateway is away, so that the session need not be graded again. Raises
        GatewayAway, GatewayRefusal."""
        source = f"{rule.kind}:{rule.name}"
        for post in range(POSTS - 1):
            try:
                return await self._gateway.reward(session_id, reward.value, rule.name, source, reward.turn_id)
            except GatewayAway as error:
                logger.warning("the reward of session %s waits: %s", session_id, error)
            await asyncio.sleep(self._pause_s(FIRST_PAUSE_S, post))
        return await self._gateway.reward(session_id, reward.value, rule.name, source, reward.turn_id)

    def _pause_s(self, first_s: float, failures: int) -> float:
        """The pause doubles with each failure, up to a limit, and is shortened at random by up to a half."""
        longest_s = min(first_s * 2.0 ** min(failures, 60), self._settings.backoff_limit_s)
        return longest_s * random.uniform(0.5, 1.0)

    def _ended(self, rule: AnyRule, session_id: str, outcome: str) -> None:
        self.memory.forget(session_id)
        self._metrics.session(rule.name, outcome)
        logger.info("session %s: %s by rule %s", session_id, outcome, rule.name)

    def _failed(self, rule: AnyRule, session_id: str, error: AttemptFailed) -> None:
        attempts = self.memory.failures(session_id) + 1
        if error.final or attempts >= rule.attempts:
            self.memory.bury(DeadLetter(session_id, rule.name, attempts, str(error), time.time()))
            self._metrics.session(rule.name, "dead_letter")
            logger.warning("session %s is a dead letter of rule %s: %s", session_id, rule.name, error)
            return
        self.memory.failed(session_id, self._pause_s(rule.backoff_s, attempts - 1))
        logger.info("attempt %d on session %s failed, rule %s: %s", attempts, session_id, rule.name, error)
