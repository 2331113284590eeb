"""A run tells a mutant that tests find from one that survives them, on a toy project."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.mutant import mutants_in, write
from tests.mutants.results import Results

ROOT = Path(__file__).parents[3]
MODULE = "gateway/shop.py"
FILES = {
    "pytest.ini": "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n",
    "gateway/__init__.py": "",
    MODULE: """
def price(count):
    return count * 3

def reduced(count):
    return count > 9

def never_called(count):
    return count + 1

def at_import():
    return 7 // 2

HALF = at_import()
""",
    "tests/test_shop.py": """
from gateway import shop

def test_price():
    assert shop.price(2) == 6

def test_reduced():
    assert shop.reduced(10)
    assert not shop.reduced(8)
""",
}
EXPECTED = {
    "count / 3": "found",
    "4": "found",
    "count >= 9": "survived",
    "count - 1": "not covered",
    "7 * 2": "not covered",
}


@pytest.mark.long
def test_a_run_tells_what_tests_find_from_what_survives(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    chosen = [mutant for mutant in mutants_in(tmp_path, MODULE) if mutant.after in EXPECTED]
    chosen = [replace(mutant, number=number) for number, mutant in enumerate(chosen)]
    write(tmp_path / "mutants.json", chosen)
    for arguments in (["cover", "tests", "--workers", "0"], ["run"]):
        command = [sys.executable, "-m", "tests.mutants", *arguments, "--mutants", "mutants.json"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    outcomes = Results(tmp_path / "run/mutants/results.jsonl").outcomes
    assert {mutant.after: outcomes[mutant.number].status for mutant in chosen} == EXPECTED
    assert {outcome.by for outcome in outcomes.values()} == {"", "tests/test_shop.py::test_price"}
