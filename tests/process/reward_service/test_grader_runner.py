"""Graders that ask a model, and graders in graders: their rewards and errors."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from reward_service.grader_runner import GraderRunner
from reward_service.graders.grade import Grade, TokenUsage, sample_of
from reward_service.graders.grader_objects import AnyGrader
from reward_service.judging import JudgeAnswer, JudgeUnavailable
from reward_service.python_sandbox import PythonProcesses, PythonSettings
from tests.support.reward_service import graders
from tests.support.reward_service.graders import LABEL
from tests.support.reward_service.scripted_judge import ScriptedModel, said

SCORE = graders.SCORE | {
    "range": [0, 2],
    "input": [
        {
            "role": "developer",
            "content": ["Be strict.", {"type": "input_text", "text": "Score {{item.what}}."}],
        },
        {"role": "user", "content": "{{sample.output_text}}"},
    ],
    "sampling_params": {"max_completions_tokens": 5, "temperature": 0.5},
}
CHECK = graders.CHECK | {"reference": "hi"}


async def ran(
    grader: dict[str, Any], *answers: JudgeAnswer | Exception, text: str = "hi"
) -> tuple[Grade, ScriptedModel]:
    model = ScriptedModel(list(answers))
    runner = GraderRunner(PythonProcesses(PythonSettings()), model)
    parsed: AnyGrader = TypeAdapter(AnyGrader).validate_python(grader)
    return await runner.run(parsed, {"sample": sample_of(text), "item": {"what": "style"}}), model


async def test_a_score_model_is_asked_with_the_rendered_messages() -> None:
    grade, model = await ran(SCORE, said('{"steps": [], "result": 1.5}'))
    assert grade == Grade(1.5, usage={"judge-1": TokenUsage(7, 3, 10, 0)}, sampled_model="judge-1")
    (call,) = model.calls
    assert call.messages == [
        {"role": "developer", "content": "Be strict.\nScore style."},
        {"role": "user", "content": "hi"},
    ]
    assert call.sampling == {"max_completion_tokens": 5, "temperature": 0.5}
    assert call.response_format["json_schema"]["schema"]["properties"]["result"] == {"type": "number"}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"result": 9}', 2.0),
        ('{"result": -1}', 0.0),
        ("1.25", 1.25),
        (' "0.5" ', 0.5),
        ('{"result": "1"}', 1),
    ],
)
async def test_a_score_is_cut_to_its_range(answer: str, reward: float) -> None:
    grade, _ = await ran(SCORE, said(answer))
    assert (grade.reward, grade.errors.any) == (reward, False)


@pytest.mark.parametrize(
    "answer",
    [
        *("", "good", "NaN", "[1]", "[" * 10**5),
        *('{"result": null}', '{"result": true}', '{"score": 1}', '{"result": 1e999}'),
    ],
)
async def test_an_answer_without_a_number_is_an_error_and_no_score(answer: str) -> None:
    grade, _ = await ran(SCORE, said(answer))
    assert (grade.reward, str(grade.errors)) == (0.0, "model_grader_parse_error")


async def test_refusals_cut_answers_and_broken_servers_are_told_apart() -> None:
    refused, _ = await ran(SCORE, said("", refusal="no"))
    assert str(refused.errors) == "model_grader_refusal_error"
    cut, _ = await ran(SCORE, said('{"steps": [', cut_off=True))
    assert (cut.errors.truncated_observation_error, cut.errors.model_grader_parse_error) == (True, True)
    broken, _ = await ran(SCORE, JudgeUnavailable("HTTP 500: overloaded"))
    assert broken.errors.model_grader_server_error_details == "HTTP 500: overloaded"


@pytest.mark.parametrize(
    ("answer", "reward", "error"),
    [
        ('{"result": "good"}', 1.0, ""),
        ('{"result": "bad"}', 0.0, ""),
        ("good", 1.0, ""),
        ('{"result": "fine"}', 0.0, "model_grader_parse_error"),
    ],
)
async def test_a_label_that_passes_has_1_and_another_one_is_an_error(
    answer: str, reward: float, error: str
) -> None:
    grade, model = await ran(LABEL, said(answer))
    assert (grade.reward, str(grade.errors)) == (reward, error)
    schema = model.calls[0].response_format["json_schema"]["schema"]
    assert schema["properties"]["result"]["enum"] == ["good", "bad"]


async def test_a_multi_combines_rewards_usage_and_errors() -> None:
    parts = {"c": CHECK, "m": SCORE, "l": LABEL}
    multi = {"type": "multi", "graders": parts, "calculate_output": "c + m * l"}
    grade, _ = await ran(multi, said("0.5"), said("good"))
    assert (grade.reward, dict(grade.sub_rewards)) == (1.5, {"c": 1.0, "m": 0.5, "l": 1.0})
    assert grade.usage == {"judge-1": TokenUsage(14, 6, 20, 0)}
    failed, _ = await ran(multi, JudgeUnavailable("down"), said("fine"))
    assert str(failed.errors) == (
        "model_grader_server_error, model_grader_server_error_details: down, model_grader_parse_error"
    )


@pytest.mark.parametrize(
    ("grader", "error"),
    [
        (CHECK | {"reference": "{{item.other}}"}, "invalid_variable_error"),
        (CHECK | {"input": "{{sample.output_json.x}}"}, "sample_parse_error"),
        ({"type": "multi", "graders": {"c": CHECK}, "calculate_output": "1 / (c - 1)"}, "other_error"),
        ({"type": "python", "source": "def grade(sample, item): return None"}, "python_grader_runtime_error"),
        ({"type": "python", "source": "import os; os._exit(1)"}, "python_grader_server_error"),
    ],
)
async def test_a_sample_that_cannot_be_graded_has_an_error(grader: dict[str, Any], error: str) -> None:
    grade, _ = await ran(grader)
    assert grade.reward == 0.0
    assert str(grade.errors).startswith(error)
