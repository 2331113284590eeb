"""What an observation of OpenEnv becomes for the model and for the trainer."""

from typing import Any

import pytest

from environments.errors import EnvironmentFault
from environments.openenv.observations import observation_of, result_of, step_of


def shown(field: str | None = None, **observation: Any) -> Any:
    return step_of(observation_of({"observation": observation}), field).messages[0]["content"]


def test_one_text_is_read_as_it_is() -> None:
    assert shown(text="hä?", error="", choices=[], metadata={"seed": 1}) == "hä?"
    assert shown(metadata={"message": "begin"}) == "begin"


def test_more_than_a_text_is_read_as_json() -> None:
    assert shown(text="hä?", left=0) == '{"text": "hä?", "left": 0}'
    assert shown(board=[0, 1]) == '{"board": [0, 1]}'
    assert shown() == "{}"


def test_the_model_reads_a_named_field_alone() -> None:
    assert shown("prompt", prompt="go", history=["a"]) == "go"
    with pytest.raises(EnvironmentFault, match="no field 'prompt', only text"):
        shown("prompt", text="go")


@pytest.mark.parametrize(
    ("given", "reward"), [(True, 1.0), (False, 0.0), (2, 2.0), (-0.5, -0.5), (None, None)]
)
def test_a_reward_is_a_number_or_no_opinion(given: Any, reward: float | None) -> None:
    step = step_of(observation_of({"observation": {}, "reward": given, "done": True}), None)
    assert (step.reward, step.terminated) == (reward, True)
    assert step.reward is None or type(step.reward) is float


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", [1]])
def test_another_reward_is_a_fault(reward: Any) -> None:
    with pytest.raises(EnvironmentFault):
        step_of(observation_of({"observation": {}, "reward": reward}), None)


def test_numbers_of_the_metadata_are_recorded() -> None:
    seen = observation_of({"observation": {"text": "a", "metadata": {"hit": True, "name": "x", "n": 2}}})
    assert step_of(seen, None).metrics == {"hit": 1.0, "n": 2.0}


def result(**observation: Any) -> Any:
    return result_of(observation_of({"observation": observation})).messages[0]


def test_the_result_of_a_tool_is_its_texts() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert result(result={"content": texts}) == {"role": "tool", "content": "a\nb"}
    assert result(result={"sum": 5})["content"] == '{"sum": 5}'
    assert result(error={"error_type": "tool_not_found", "message": "no"})["content"] == "error: no"
    with pytest.raises(EnvironmentFault, match="not reached"):
        result(error={"error_type": "transport_error", "message": "gone"})
