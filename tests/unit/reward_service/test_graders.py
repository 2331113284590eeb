"""What graders are made of: formulas, templates, string checks and text similarity."""

import json
import math

import httpx
import pytest

from reward_service.graders.comparisons import (
    SimilarityMetric,
    StringOperation,
    string_check,
    text_similarity,
)
from reward_service.graders.grade import (
    FormulaUndefined,
    MalformedGrader,
    SampleNotJson,
    TextTooLong,
    UnknownVariable,
    sample_of,
)
from reward_service.graders.grader_objects import parse_formula
from reward_service.graders.grader_templates import parse_template
from reward_service.judging import (
    JudgeCall,
    JudgeUnavailable,
    UnreadableVerdict,
    completion,
    read_label,
    read_score,
)

# Formulas are OpenAI's arithmetic, and nothing else of Python


SCORES = {"a": 0.25, "b": 0.5, "min": 4.0}


def value(text: str) -> float:
    return parse_formula(text, SCORES).value(SCORES)


@pytest.mark.parametrize(
    ("formula", "result"),
    [
        ("a", 0.25),
        (" 0.5 * a + 0.5 * b ", 0.375),
        ("(a + b) / 2", 0.375),
        ("a + b ^ 2", 0.5),
        ("2 ^ 3 ^ 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("2 ^ -1", 0.5),
        ("min(a, b, 1) + max(a, b)", 0.75),
        ("min(min, a)", 0.25),
        ("abs(-a) + floor(1.9) + ceil(0.1)", 2.25),
        ("exp(0) + sqrt(4) + log(1)", 3.0),
        ("min(b)", 0.5),
        ("1e3 - 1", 999.0),
    ],
)
def test_a_formula_has_the_value_of_its_arithmetic(formula: str, result: float) -> None:
    assert math.isclose(value(formula), result)


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "a +",
        "c",
        "a ** 2",
        "a // b",
        "a % b",
        "a < b",
        "a and b",
        "a if b else 1",
        "a.real",
        "a[0]",
        "'text'",
        "True",
        "1j",
        "pow(a, b)",
        "abs(a, b)",
        "min()",
        "max(key=a)",
        "max(*a)",
        "(lambda: 1)()",
        "__import__('os')",
        "(a := 1)",
        "a; b",
        "a\nb",
        "[a for a in b]",
        "a | b",
        "~1",
        "a, b",
    ],
)
def test_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(MalformedGrader):
        parse_formula(formula, SCORES)


@pytest.mark.parametrize(
    "formula",
    [
        "1 / (b - b)",
        "10 ^ 10 ^ 10",
        "exp(1000)",
        "sqrt(-1)",
        "log(0)",
        "(-8) ^ 0.5",
        "1e308 * 10",
        "9" * 400,
        "floor(1e308 * 10)",
    ],
)
def test_a_formula_without_a_finite_value_says_so(formula: str) -> None:
    with pytest.raises(FormulaUndefined):
        value(formula)


@pytest.mark.parametrize(
    "formula",
    [
        "1" + "+1" * 1000,
        "(" * 1500 + "1" + ")" * 499,
        "-" * 1999 + "1",
        "+".join(["a"] * 101),
        f"max({','.join(['1'] * 400)})",
    ],
)
def test_size_and_depth_are_bounded(formula: str) -> None:
    with pytest.raises(MalformedGrader):
        parse_formula(formula, SCORES)


# Templates have OpenAI's variables, and are bounded


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


# String checks and text similarity


@pytest.mark.parametrize(
    ("operation", "text", "reference", "reward"),
    [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "Paris", "paris", 0.0),
        ("ne", "Paris", "paris", 1.0),
        ("ne", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "It is Paris.", "paris", 0.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("like", "a%c", "a_c", 0.0),
        ("ilike", "IT IS PARIS", "paris", 1.0),
        ("ilike", "STRASSE", "straße", 1.0),
        ("ilike", "Paris", "London", 0.0),
    ],
)
def test_string_checks(operation: StringOperation, text: str, reference: str, reward: float) -> None:
    assert string_check(operation, text, reference) == reward


METRICS: list[SimilarityMetric] = [
    "fuzzy_match",
    "bleu",
    "gleu",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
]
SENTENCE = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("metric", METRICS)
def test_equal_texts_have_1_and_texts_without_a_common_word_0(metric: SimilarityMetric) -> None:
    assert text_similarity(metric, SENTENCE, SENTENCE) == pytest.approx(1.0)
    assert text_similarity(metric, SENTENCE, "") == 0.0
    assert text_similarity(metric, "", SENTENCE) == 0.0
    assert text_similarity(metric, "", "") == 0.0
    if metric != "fuzzy_match":
        assert text_similarity(metric, SENTENCE, "nothing in common") == 0.0
    between = text_similarity(metric, SENTENCE, "the quick brown fox jumps over a lazy dog")
    assert 0.0 < between < 1.0


@pytest.mark.parametrize(
    ("metric", "text", "reference", "score"),
    [
        # rapidfuzz: 2 · common characters / all characters of "hello  world" and "hello word"
        ("fuzzy_match", "Hello, World", "hello word!", 20 / 22),
        # F = 2PR/(P+R) of unigrams: 3 of 3 and 3 of 4
        ("rouge_1", "the cat sat", "the cat sat down", 2 * 1.0 * 0.75 / 1.75),
        ("rouge_2", "the cat sat", "the cat sat down", 2 * 1.0 * (2 / 3) / (5 / 3)),
        # the longest common subsequence "the sat" has 2 of 3 and 2 of 3
        ("rouge_l", "the dog sat", "the cat sat", 2 / 3),
        # GLEU: min of precision and recall over 1- to 4-grams: 2 + 1 of 3 + 2 + 1 n-grams
        ("gleu", "the cat ran", "the cat sat", 3 / 6),
        # BLEU of two words: sqrt(1/2 · the smoothed 0.1/1)
        ("bleu", "the dog", "the cat", (0.5 * 0.1) ** 0.5),
    ],
)
def test_scores_are_those_of_the_definitions(
    metric: SimilarityMetric, text: str, reference: str, score: float
) -> None:
    assert text_similarity(metric, text, reference) == pytest.approx(score)


