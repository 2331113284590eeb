"""Near and cheap tests run first, and a budget bounds what a mutant costs."""

from tests.mutants.choosing import choose
from tests.mutants.covering import Cost

MODULE = "gateway/engines/breaker.py"
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
