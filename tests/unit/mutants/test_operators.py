"""Each operator makes another program, and leaves alone what no test should notice."""

import ast

import pytest

from tests.mutants.mutant import functions
from tests.mutants.operators import Change, change, changes

CASES = {
    "return a < b": [("comparison", "return a <= b")],
    "return a is None": [("comparison", "return a is not None")],
    "return a < b in c": [("comparison", "return a <= b in c"), ("comparison", "return a < b not in c")],
    "return a + b": [("arithmetic", "return a - b")],
    "return -a": [("arithmetic", "return a")],
    "a += b": [("removed statement", "pass"), ("arithmetic", "a -= b")],
    "return a and b": [("and, or", "return a or b")],
    "return not a": [("removed not", "return a")],
    "return f(True)": [("constant", "return f(False)")],
    "return f(2)": [("constant", "return f(3)"), ("constant", "return f(1)")],
    "return f(0)": [("constant", "return f(1)"), ("constant", "return f(-1)")],
    "return min(a, b)": [("min, max, any, all", "return max(a, b)")],
    "a.b = c": [("removed statement", "pass")],
    "raise E": [("removed statement", "pass")],
    "f(a)": [("removed call", "pass")],
    "return a": [("returned None", "return None")],
}


def function_of(*lines: str) -> ast.FunctionDef:
    found = functions(ast.parse("def toy(a, b, c=1):\n" + "".join(f"    {line}\n" for line in lines)))["toy"]
    assert isinstance(found, ast.FunctionDef)
    return found


def program_with(wanted: Change, *lines: str) -> str:
    mutated = function_of(*lines)
    change(mutated, wanted)
    return ast.unparse(ast.Module(mutated.body, []))


@pytest.mark.parametrize("line", CASES)
def test_an_operator_makes_another_program(line: str) -> None:
    made = [(each.operator, program_with(each, line)) for each in changes(function_of(line))]
    assert [pair for pair in made if pair[0] != "returned None" or len(made) == 1] == CASES[line]


@pytest.mark.parametrize(
    ("lines", "negated"),
    [
        (["while a < b:", "    pass"], "while not a < b:\n    pass"),
        (["return c if a else b"], "return c if not a else b"),
        (["return [x for x in a if x]"], "return [x for x in a if not x]"),
    ],
)
def test_a_condition_is_negated(lines: list[str], negated: str) -> None:
    wanted = [each for each in changes(function_of(*lines)) if each.operator == "negated condition"]
    assert [program_with(each, *lines) for each in wanted] == [negated]


def test_a_loop_ends_early_or_does_not() -> None:
    lines = ["for x in a:", "    break", "else:", "    b = x"]
    assert [program_with(each, *lines) for each in changes(function_of(*lines))] == [
        "for x in a:\n    continue\nelse:\n    b = x"
    ]
    lines[1] = "    continue"
    assert [each.operator for each in changes(function_of(*lines))] == ["continue to break"]


@pytest.mark.parametrize(
    "line",
    [
        '"a text with 1 number"',
        'logger.info("%d turns", a + 1)',
        'self._logger.info("%d turns", a + 1)',
        'a = f"{b + 1} turns"',
        'a = "text" + b',
        "a: list[1] = b",
        "return None",
        "def inner(d=1): pass",
    ],
)
def test_what_no_test_should_notice_stays(line: str) -> None:
    assert not list(changes(function_of(line)))


def test_every_change_of_a_function_makes_a_different_program() -> None:
    lines = ["if a < 1 and not b:", "    c += max(a, 2)", "return c - 1"]
    programs = [program_with(each, *lines) for each in changes(function_of(*lines))]
    assert len({*programs, ast.unparse(ast.Module(function_of(*lines).body, []))}) == len(programs) + 1
