"""Grades an answer in this process, with the graders of the reward service."""

from collections.abc import Mapping
from typing import Any

from openai.types.chat import ChatCompletionMessage

from reward_service.graders.objects import AnyGrader
from reward_service.graders.samples import sample_of
from reward_service.grading.runner import GraderRunner


class GradeUnavailable(Exception):
    """The grader could not score the answer."""


class AnswerGrader:
    """The grader of one job."""

    def __init__(self, runner: GraderRunner, grader: AnyGrader) -> None:
        self._runner, self._grader = runner, grader

    async def reward(
        self, message: ChatCompletionMessage, finish_reason: str, item: Mapping[str, Any]
    ) -> float:
        """Raises GradeUnavailable: a missing reward is not 0."""
        shown = message.model_dump(exclude_none=True)
        sample = sample_of(message.content or "", shown, finish_reason)
        grade = await self._runner.run(self._grader, {"sample": sample, "item": item})
        if grade.errors.any:
            raise GradeUnavailable(str(grade.errors))
        return grade.reward
