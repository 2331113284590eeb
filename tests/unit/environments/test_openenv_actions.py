"""What the model wrote becomes an action of an OpenEnv environment, or an error that it reads."""

from typing import Any

import pytest

from environments.errors import NoAction
from environments.openenv.actions import ActionSchema

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
