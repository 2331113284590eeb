"""The page that compares Weir with other libraries: each row has tests in `tests/comparison.yaml`."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
SHOWN: dict[str, dict[str, list[str]]] = yaml.safe_load((ROOT / "tests/comparison.yaml").read_text("utf-8"))


def names_in(path: str) -> set[str]:
    """The names of the tests in a file; none if there is no such file."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.M))


def test_every_row_says_what_both_do_and_has_tests() -> None:
    for library, shown in SHOWN.items():
        section = PAGE.partition(f"\n## {library}: ")[2].split("\n## ")[0]
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| [^|]", line)]
        assert [row[0].replace("`", "") for row in rows] == [name.replace("`", "") for name in shown]
        assert not [row[0] for row in rows if len(row) != 3 or not all(row)]
        assert all(shown.values())


def test_every_test_of_a_row_exists() -> None:
    named = [test.partition("::") for shown in SHOWN.values() for tests in shown.values() for test in tests]
    files = {path: names_in(path) for path, _, _ in named}
    assert len(named) > 80
    assert not [f"{path}::{test}" for path, _, test in named if test not in files[path]]


def test_the_check_finds_a_test_that_is_gone() -> None:
    assert "test_the_check_finds_a_test_that_is_gone" in names_in("tests/house/test_comparison.py")
    assert not names_in("tests/house/test_nothing.py")
