"""Actions, observations and the waiting line of OpenEnv environments."""

import asyncio
from typing import Any

import pytest

from environments.errors import EnvironmentFault, NoAction
from environments.openenv_connection import ActionSchema, ServerIsFull, WaitingLine
from environments.openenv_server import observation_of, result_of, step_of

# What the model wrote becomes an action, or an error that it reads


METADATA = {"type": "object"}


def schema(required: tuple[str, ...] | None = None, **fields: Any) -> ActionSchema:
    """Without `required`, all fields are."""
    needed = list(fields if required is None else required)
    return ActionSchema({"properties": {"metadata": METADATA, **fields}, "required": needed})


TEXT = schema(message={"type": "string"})
NUMBER = schema(number={"type": "integer"})
TWO = schema(row={"type": "integer"}, column={"type": "integer"})


@pytest.mark.parametrize("answer", ['{"a": 1}', ' {"a": 1}\n', '```json\n{"a": 1}\n```'])
def test_an_object_is_the_action(answer: str) -> None:
    assert [each.action_of(answer) for each in (TEXT, NUMBER, TWO)] == [{"a": 1}] * 3


def test_a_text_is_the_only_required_field() -> None:
    assert TEXT.action_of(" as it is {}\n") == {"message": " as it is {}\n"}
    assert TEXT.action_of("7") == {"message": "7"}
    assert schema(("a",), a={"type": "string"}, b={"type": "string"}).action_of("x") == {"a": "x"}


@pytest.mark.parametrize(
    ("field", "answer", "value"),
    [
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "number"}, "7", 7),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "string", "enum": ["up", "down"]}, " up\n", "up"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "seven", "seven"),
        ({}, "[1]", [1]),
        ({}, "left", "left"),
    ],
)
def test_the_field_has_its_type(field: dict[str, Any], answer: str, value: Any) -> None:
    action = schema(move=field).action_of(answer)
    assert action == {"move": value}
    assert type(action["move"]) is type(value)


def test_a_reference_is_followed() -> None:
    given = {
        "properties": {"move": {"$ref": "#/$defs/Move"}},
        "required": ["move"],
        "$defs": {"Move": {"enum": ["up", "down"], "type": "string"}},
    }
    assert ActionSchema(given).action_of("up\n") == {"move": "up"}


@pytest.mark.parametrize("answer", ["seven", "7.5", "true", "NaN", "[7]", ""])
def test_a_text_of_another_type_is_an_error(answer: str) -> None:
    with pytest.raises(NoAction, match="is no integer, which the field 'number' needs"):
        NUMBER.action_of(answer)


def test_an_object_in_a_text_counts_if_the_text_cannot_be_the_field() -> None:
    assert TWO.action_of('first {"row": 1}, or {"row": 2, "column": {"a": 3}}.') == {
        "row": 2,
        "column": {"a": 3},
    }
    with pytest.raises(NoAction, match="a JSON object with the fields row, column"):
        TWO.action_of("the middle { of the board")


@pytest.mark.parametrize("answer", ["[" * 100_000, "{" * 100_000, '{"a":' * 100_000])
def test_a_hostile_text_is_an_error(answer: str) -> None:
    with pytest.raises(NoAction):
        TWO.action_of(answer)


def test_a_text_is_no_call_of_a_tool() -> None:
    called = {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}}
    for tools in (schema(), schema(("tool_name",), **called)):
        assert tools.of_tools
        with pytest.raises(NoAction, match="a call of one of the tools"):
            tools.action_of("add")
    assert not TEXT.of_tools


# What an observation becomes for the model and for the trainer


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


# Episodes that wait while a server is full


async def test_who_came_first_gets_the_next_place() -> None:
    line, places, entered = WaitingLine(waits_s=60.0), 0, []

    async def enter(number: int) -> None:
        async def attempt() -> None:
            nonlocal places
            if not places:
                raise ServerIsFull
            places -= 1
            entered.append(number)

        await line.enter(attempt)

    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)  # it takes its place in the line
    places = 3
    line.freed()
    late = asyncio.create_task(enter(3))
    await asyncio.sleep(0)  # it comes last
    places = 4
    await asyncio.gather(*waiting, late)
    assert entered == [0, 1, 2, 3]


async def test_who_came_first_is_first_although_nobody_tells_of_room() -> None:
    line, entered, full = WaitingLine(waits_s=60.0), list[int](), True

    async def enter(number: int) -> None:
        async def attempt() -> None:
            if full:
                raise ServerIsFull
            entered.append(number)

        await line.enter(attempt)

    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(enter(number)))
        await asyncio.sleep(0)  # it takes its place in the line
    full = False
    await asyncio.gather(*waiting)
    assert entered == [0, 1, 2, 3]


async def test_a_server_that_lets_nobody_in_is_a_fault() -> None:
    async def attempt() -> None:
        raise ServerIsFull("2/2 sessions active")

    with pytest.raises(EnvironmentFault, match="let nobody in for 0 s: 2/2 sessions active"):
        await WaitingLine(waits_s=0.01).enter(attempt)


async def test_an_attempt_that_fails_otherwise_leaves_the_line() -> None:
    line = WaitingLine(waits_s=60.0)
    said = iter([ServerIsFull(), EnvironmentFault("gone")])

    async def attempt() -> None:
        raise next(said)

    with pytest.raises(EnvironmentFault, match="gone"):
        await line.enter(attempt)


async def test_a_cancelled_episode_leaves_the_line() -> None:
    line = WaitingLine(waits_s=60.0)
    tried = asyncio.Event()

    async def refused() -> None:
        tried.set()
        raise ServerIsFull

    async def let_in() -> str:
        return "in"

    waiting = asyncio.create_task(line.enter(refused))
    await tried.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await line.enter(let_in) == "in"
