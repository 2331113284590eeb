"""A mutant is found again after its file has changed, and only where it still is the same change."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, find, mutants_in, read, sample, write

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
