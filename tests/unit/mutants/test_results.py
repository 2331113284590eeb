"""The file of outcomes, and what is read from it."""

from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.results import Outcome, Results, table_of_mutants


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
    modules = [
        "gateway/engines/policies/policies.py",
        "gateway/engines/fleet.py",
        "trainer_service/rows/rows.py",
    ]
    mutants = [
        Mutant(number, module, "f", "comparison", 0, "return a < b", "a < b", "a <= b")
        for number, module in enumerate(modules)
    ]
    table = table_of_mutants(mutants, results(tmp_path / "results", "found", "survived", "timeout"))
    assert "| gateway/engines | 2 | 1 | 1 | 0 | 50.0 % |" in table
    assert "| all | 3 | 2 | 1 | 0 | 66.7 % |" in table
    assert "1 survived: gateway/engines/fleet.py f, comparison: a < b → a <= b" in table
