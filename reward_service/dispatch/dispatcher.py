"""Rewards the sessions that wait for it.

gateway's list ─▶ the first rule that matches ─▶ its queue ─▶ its workers: read · grade · post the reward
      ▲                                                                │ failed: again after a pause
      └── read again every few seconds ◀───────────────────────────────┘ failed to the last: a dead letter

The gateway alone knows which sessions wait. So two services may run, and one that is killed loses nothing:
the key of a reward is the rule's name, and the gateway stores one reward for each key.

A unit is what a rule grades at once: a session or a group.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reward_service.dispatch.attempts_memory import DeadLetter, DispatchMemory
from reward_service.dispatch.gateway import GatewayAway, GatewayFailure, SessionGateway
from reward_service.dispatch.handlers import NotReady, RuleHandler
from reward_service.dispatch.reward_rules import DispatchSettings, EnvRule, GraderRule
from reward_service.dispatch.waiting_sessions import AttemptFailed, WaitingSession
from reward_service.judging import JUDGE_PREFIX
from reward_service.reward_metrics import RewardMetrics
from rollout_queue import clock

logger = logging.getLogger(__name__)

GATEWAY_PAUSE_S = 5.0
"""A unit that could not be read or rewarded is left for so long, and for at most twice this time."""


@dataclass(frozen=True)
class RuleQueue:
    """What rewards for a rule, and the units that wait for it."""

    handler: RuleHandler
    waiting: asyncio.Queue[str]

    @property
    def rule(self) -> GraderRule:
        return self.handler.rule


class Dispatcher:
    """Finds, grades and rewards sessions until it is cancelled."""

    def __init__(
        self,
        gateway: SessionGateway,
        rules: Sequence[RuleHandler | EnvRule],
        settings: DispatchSettings,
        metrics: RewardMetrics,
    ) -> None:
        self._gateway, self._settings, self._metrics = gateway, settings, metrics
        self._rules = [
            rule if isinstance(rule, EnvRule) else RuleQueue(rule, asyncio.Queue(settings.queue))
            for rule in rules
        ]
        self._queues = [rule for rule in self._rules if isinstance(rule, RuleQueue)]
        self.memory = DispatchMemory(settings.remembered)
        self.gateway_fault: str | None = "the gateway's list was not read yet" if rules else None
        """Why the last reading of the list failed; None if it did not."""

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many units wait for each rule."""
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
            except GatewayFailure as error:
                if self.gateway_fault != str(error):  # once per reason
                    logger.warning("sessions cannot be listed: %s", error)
                self.gateway_fault = str(error)
            except Exception:  # a bug here must not end the dispatcher without a word
                logger.exception("sessions cannot be listed")
                self.gateway_fault = "internal error; the log has it"
            else:
                self.gateway_fault = None
            self._metrics.read_list(failed=self.gateway_fault is not None)
            await clock.sleep(self._settings.poll_every_s)

    async def _read_list(self) -> None:
        self.memory.begin_reading()
        async for page in self._gateway.waiting():
            for session in page:
                if not session.session_id.startswith(JUDGE_PREFIX):
                    self._enqueue(session)
        self.memory.end_reading()

    def _enqueue(self, session: WaitingSession) -> None:
        """Give the session's unit to the first rule that rewards it. If the rule's queue is full, the next
        reading finds it again. A session that its environment scores is given to nobody."""
        for rule in self._rules:
            if isinstance(rule, EnvRule):
                if rule.matches(session.task_id, session.metadata):
                    return
            elif (unit := rule.handler.unit_of(session)) is not None:
                if self.memory.takes(unit, session.session_id) and not rule.waiting.full():
                    self.memory.queue(unit, session.session_id)
                    rule.waiting.put_nowait(unit)
                return

    async def _work(self, queue: RuleQueue) -> None:
        while True:
            unit = await queue.waiting.get()
            self.memory.begin(unit)
            try:
                await self._handle(queue, unit)
            except Exception:  # a bug here costs this unit one attempt, and not the worker
                logger.exception("%s could not be handled", unit)
                self._failed(queue.rule, unit, AttemptFailed("internal error"))
            finally:
                self.memory.end(unit)

    async def _handle(self, queue: RuleQueue, unit: str) -> None:
        rule = queue.rule
        try:
            outcome = await queue.handler.handle(unit, self.memory.failures(unit) + 1)
        except AttemptFailed as error:
            self._failed(rule, unit, error)
        except NotReady:
            self.memory.postpone(unit, self._settings.poll_every_s)
        except GatewayAway as error:  # no fault of the grader: a later reading finds the unit again
            logger.warning("%s is left for later: %s", unit, error)
            self.memory.postpone(unit, GATEWAY_PAUSE_S * random.uniform(1.0, 2.0))
        except GatewayFailure as error:
            self._failed(rule, unit, AttemptFailed(str(error), final=True))
        else:
            if outcome is None:
                self.memory.leave_alone(unit)
            else:
                self.memory.forget(unit)
            self._metrics.session(rule.name, outcome or "no_opinion")
            logger.info("%s: %s by rule %s", unit, outcome or "no opinion", rule.name)

    def _failed(self, rule: GraderRule, unit: str, error: AttemptFailed) -> None:
        attempts = self.memory.failures(unit) + 1
        if error.final or attempts >= rule.attempts:
            self.memory.bury(DeadLetter(unit, rule.name, attempts, str(error), clock.now()))
            self._metrics.session(rule.name, "dead_letter")
            logger.warning("%s is a dead letter of rule %s: %s", unit, rule.name, error)
            return
        limit_s = self._settings.backoff_limit_s
        self.memory.failed(unit, clock.backoff_s(attempts - 1, rule.backoff_s, limit_s))
        logger.info("attempt %d on %s failed, rule %s: %s", attempts, unit, rule.name, error)