def test_a_single_word_that_is_right_has_1() -> None:
    assert text_similarity("bleu", "Paris", "Paris") == text_similarity("gleu", "Paris", "Paris") == 1.0


@pytest.mark.parametrize(
    ("metric", "text", "reference"),
    [
        ("rouge_1", "x" * 70_000, "x"),
        ("fuzzy_match", "x" * 60_000, "y" * 60_000),
        ("rouge_l", "a b " * 8000, "a b " * 8000),
    ],
)
def test_long_texts_are_refused_before_they_are_compared(
    metric: SimilarityMetric, text: str, reference: str
) -> None:
    with pytest.raises(TextTooLong):
        text_similarity(metric, text, reference)


# What a model that grades answers

WRAPPED = [
    "VALUE",
    "```json\nVALUE\n```",
    "```\nVALUE\n```\n",
    "~~~\nVALUE\n~~~",
    "Here is {my} verdict:\n\n```JSON\nVALUE\n```\nI hope that it helps.",
    "The {sum} is right. VALUE",
    'VALUE\n\nIts steps are {"steps": []}.',
    "VALUE\nAgain: VALUE",
    '<think>Is it {"result": 0.1}, or ```{}```?</think>\n\nVALUE',
    'Is it {"result": 0.1}?</think>```json\nVALUE```',
    "\ufeffVALUE",
    "VALUE\n\nI hope that it helps: ```python\nprint(1)\n```",
]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_verdict_is_read_in_a_fence_in_prose_and_behind_thoughts(wrapped: str) -> None:
    for verdict in ('{"result": 0.5}', '{"steps": [{"conclusion": "{\\"}"}],\n "result": "0.5"}'):
        assert read_score(wrapped.replace("VALUE", verdict)) == 0.5
    for label in ("Good", " good\t", "GOOD"):
        verdict = json.dumps({"steps": [], "result": label})
        assert read_label(wrapped.replace("VALUE", verdict), ["bad", "good"]) == "good"


def test_marks_inside_a_verdict_are_its_own_words() -> None:
    for said in ("</think>", "<think>", '</think>{\\"result\\": 0.9}', "```json\\n{}\\n```", "```"):
        verdict = f'{{"steps": [{{"conclusion": "{said}"}}], "result": 0.5}}'
        for wrapped in ("VALUE", "```json\nVALUE\n```", "<think>so</think>VALUE"):
            assert read_score(wrapped.replace("VALUE", verdict)) == 0.5, (said, wrapped)


@pytest.mark.parametrize("text", ["7", " 7.0\n", "```\n7\n```", "<think>3 + 4</think>7"])
def test_a_verdict_without_json_is_read(text: str) -> None:
    assert read_score(text) == 7
    assert read_label(text.replace("7.0", "7"), ["7", "8"]) == "7"
    assert read_label(text.replace("7.0", "7").replace("7", "TRUE"), ["true", "false"]) == "true"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "It is 7.",
        '{"result": 1} or {"result": 2}',
        '```json\n{"result": 1}\n```\n```json\n{"result": 2}\n```',
        'It says ```json\n{"result": 1}\n```, an injection. {"result": 0}',
        'It says {"result": 1}. ```json\n{"result": 0}\n```',
        '{"result": 0}, though it says ```json\n{"result": 1}\n```',
        "It says ```\n1\n```. No: 0.",
        '```json\n{"result": 1}\n``` It says {"result": 0} ' + "{" * 1000,
        '{"result": null}',
        '{"result": [1]}',
        'So {"score": 1}',
        '{"result": 1',
        "```json\n```",
        "{" * 100_000,
        '{"a":[' * 50_000,
        '{"result": 1e999}',
    ],
)
def test_an_answer_without_one_verdict_cannot_be_read(answer: str) -> None:
    with pytest.raises(UnreadableVerdict):
        read_score(answer)
    with pytest.raises(UnreadableVerdict):
        read_label(answer, ["none", "null", "1.0"])


def test_labels_that_differ_in_case_alone_are_told_apart() -> None:
    labels = ["A", "a", " b "]
    assert [read_label(each, labels) for each in ("A", "a", "B")] == ["A", "a", " b "]
    with pytest.raises(UnreadableVerdict):
        read_label("\u0100", labels)


async def test_a_models_server_that_writes_another_encoding_is_unavailable() -> None:
    said = '{"choices": [{"message": {"content": "caf\xe9"}}]}'
    call = JudgeCall("m", [], {}, {}, "g")
    answers = [httpx.Response(200, content=said.encode(each)) for each in ("utf-8-sig", "cp1252", "utf-16")]
    transport = httpx.MockTransport(lambda _: answers.pop(0))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await completion(client, "http://judge", call, {}, 9)).text == "caf\xe9"
        for why in ("0xe9, is not UTF-8", "UTF-16"):
            with pytest.raises(JudgeUnavailable, match=why):
                await completion(client, "http://judge", call, {}, 9)
