"""Rules that reward each session by itself."""

from reward_service.dispatch.attempt import AttemptFailed, SessionGrader
from reward_service.dispatch.gateway import RewardOutcome, SessionGateway
from reward_service.dispatch.posting import RewardPoster
from reward_service.dispatch.rules import GraderRule
from reward_service.dispatch.sessions import WaitingSession
from reward_service.metrics import RewardMetrics
from rollout_queue import clock


class SessionHandler:
    """Reads a session, has it graded, and posts its reward."""

    def __init__(
        self,
        rule: GraderRule,
        grader: SessionGrader,
        gateway: SessionGateway,
        poster: RewardPoster,
        metrics: RewardMetrics,
    ) -> None:
        self.rule = rule
        self._grader, self._gateway, self._poster, self._metrics = grader, gateway, poster, metrics

    def unit_of(self, session: WaitingSession) -> str | None:
        return session.session_id if self.rule.matches(session.task_id, session.metadata) else None

    async def handle(self, unit: str, attempt: int) -> str | None:
        session = await self._gateway.session(unit)
        if session is None or not session.waits:
            return str((RewardOutcome.GONE if session is None else RewardOutcome.ALREADY).value)
        with self._metrics.attempt(self.rule.name):
            try:
                async with clock.timeout(self.rule.timeout_s):
                    reward = await self._grader.grade(session, attempt)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within {self.rule.timeout_s} s") from error
        if reward is None:
            return None
        source = f"{self.rule.kind}:{self.rule.name}"
        outcome = await self._poster.post(unit, reward, self.rule.name, source)
        return str(outcome.value)
