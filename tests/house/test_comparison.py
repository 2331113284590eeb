"""The page that compares Weir with other libraries: each test that it names exists, and each row has one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
ROWS = [
    line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [^|]", line) and "`" in line
]


def names_in(path: str) -> set[str]:
    """The names of the tests in a file; none if there is no such file."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.M))


def named(text: str) -> list[tuple[str, str]]:
    """The `path::test` of a text."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def test_every_test_that_the_page_names_exists() -> None:
    files = {path: names_in(path) for path, _ in named(PAGE)}
    assert not [f"{path}::{test}" for path, test in named(PAGE) if test not in files[path]]


def test_every_row_says_what_both_do_and_names_a_test() -> None:
    assert len(ROWS) > 40
    assert not [row[0] for row in ROWS if len(row) != 4 or not all(row) or not named(row[3])]
    assert PAGE.count("::") == sum(len(named(row[3])) for row in ROWS), "a test is named in another form"


def test_the_check_finds_a_test_that_is_gone() -> None:
    assert "test_the_check_finds_a_test_that_is_gone" in names_in("tests/house/test_comparison.py")
    assert not names_in("tests/house/test_nothing.py")
    assert named("`tests/a/test_b.py::test_c`, `tests/x.py`") == [("tests/a/test_b.py", "test_c")]
