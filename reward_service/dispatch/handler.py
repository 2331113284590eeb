"""What a rule does with a unit of work: one session, or one group of sessions."""

from typing import Protocol

from reward_service.dispatch.rules import GraderRule
from reward_service.dispatch.sessions import WaitingSession


class NotReady(Exception):
    """The unit cannot be graded yet. That is no failed attempt."""


class RuleHandler(Protocol):
    """Rewards for one rule."""

    @property
    def rule(self) -> GraderRule: ...

    def unit_of(self, session: WaitingSession) -> str | None:
        """The unit to which a session of the list belongs; None if the rule does not reward it."""
        ...

    async def handle(self, unit: str, attempt: int) -> str | None:
        """Grade and reward a unit. Returns what became of it; None if the grader has no opinion.

        Raises AttemptFailed, NotReady, GatewayFailure.
        """
        ...
