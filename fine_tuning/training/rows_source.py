"""The rows of a file as environments of one answer: the grader's score of the answer is its reward."""

from collections.abc import Sequence
from typing import Any

from openai import APIStatusError
from openai.types.chat import ChatCompletionMessage

from environments.episodes.agent import Agent
from environments.episodes.looped import CONTEXT_IS_FULL
from environments.errors import EnvironmentFault
from environments.step import Description, Step
from environments.task import Task, task_id
from fine_tuning.files.rows import RowFile, TrainingRow
from fine_tuning.training.grading import AnswerGrader, GradeUnavailable
from rollout_queue import clock


class RowEnvironment:
    """One row. The model answers it once; the answer and its grade may take `answer_s` seconds."""

    def __init__(self, rows: RowFile, grader: AnswerGrader, answer_s: float) -> None:
        self._rows, self._grader, self.answer_s = rows, grader, answer_s
        self._row: TrainingRow | None = None

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self._row.tools if self._row else ()

    async def reset(self, task: Task) -> Step:
        self._row = self._rows.row(int(task.data["row"]))
        return Step(messages=tuple(self._row.messages))

    async def graded(self, message: ChatCompletionMessage, finish_reason: str) -> Step:
        """The end, with the grader's reward. Raises EnvironmentFault if there is none: that is never a 0."""
        item = self._row.item if self._row else {}
        try:
            reward = await self._grader.reward(message, finish_reason, item)
        except GradeUnavailable as error:
            raise EnvironmentFault(f"the grader gave no reward: {error}") from error
        return Step(reward=reward, terminated=True)

    async def step(self, answer: str) -> Step:
        return await self.graded(ChatCompletionMessage(role="assistant", content=answer), "stop")

    async def call(self, name: str, arguments: str) -> Step:
        raise EnvironmentFault("the tools of a row are offered, and not run")

    async def close(self) -> None: ...


class RowSource:
    """Every row of a file is a task."""

    def __init__(self, name: str, rows: RowFile, grader: AnswerGrader, answer_s: float) -> None:
        self.description = Description(name=name, task_count=len(rows))
        self._name, self._rows, self._grader, self._answer_s = name, rows, grader, answer_s

    async def tasks(self, seed: int, start: int, count: int) -> Sequence[Task]:
        last = min(len(self._rows), start + count)
        return [Task(task_id(self._name, number), {"row": number}) for number in range(start, last)]

    def environment(self) -> RowEnvironment:
        return RowEnvironment(self._rows, self._grader, self._answer_s)

    async def __aenter__(self) -> "RowSource":
        return self

    async def __aexit__(self, *error: object) -> None: ...


async def answer_once(agents: list[Agent], environment: RowEnvironment, task: Task, max_turns: int) -> Step:
    """The loop of a row: its messages, one answer, and the grade. A call of a tool is an answer as well.
    Raises EnvironmentFault for every answer without a reward, so that a job without rewards fails."""
    (agent,) = agents
    agent.hears((await environment.reset(task)).messages)
    try:
        async with clock.timeout(environment.answer_s):
            message = await agent.answer(environment.tools)
            step = await environment.graded(message, agent.finish_reason)
    except TimeoutError as error:
        raise EnvironmentFault(f"no answer with a grade within {environment.answer_s} s") from error
    except APIStatusError as error:
        if error.code != CONTEXT_IS_FULL:
            raise
        raise EnvironmentFault("the row does not fit into the model's context") from error
    agent.earns(step.reward, step.ended)
    return step
