"""Which tests a mutant has to survive, and in which order: near and cheap ones first, within a budget."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePath

from tests.mutants.covering import Cost

UNKNOWN = Cost(0.1, 0.1, 0)


def choose(module: str, tests: Iterable[str], costs: dict[str, Cost], budget_s: float) -> list[str]:
    """The tests to run. If all of them cost more than the budget, half of it goes to the first in order, and
    the other half to tests in even distances among the others."""

    def cost(test: str) -> float:
        return costs.get(test, UNKNOWN).all_cpu_s

    ordered = _in_order(module, tests, costs)
    first: list[str] = []
    spent = 0.0
    half = budget_s / 2 if sum(map(cost, ordered)) > budget_s else float("inf")
    while len(first) < len(ordered) and spent + cost(ordered[len(first)]) <= half:
        spent += cost(ordered[len(first)])
        first.append(ordered[len(first)])
    others = sorted(test for test in ordered[len(first) :] if cost(test) <= half)
    left = sum(map(cost, others))
    distance = max(1, round(left / half)) if half < float("inf") else 1
    return _by_file(first) + _by_file(others[::distance])


def _in_order(module: str, tests: Iterable[str], costs: dict[str, Cost]) -> list[str]:
    """One case of each test function before the second case of any. A near test may cost four times as much
    for each name that its path has in common with the module's path."""
    where = set(PurePath(module).with_suffix("").parts)

    def dearness(test: str) -> float:
        path = PurePath(test.split("::")[0])
        near = len(where & {*path.parent.parts, path.stem.removeprefix("test_")})
        return (costs.get(test, UNKNOWN).all_cpu_s + 0.002) * 0.25**near

    ranks = {}
    for function, cases in groupby(sorted(tests), key=lambda test: test.split("[")[0]):
        for rank, test in enumerate(sorted(cases, key=dearness)):
            ranks[test] = (rank, dearness(test), function)
    return sorted(ranks, key=lambda test: ranks[test])


def _by_file(tests: Sequence[str]) -> list[str]:
    """The same tests, those of a file together, so that its fixtures are made once."""
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return [test for file in files for test in tests if test.split("::")[0] == file]
