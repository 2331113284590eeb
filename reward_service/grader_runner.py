"""Runs a grader object: the arithmetic here, Python in a process of its own, models over HTTP.

grader, sample, item ── GraderRunner.run ──▶ Grade

A grader that cannot give a score has the reward 0 and an error, as in OpenAI's API. Whoever rewards a session
looks at the errors first.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from reward_service.graders.comparisons import string_check, text_similarity
from reward_service.graders.grade import (
    FormulaUndefined,
    Grade,
    GradeErrors,
    SampleNotJson,
    TextTooLong,
    UngradableSample,
    UnknownVariable,
    UnusableSource,
)
from reward_service.graders.grader_objects import (
    AnyGrader,
    JudgeMessage,
    JudgeSampling,
    LabelModelGrader,
    MultiGrader,
    PythonGrader,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
)
from reward_service.graders.grader_templates import Variables, parse_template
from reward_service.judging import (
    JudgeAnswer,
    JudgeCall,
    JudgeModelClient,
    JudgeUnavailable,
    UnreadableVerdict,
    label_format,
    read_label,
    read_score,
    score_format,
)
from reward_service.python_sandbox import PythonProcesses

FAULTS: dict[type[UngradableSample], str] = {
    UnknownVariable: "invalid_variable_error",
    SampleNotJson: "sample_parse_error",
    FormulaUndefined: "other_error",
    TextTooLong: "other_error",
}
OF_SERVICE = ("not_started", "no_isolation")
"""Ends of a Python grader's process that are no fault of its source."""


class GraderRunner:
    """Runs graders of every type."""

    def __init__(self, python: PythonProcesses, judge: JudgeModelClient) -> None:
        self._python, self._judge = python, judge

    def asking(self, judge: JudgeModelClient) -> "GraderRunner":
        """A runner that asks models otherwise."""
        return GraderRunner(self._python, judge)

    async def run(self, grader: AnyGrader, variables: Variables) -> Grade:
        """`variables`: the namespaces `sample` and `item`."""
        try:
            match grader:
                case StringCheckGrader():
                    texts = _rendered(grader, variables)
                    return Grade(string_check(grader.operation, *texts))
                case TextSimilarityGrader():
                    texts = _rendered(grader, variables)
                    return Grade(await asyncio.to_thread(text_similarity, grader.evaluation_metric, *texts))
                case PythonGrader():
                    return await self._run_python(grader, variables)
                case ScoreModelGrader():
                    return await self._run_score_model(grader, variables)
                case LabelModelGrader():
                    return await self._run_label_model(grader, variables)
                case MultiGrader():
                    return await self._run_multi(grader, variables)
        except UngradableSample as fault:
            return Grade.failed(**{FAULTS[type(fault)]: True})

    async def check(self, grader: AnyGrader, where: str = "grader") -> None:
        """Load the source of each Python grader in it. `where`: the grader's path in what the caller gave.

        Raises UnusableSource.
        """
        if isinstance(grader, MultiGrader):
            for name, each in grader.graders.items():
                await self.check(each, f"{where}.graders.{name}")
        elif isinstance(grader, PythonGrader):
            await self._check_source(grader.source, f"{where}.source")

    async def _check_source(self, source: str, where: str) -> None:
        """Raises UnusableSource. Where no Python grader can run, its sources are not looked at."""
        result = await self._python.check(source)
        if result.ended not in (None, *OF_SERVICE):
            raise UnusableSource(where, f"the process that loads it gives no answer: {result.ended}")
        if result.error is not None:
            raise UnusableSource(where, result.error)

    async def _run_python(self, grader: PythonGrader, variables: Variables) -> Grade:
        result = await self._python.grade(grader.source, variables["sample"], variables["item"])
        if result.ended is not None:
            timeout = result.ended == "timeout"
            return Grade.failed(
                python_grader_server_error=True,
                python_grader_server_error_type=result.ended,
                unresponsive_reward_error=timeout,
            )
        if result.value is None:
            details = result.error or "grade returned None, which is no finite number"
            return Grade.failed(python_grader_runtime_error=True, python_grader_runtime_error_details=details)
        return Grade(result.value)

    async def _run_score_model(self, grader: ScoreModelGrader, variables: Variables) -> Grade:
        low, high = grader.range

        def reward(answer: str) -> float:
            return min(max(read_score(answer), low), high)

        return await self._ask(grader, score_format(), reward, variables)

    async def _run_label_model(self, grader: LabelModelGrader, variables: Variables) -> Grade:
        def reward(answer: str) -> float:
            return float(read_label(answer, grader.labels) in grader.passing_labels)

        return await self._ask(grader, label_format(grader.labels), reward, variables)

    async def _ask(
        self,
        grader: ScoreModelGrader | LabelModelGrader,
        response_format: Mapping[str, Any],
        reward: Callable[[str], float],
        variables: Variables,
    ) -> Grade:
        messages = [_message(each, variables) for each in grader.input]
        sampling = _sampling(grader.sampling_params)
        call = JudgeCall(grader.model, messages, response_format, sampling, grader.name or grader.type)
        try:
            answer = await self._judge.ask(call)
        except JudgeUnavailable as error:
            return Grade.failed(model_grader_server_error=True, model_grader_server_error_details=str(error))
        return _judged(answer, reward)

    async def _run_multi(self, grader: MultiGrader, variables: Variables) -> Grade:
        """The graders run one after the other: what bounds their number of calls at once is the caller."""
        grades = {name: await self.run(each, variables) for name, each in grader.graders.items()}
        rewards = {name: grade.reward for name, grade in grades.items()}
        errors = GradeErrors()
        usage = dict[str, Any]()
        for grade in grades.values():
            errors = errors.joined(grade.errors)
            for model, tokens in grade.usage.items():
                usage[model] = usage[model] + tokens if model in usage else tokens
        try:
            reward = grader.formula.value(rewards)
        except FormulaUndefined:
            reward, errors = 0.0, errors.joined(GradeErrors(other_error=True))
        return Grade(reward, errors, rewards, usage)


def _rendered(grader: StringCheckGrader | TextSimilarityGrader, variables: Variables) -> tuple[str, str]:
    """The input and the reference."""
    text, reference = (parse_template(each).render(variables) for each in (grader.input, grader.reference))
    return text, reference


def _message(message: JudgeMessage, variables: Variables) -> dict[str, str]:
    return {"role": message.role, "content": parse_template(message.text).render(variables)}


def _sampling(params: JudgeSampling | None) -> dict[str, Any]:
    """The fields of a chat completion; OpenAI's graders write one of them differently."""
    given = params.model_dump(exclude_none=True) if params else {}
    if "max_completions_tokens" in given:
        given["max_completion_tokens"] = given.pop("max_completions_tokens")
    return given


def _judged(answer: JudgeAnswer, reward: Callable[[str], float]) -> Grade:
    """The grade that an answer means."""
    facts: dict[str, Any] = {"usage": {answer.model: answer.usage}, "sampled_model": answer.model}
    if answer.refusal:
        return Grade(0.0, GradeErrors(model_grader_refusal_error=True), **facts)
    try:
        return Grade(reward(answer.text), **facts)
    except UnreadableVerdict:
        errors = GradeErrors(model_grader_parse_error=True, truncated_observation_error=answer.cut_off)
        return Grade(0.0, errors, **facts)
