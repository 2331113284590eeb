"""Every promise in `tests/promises.yaml` has tests that exist, and one of them runs in `make test`."""

import ast
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
IN_MAKE_TEST = ("unit", "service", "process", "engine", "house")
PAGES: dict[str, dict[str, list[str]]] = yaml.safe_load(
    (ROOT / "tests/promises.yaml").read_text(encoding="utf-8")
)
ONLY_LONG = {
    "make demo learns, and cleans up": "a demo takes minutes",
    "Whole agents and SDKs run unmodified": "each SDK and agent has an environment of its own",
    "This release goes on where the earlier one was, and back": "the earlier release is unpacked from git",
}
"""Promises that no test in `make test` holds, and why."""


@cache
def cases_in(path: str) -> dict[str, bool]:
    """The tests of a file, and whether each is long. One with long cases among others is not."""
    file = ROOT / path
    tree = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    all_long = any(
        "pytest.mark.long" in mark for mark in marks if "pytest.mark" in mark and "param(" not in mark
    )
    return {
        node.name: all_long or "pytest.mark.long" in map(ast.unparse, node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def in_make_test(test: str) -> bool:
    path, _, name = test.partition("::")
    return path.split("/")[1] in IN_MAKE_TEST and cases_in(path).get(name) is False


PROMISES = [(page, promise, tests) for page, found in PAGES.items() for promise, tests in found.items()]


def test_every_test_of_a_promise_exists() -> None:
    ids = {test for _, _, tests in PROMISES for test in tests}
    assert not {test for test in ids if test.partition("::")[2] not in cases_in(test.partition("::")[0])}


@pytest.mark.parametrize("page", PAGES)
def test_a_promise_is_held_in_make_test(page: str) -> None:
    assert (ROOT / page).is_file()
    unheld = [promise for promise, tests in PAGES[page].items() if not any(map(in_make_test, tests))]
    assert [promise for promise in unheld if promise not in ONLY_LONG] == []


def test_a_promise_stands_once_and_has_its_reason_where_only_long_tests_hold_it() -> None:
    promises = [promise for _, promise, _ in PROMISES]
    assert len(promises) == len(set(promises))
    assert ONLY_LONG.keys() <= set(promises)
    held = {promise for _, promise, tests in PROMISES if any(map(in_make_test, tests))}
    assert not ONLY_LONG.keys() & held


def test_the_check_finds_a_test_that_is_gone_and_one_that_is_long() -> None:
    assert not in_make_test("tests/unit/queue/test_clock.py::test_that_is_not_there")
    assert not in_make_test(
        "tests/crash/test_crash.py::test_whatever_dies_nothing_is_lost_and_nothing_is_trained_twice"
    )
    assert in_make_test("tests/unit/queue/test_clock.py::test_a_cancelled_sleep_leaves_no_timer")
