"""What a rule does with a unit of work, one session or one group of sessions: it has it graded, and posts the
rewards; while the gateway is away, it waits.

A group is graded when none of its sessions is open, or shortly before the first one that waits would expire.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from reward_service.dispatch.gateway import GatewayAway, RewardOutcome, SessionGateway
from reward_service.dispatch.reward_rules import GraderRule, HttpRule, RelativeRule
from reward_service.dispatch.waiting_sessions import (
    AttemptFailed,
    GroupGrader,
    GroupMember,
    SessionGrader,
    SessionReward,
    SessionToGrade,
    SourcedReward,
    WaitingSession,
)
from reward_service.reward_metrics import RewardMetrics
from rollout_queue import clock


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


logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""The pause before a reward that the gateway did not take is posted again; it doubles each time."""
POSTS = 12
"""How often a reward is posted while the gateway cannot take it; with pauses of up to a minute."""


@dataclass(frozen=True)
class RewardPoster:
    """Posts the rewards of all rules."""

    gateway: SessionGateway
    limit_s: float

    async def post(self, session_id: str, reward: SessionReward, key: str, source: str) -> RewardOutcome:
        """Post again while the gateway is away, so that the session need not be graded again. Raises
        GatewayFailure."""
        for post in range(POSTS - 1):
            try:
                return await self.gateway.reward(session_id, reward.value, key, source, reward.turn_id)
            except GatewayAway as error:
                logger.warning("the reward of session %s waits: %s", session_id, error)
            await clock.sleep(clock.backoff_s(post, FIRST_PAUSE_S, self.limit_s))
        return await self.gateway.reward(session_id, reward.value, key, source, reward.turn_id)


@dataclass(frozen=True)
class SessionHandler:
    """Reads a session, has it graded, and posts its reward."""

    rule: GraderRule
    grader: SessionGrader
    gateway: SessionGateway
    poster: RewardPoster
    metrics: RewardMetrics

    def unit_of(self, session: WaitingSession) -> str | None:
        return session.session_id if self.rule.matches(session.task_id, session.metadata) else None

    async def handle(self, unit: str, attempt: int) -> str | None:
        session = await self.gateway.session(unit)
        if session is None or not session.waits:
            return str((RewardOutcome.GONE if session is None else RewardOutcome.ALREADY).value)
        with self.metrics.attempt(self.rule.name):
            try:
                async with clock.timeout(self.rule.timeout_s):
                    reward = await self.grader.grade(session, attempt)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within {self.rule.timeout_s} s") from error
        if reward is None:
            return None
        source = f"{self.rule.kind}:{self.rule.name}"
        outcome = await self.poster.post(unit, reward, self.rule.name, source)
        return str(outcome.value)


UNIT = "group/"
"""Ids have no slash, so no session's id is a group's unit."""


@dataclass(frozen=True)
class GroupHandler:
    """Reads a group, has it graded, and posts the rewards of its sessions."""

    rule: RelativeRule | HttpRule
    grader: GroupGrader
    gateway: SessionGateway
    poster: RewardPoster
    metrics: RewardMetrics

    def unit_of(self, session: WaitingSession) -> str | None:
        matches = session.group_id is not None and self.rule.matches(session.task_id, session.metadata)
        return f"{UNIT}{session.group_id}" if matches else None

    async def handle(self, unit: str, attempt: int) -> str | None:
        members = await self.gateway.members(unit.removeprefix(UNIT))
        waiting = {each.session_id for each in members if each.waits}
        if not waiting:
            return RewardOutcome.ALREADY.value
        self._check_ready(members)
        sessions = await self._sessions([each.session_id for each in members if each.compared])
        if not any(each.session_id in waiting for each in sessions):
            return None
        given = await self._graded(sessions, unit, attempt)
        opinions = {each: given[each] for each in given if each in waiting}
        for session_id, sourced in opinions.items():
            if sourced is not None:
                await self.poster.post(session_id, sourced.reward, self.rule.name, sourced.source)
        # The group is left alone if a session has no opinion, until a further one waits: the grader would be
        # asked again and again.
        return None if None in opinions.values() else RewardOutcome.STORED.value

    def _check_ready(self, members: Sequence[GroupMember]) -> None:
        """Raises NotReady; AttemptFailed if the group is too large for one call."""
        size = max(each.group_size or 0 for each in members)
        first = min((each for each in members if each.waits), key=lambda each: each.expires_at)
        # With a short life, the others have at least half of it to end.
        early_s = min(self.rule.before_expiry_s, (first.expires_at - first.created_at) / 2)
        unfinished = any(each.state == "open" for each in members) or len(members) < size
        if unfinished and first.expires_at - clock.now() > early_s:
            raise NotReady
        if len(members) > self.rule.most_members:
            raise AttemptFailed(f"the group has more than {self.rule.most_members} sessions", final=True)

    async def _sessions(self, session_ids: Sequence[str]) -> Sequence[SessionToGrade]:
        """The sessions that have an answer, with the turns up to it. Raises AttemptFailed if they are too
        long."""
        found, chars = list[SessionToGrade](), 0
        for session_id in session_ids:
            session = await self.gateway.session(session_id)
            if session is None or not session.branch:
                continue
            found.append(msgspec.structs.replace(session, turns=list(session.branch)))
            chars += len(session.transcript)
            if chars > self.rule.most_chars:
                raise AttemptFailed(f"the group has more than {self.rule.most_chars} characters", final=True)
        return found

    async def _graded(
        self, sessions: Sequence[SessionToGrade], unit: str, attempt: int
    ) -> Mapping[str, SourcedReward | None]:
        """The reward of each session, by its id. Raises AttemptFailed."""
        with self.metrics.attempt(self.rule.name):
            try:
                async with clock.timeout(self.rule.timeout_s):
                    rewards = await self.grader.grade(sessions, unit, attempt)
            except TimeoutError as error:
                raise AttemptFailed(f"no answer within {self.rule.timeout_s} s") from error
        return {each.session_id: reward for each, reward in zip(sessions, rewards, strict=True)}
