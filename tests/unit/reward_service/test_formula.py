"""Formulas are OpenAI's arithmetic, and nothing else of Python."""

import math

import pytest

from reward_service.graders.faults import FormulaUndefined, MalformedGrader
from reward_service.graders.formula import parse_formula

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
