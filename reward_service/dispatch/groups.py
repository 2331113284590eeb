"""Rules that reward the sessions of a group by comparing them.

A group is judged when none of its sessions is open, or shortly before the first one that waits would expire.
Each reward's `source` has the session's place in the prompt, the number of places, and the seed of the order.
"""

import asyncio
import time
from collections.abc import Sequence

from reward_service.dispatch.attempt import AttemptFailed, SessionReward
from reward_service.dispatch.gateway import RewardOutcome, SessionGateway
from reward_service.dispatch.handler import NotReady
from reward_service.dispatch.posting import RewardPoster
from reward_service.dispatch.rules import RelativeRule
from reward_service.dispatch.sessions import GroupMember, WaitingSession
from reward_service.judging.answers import UnreadableVerdict
from reward_service.judging.models import JudgeAnswer, JudgeCall, JudgeModelClient, JudgeUnavailable
from reward_service.judging.relative import RelativePrompt, compare, scores_format
from reward_service.metrics import RewardMetrics

UNIT = "group/"
"""Ids have no slash, so no session's id is a group's unit."""


class GroupHandler:
    """Reads a group, has a model compare its sessions, and posts their rewards."""

    def __init__(
        self,
        rule: RelativeRule,
        judge: JudgeModelClient,
        gateway: SessionGateway,
        poster: RewardPoster,
        metrics: RewardMetrics,
    ) -> None:
        self.rule = rule
        self._judge, self._gateway, self._poster, self._metrics = judge, gateway, poster, metrics

    def unit_of(self, session: WaitingSession) -> str | None:
        matches = session.group_id is not None and self.rule.matches(session.task_id, session.metadata)
        return f"{UNIT}{session.group_id}" if matches else None

    async def handle(self, unit: str, attempt: int) -> str | None:
        members = await self._gateway.members(unit.removeprefix(UNIT))
        waiting = {each.session_id for each in members if each.waits}
        if not waiting:
            return RewardOutcome.ALREADY.value
        self._check_ready(members)
        transcripts = await self._transcripts([each.session_id for each in members if each.compared])
        if not waiting & transcripts.keys():
            return None
        seed = f"{self.rule.seed}/{unit}/{attempt}"
        comparison = compare(list(transcripts.values()), self.rule.rubric, seed)
        with self._metrics.attempt(self.rule.name):
            scores = await self._scores(comparison)
        for session_id, place, score in zip(transcripts, comparison.positions(), scores, strict=True):
            if session_id in waiting:
                source = f"{self.rule.kind}:{self.rule.name}:{place}/{len(scores)}:{seed}"
                await self._poster.post(session_id, SessionReward(score), self.rule.name, source)
        return RewardOutcome.STORED.value

    def _check_ready(self, members: Sequence[GroupMember]) -> None:
        """Raises NotReady; AttemptFailed if the group is too large for one prompt."""
        size = max(each.group_size or 0 for each in members)
        expire_at = min(each.expires_at for each in members if each.waits)
        unfinished = any(each.state == "open" for each in members) or len(members) < size
        if unfinished and expire_at - time.time() > self.rule.before_expiry_s:
            raise NotReady
        if len(members) > self.rule.most_members:
            raise AttemptFailed(f"the group has more than {self.rule.most_members} sessions", final=True)

    async def _transcripts(self, session_ids: Sequence[str]) -> dict[str, str]:
        """The texts of the sessions that have an answer. Raises AttemptFailed if they are too long."""
        found, chars = dict[str, str](), 0
        for session_id in session_ids:
            session = await self._gateway.session(session_id)
            if session is None or not session.branch:
                continue
            found[session_id] = session.transcript
            chars += len(found[session_id])
            if chars > self.rule.most_chars:
                raise AttemptFailed(f"the group has more than {self.rule.most_chars} characters", final=True)
        return found

    async def _scores(self, comparison: RelativePrompt) -> Sequence[float]:
        """Asks once more if the answer is malformed. Raises AttemptFailed."""
        try:
            async with asyncio.timeout(self.rule.timeout_s):
                answer = await self._ask(comparison.messages)
                try:
                    return comparison.read(answer.text)
                except UnreadableVerdict as fault:
                    again = await self._ask(comparison.again(answer.text, fault))
                return comparison.read(again.text)
        except TimeoutError as error:
            raise AttemptFailed(f"no answer within {self.rule.timeout_s} s") from error
        except (JudgeUnavailable, UnreadableVerdict) as error:
            raise AttemptFailed(f"the judge's answer: {error}") from error

    async def _ask(self, messages: Sequence[dict[str, str]]) -> JudgeAnswer:
        call = JudgeCall(self.rule.model, messages, scores_format(), {"temperature": 0.0}, self.rule.name)
        return await self._judge.ask(call)
