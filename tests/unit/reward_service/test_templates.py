"""Templates have OpenAI's variables, and are bounded."""

import pytest

from reward_service.graders.faults import MalformedGrader, SampleNotJson, TextTooLong, UnknownVariable
from reward_service.graders.samples import sample_of
from reward_service.graders.templates import parse_template

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SAMPLE = sample_of(
    '{"name": "Ann", "tags": ["x", {"deep": 2}]}', {"role": "assistant", "content": "", "tool_calls": [CALL]}
)
ITEM = {
    "answer": "42",
    "number": 1.0,
    "nested": {"a b": ["é"]},
    "yes": True,
    "nothing": None,
    "trap": "{{item.answer}}",
}


def rendered(text: str) -> str:
    return parse_template(text).render({"sample": SAMPLE, "item": ITEM})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("no variable", "no variable"),
        ("{{item.answer}}", "42"),
        ("a {{ item.answer }} b {{item.answer}}", "a 42 b 42"),
        ("{{sample.output_text}}", '{"name": "Ann", "tags": ["x", {"deep": 2}]}'),
        ("{{sample.output_json.name}}", "Ann"),
        ("{{sample.output_json.tags[1].deep}}", "2"),
        ("{{sample.output_tools[0].function.name}}", "add"),
        ("{{sample.choices[0].message.tool_calls[0].id}}", "c1"),
        ("{{item.nested['a b'][0]}}", "é"),
        ('{{item["nested"]}}', '{"a b": ["é"]}'),
        ("{{item.number}} {{item.yes}}", "1.0 true"),
        ("{{item.trap}}", "{{item.answer}}"),
        ("{{ is not closed", "{{ is not closed"),
        ("a } } b {x}", "a } } b {x}"),
    ],
)
def test_variables_are_replaced_by_their_values(template: str, text: str) -> None:
    assert rendered(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{foo.bar}}",
        "{{item}}",
        "{{item.}}",
        "{{}}",
        "{{item.a b}}",
        "{{item[-1]}}",
        "{{item.a()}}",
        "{{item.a|b}}",
    ],
)
def test_a_variable_that_openai_does_not_have_is_refused(template: str) -> None:
    with pytest.raises(MalformedGrader, match="is no variable"):
        parse_template(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{item.other}}",
        "{{item.answer.x}}",
        "{{item.answer[0]}}",
        "{{item.nested[0]}}",
        "{{sample.output_tools[1]}}",
        "{{item.nothing}}",
    ],
)
def test_a_variable_without_a_value_is_named(template: str) -> None:
    with pytest.raises(UnknownVariable, match="has no value"):
        rendered(template)


def test_an_output_that_is_no_json_is_told_from_a_missing_variable() -> None:
    template = parse_template("{{sample.output_json.name}}")
    for text in ("not json", '{"name": NaN}', "[" * 100_000):
        with pytest.raises(SampleNotJson):
            template.render({"sample": sample_of(text), "item": {}})
    with pytest.raises(UnknownVariable):
        template.render({"sample": sample_of('{"other": 1}'), "item": {}})


def test_a_rendered_template_is_bounded() -> None:
    template = parse_template("{{item.big}}" * 200)
    with pytest.raises(TextTooLong):
        template.render({"sample": SAMPLE, "item": {"big": "x" * 10_000}})
    assert template.render({"sample": SAMPLE, "item": {"big": "xy"}}) == "xy" * 200


def test_a_template_is_parsed_in_time_that_grows_with_its_length() -> None:
    assert parse_template("{{" * 100_000).parts == ("{{" * 100_000,)
    with pytest.raises(MalformedGrader, match="longer than"):
        parse_template("x" * (2**18 + 1))
