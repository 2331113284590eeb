"""A grader that cannot work is refused when it arrives, with the field at fault."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from reward_service.graders.grader_objects import AnyGrader, MultiGrader, every_grader
from tests.support.reward_service.graders import CHECK, LABEL, MULTI, PYTHON, SCORE, SIMILAR

IMAGE = {"type": "input_image", "image_url": "x"}
GRADER: TypeAdapter[AnyGrader] = TypeAdapter(AnyGrader)


@pytest.mark.parametrize(
    "grader",
    [
        CHECK,
        SIMILAR | {"pass_threshold": 0.5},
        SCORE
        | {
            "range": [-1, 1.5],
            "sampling_params": {"temperature": 1, "max_completions_tokens": 10, "seed": 4},
        },
        LABEL,
        MULTI,
        PYTHON | {"image_tag": "2025-05-08"},
        LABEL | {"input": [{"role": "user", "content": {"type": "input_text", "text": "{{item.x}}"}}]},
        MULTI | {"graders": {"m": SCORE, "l": LABEL}, "calculate_output": "min(m, l)"},
    ],
)
def test_openais_examples_are_graders(grader: dict[str, Any]) -> None:
    assert GRADER.validate_python(grader).type == grader["type"]


def test_a_single_grader_in_a_multi_has_its_own_name() -> None:
    grader = GRADER.validate_python(MULTI | {"graders": CHECK, "calculate_output": "1 - equal"})
    assert isinstance(grader, MultiGrader)
    assert [each.name for each in every_grader(grader)] == ["both", "equal"]
    assert grader.formula.value({"equal": 0.25}) == 0.75


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (CHECK | {"operation": "regex"}, "operation"),
        (CHECK | {"input": "{{other.x}}"}, "is no variable"),
        (CHECK | {"input": 3}, "input"),
        (CHECK | {"more": 1}, "more"),
        (CHECK | {"name": "\ud800"}, "name"),
        ({"type": "regex"}, "type"),
        ({}, "type"),
        (SIMILAR | {"evaluation_metric": "cosine"}, "needs an embedding model"),
        (SIMILAR | {"evaluation_metric": "meteor"}, "needs WordNet"),
        (SCORE | {"range": [1, 0]}, "lower"),
        (SCORE | {"range": [0]}, "range"),
        (SCORE | {"range": [0, float("inf")]}, "range"),
        (SCORE | {"input": []}, "input"),
        (SCORE | {"input": [{"role": "user", "content": IMAGE}]}, "content"),
        (LABEL | {"passing_labels": ["other"]}, "not one of the labels"),
        (MULTI | {"graders": {"c": MULTI}}, "multi"),
        (MULTI | {"graders": [CHECK]}, "graders"),
        (MULTI | {"graders": {}}, "graders"),
        (MULTI | {"graders": {"a b": CHECK}}, "cannot name"),
        (MULTI | {"graders": {"if": CHECK}, "calculate_output": "1"}, "cannot name"),
        (MULTI | {"graders": {f"g{i}": CHECK for i in range(33)}, "calculate_output": "g0"}, "graders"),
        (MULTI | {"calculate_output": "equal + other"}, "no such grader"),
        (PYTHON | {"source": "x" * (2**18 + 1)}, "source"),
    ],
)
def test_a_grader_that_cannot_work_is_refused(grader: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GRADER.validate_python(grader)
