"""Mutants are made by operators, and found again; tests for them are chosen, and outcomes read."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.mutants.choosing import choose
from tests.mutants.covering import Cost
from tests.mutants.mutant import Mutant, find, functions, mutants_in, read, sample, write
from tests.mutants.operators import Change, change, changes
from tests.mutants.results import Outcome, Results, table_of_mutants
from tests.mutants.swapping import CannotSwap, LoadedFunctions

# Each operator makes another program, and leaves alone what no test should notice


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


# A mutant is found again after its file has changed, only where it still is the same change


BEFORE = """
class Lease:
    @property
    def over(self) -> bool:
        return time.monotonic() > self.since_s + 5

    @over.setter
    def over(self, value: bool) -> None:
        self.since_s = 0 if value else 1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/lease.py").write_text(BEFORE)
    return tmp_path


def mutant_of(root: Path, after: str, function: str = "Lease.over") -> Mutant:
    return next(
        each for each in mutants_in(root, "room/lease.py") if (each.after, each.function) == (after, function)
    )


def found_line(root: Path, mutant: Mutant) -> str:
    found = find(root, mutant, ["."])
    assert found
    return (root / found.module).read_text().splitlines()[found.change.lineno - 1].strip()


def test_functions_of_one_name_are_told_apart(root: Path) -> None:
    assert mutant_of(root, "2", "Lease.over@2").line == "self.since_s = 0 if value else 1"


def test_a_mutant_is_found_again_after_lines_shift(root: Path) -> None:
    mutant = mutant_of(root, "6")
    (root / "room/lease.py").write_text("import time\n\nLIMIT = 5\n" + BEFORE)
    assert found_line(root, mutant) == mutant.line


def test_a_mutant_is_found_again_where_its_file_went(root: Path) -> None:
    mutant = mutant_of(root, "6")
    (root / "other").mkdir()
    (root / "room/lease.py").rename(root / "other/leases.py")
    found = find(root, mutant, ["."])
    assert found
    assert (found.module, found.change.after) == ("other/leases.py", "6")


def test_a_mutant_is_found_again_when_another_clock_is_read(root: Path) -> None:
    mutant = mutant_of(root, "time.monotonic() >= self.since_s + 5")
    text = BEFORE.replace("time.monotonic", "clock.monotonic")
    (root / "room/lease.py").write_text(text)
    found = find(root, mutant)
    assert found
    assert found.change.after == "clock.monotonic() >= self.since_s + 5"


def test_of_equal_changes_the_one_in_the_same_line_is_found(root: Path) -> None:
    (root / "room/lease.py").write_text("def f(a):\n    a.b = 5\n    a.c = 5\n")
    mutant = [each for each in mutants_in(root, "room/lease.py") if each.after == "6"][1]
    (root / "room/lease.py").write_text("def f(a):\n    a.c = 5\n    a.d = 5\n")
    assert found_line(root, mutant) == "a.c = 5"


def test_a_mutant_is_gone_with_its_line_or_function(root: Path) -> None:
    mutant = mutant_of(root, "6")
    (root / "room/lease.py").write_text(BEFORE.replace("+ 5", ""))
    assert find(root, mutant, ["."]) is None
    (root / "room/lease.py").write_text("def under(self): return 5\n")
    assert find(root, mutant, ["."]) is None


def test_a_sample_is_chosen_by_its_seed_and_survives_its_file(root: Path) -> None:
    chosen = sample(root, 4, 7, ["room"])
    assert chosen == sample(root, 4, 7, ["room"])
    assert [each.number for each in chosen] == [0, 1, 2, 3]
    everything = sample(root, 100, 7, ["room"])
    assert {replace(each, number=0) for each in everything} == set(mutants_in(root, "room/lease.py"))
    write(root / "mutants.json", chosen)
    assert read(root / "mutants.json") == chosen


# Near and cheap tests run first, and a budget bounds what a mutant costs


MODULE = "gateway/fleet/fleet_server.py"
NEAR, FAR = "tests/unit/gateway/test_breaker.py::test_a", "tests/service/queue/test_lists.py::test_b"


def cost(cpu_s: float) -> Cost:
    return Cost(cpu_s, cpu_s, 0)


def test_near_tests_run_before_far_ones_that_are_somewhat_cheaper() -> None:
    assert choose(MODULE, [FAR, NEAR], {NEAR: cost(1), FAR: cost(0.5)}, 10) == [NEAR, FAR]
    assert choose(MODULE, [FAR, NEAR], {NEAR: cost(5), FAR: cost(0.01)}, 10) == [FAR, NEAR]


def test_one_case_of_each_test_runs_before_the_second_case_of_any() -> None:
    tests = ["tests/a.py::test[1]", "tests/a.py::test[2]", "tests/a.py::test_other"]
    assert choose(MODULE, tests, dict.fromkeys(tests, cost(1)), 10)[:2] in (
        ["tests/a.py::test[1]", "tests/a.py::test_other"],
        ["tests/a.py::test_other", "tests/a.py::test[1]"],
    )


