"""A model that compares the sessions of a group.

Each reward's `source` has the session's place in the prompt, the number of places, and the seed of the order.
"""

from collections.abc import Sequence

from reward_service.dispatch.attempt import AttemptFailed, SessionReward, SourcedReward
from reward_service.dispatch.rules import RelativeRule
from reward_service.dispatch.sessions import SessionToGrade
from reward_service.judging.answers import UnreadableVerdict
from reward_service.judging.models import JudgeAnswer, JudgeCall, JudgeModelClient, JudgeUnavailable
from reward_service.judging.relative import RelativePrompt, compare, scores_format


class RelativeGroupGrader:
    """Asks a rule's model."""

    def __init__(self, rule: RelativeRule, judge: JudgeModelClient) -> None:
        self._rule, self._judge = rule, judge

    async def grade(
        self, sessions: Sequence[SessionToGrade], unit: str, attempt: int
    ) -> Sequence[SourcedReward]:
        seed = f"{self._rule.seed}/{unit}/{attempt}"
        comparison = compare([each.transcript for each in sessions], self._rule.rubric, seed)
        scores = await self._scores(comparison)
        source = f"{self._rule.kind}:{self._rule.name}"
        return [
            SourcedReward(SessionReward(score), f"{source}:{place}/{len(scores)}:{seed}")
            for place, score in zip(comparison.positions(), scores, strict=True)
        ]

    async def _scores(self, comparison: RelativePrompt) -> Sequence[float]:
        """Asks once more if the answer is malformed. Raises AttemptFailed."""
        try:
            answer = await self._ask(comparison.messages)
            try:
                return comparison.read(answer.text)
            except UnreadableVerdict as fault:
                again = await self._ask(comparison.again(answer.text, fault))
            return comparison.read(again.text)
        except (JudgeUnavailable, UnreadableVerdict) as error:
            raise AttemptFailed(f"the judge's answer: {error}") from error

    async def _ask(self, messages: Sequence[dict[str, str]]) -> JudgeAnswer:
        call = JudgeCall(self._rule.model, messages, scores_format(), {"temperature": 0.0}, self._rule.name)
        return await self._judge.ask(call)