def test_tests_of_a_file_run_together() -> None:
    tests = [f"tests/{file}.py::test_{number}" for number in range(5) for file in "ab"]
    chosen = choose(MODULE, tests, {test: cost(1 + int(test[-1])) for test in tests}, 100)
    assert [test.split("::")[0] for test in chosen] == ["tests/a.py"] * 5 + ["tests/b.py"] * 5


def test_a_budget_leaves_some_near_tests_and_some_of_all_others() -> None:
    near = [f"tests/unit/gateway/engines/test_breaker.py::test_{number}" for number in range(20)]
    far = [f"tests/unit/queue/test_x.py::test_{number}" for number in range(200)]
    chosen = choose(MODULE, near + far, dict.fromkeys(near + far, cost(1)), 20)
    assert 18 <= len(chosen) <= 22
    assert len(set(chosen)) == len(chosen)
    assert 10 <= len([test for test in chosen if test in near]) <= 13


def test_a_test_that_alone_exceeds_the_budget_does_not_run() -> None:
    assert choose(MODULE, [NEAR, FAR], {NEAR: cost(1), FAR: cost(100)}, 20) == [NEAR]


# The file of outcomes, and what is read from it


def results(path: Path, *statuses: str) -> Results:
    made = Results(path)
    for number, status in enumerate(statuses):
        made.add(number, Outcome(status, "tests/a.py::test_a", 3, 0.5))
    return made


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made = results(tmp_path / "results.jsonl", "found", "survived")
    assert Results(tmp_path / "results.jsonl").outcomes == made.outcomes


def test_a_mutant_that_was_found_and_now_survives_is_named(tmp_path: Path) -> None:
    before = results(tmp_path / "before", "found", "timeout", "survived", "found", "found")
    after = results(tmp_path / "after", "survived", "not covered", "survived", "gone", "found")
    assert after.lost_since(before) == [0, 1]


def test_the_table_says_which_share_was_found_and_what_survived(tmp_path: Path) -> None:
    modules = ["gateway/fleet/placement.py", "gateway/fleet/fleet.py", "trainer_service/rows/rows.py"]
    mutants = [
        Mutant(number, module, "f", "comparison", 0, "return a < b", "a < b", "a <= b")
        for number, module in enumerate(modules)
    ]
    table = table_of_mutants(mutants, results(tmp_path / "results", "found", "survived", "timeout"))
    assert "| gateway/fleet | 2 | 1 | 1 | 0 | 50.0 % |" in table
    assert "| all | 3 | 2 | 1 | 0 | 66.7 % |" in table
    assert "1 survived: gateway/fleet/fleet.py f, comparison: a < b → a <= b" in table


# A mutant changes the functions of a module that is imported already, whoever holds them


TOY = """
import contextlib
from functools import cached_property


class Toy:
    size = 1

    @property
    def larger(self):
        return self.size + 1

    @cached_property
    def much_larger(self):
        return self.size + 10

    @contextlib.contextmanager
    def resized(self):
        yield self.size + 100

    def named(self):
        return __class__


def outer():
    def inner(number):
        return number > 2
    return inner


REGISTRY = {"outer": outer}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "toy_of_mutants.py").write_text(TOY)
    spec = importlib.util.spec_from_file_location("toy_of_mutants", tmp_path / "toy_of_mutants.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_of_mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["toy_of_mutants"]


@cache
def mutants(root: Path) -> list[Mutant]:
    return list(mutants_in(root, "toy_of_mutants.py"))


def swap(root: Path, before: str, after: str) -> None:
    [mutant] = [each for each in mutants(root) if (each.before, each.after) == (before, after)]
    found = find(root, mutant)
    assert found
    LoadedFunctions(root, {found.module}).swap(found)


def test_properties_change(toy: ModuleType, tmp_path: Path) -> None:
    swap(tmp_path, "self.size + 1", "self.size - 1")
    swap(tmp_path, "self.size + 10", "self.size - 10")
    assert (toy.Toy().larger, toy.Toy().much_larger) == (0, -9)


def test_a_decorated_function_changes(toy: ModuleType, tmp_path: Path) -> None:
    swap(tmp_path, "100", "101")
    with toy.Toy().resized() as size:
        assert size == 102


def test_a_function_within_a_function_changes_for_those_who_held_the_outer_one(
    toy: ModuleType, tmp_path: Path
) -> None:
    swap(tmp_path, "number > 2", "number >= 2")
    assert toy.REGISTRY["outer"]()(2)


def test_code_that_no_longer_refers_to_its_class_fits(toy: ModuleType, tmp_path: Path) -> None:
    assert toy.Toy().named() is toy.Toy
    swap(tmp_path, "return __class__", "return None")
    assert toy.Toy().named() is None


def test_a_module_that_is_not_imported_cannot_change(tmp_path: Path) -> None:
    (tmp_path / "toy_of_mutants.py").write_text(TOY)
    with pytest.raises(CannotSwap, match="has no function"):
        swap(tmp_path, "100", "101")
