"""RLinf and verl compared with Weir: each behaviour has tests; the page has what Weir does not serve."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
SHOWN: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (ROOT / "tests/comparison.yaml").read_text("utf-8")
)


def names_in(path: str) -> set[str]:
    """The names of the tests in a file; none if there is no such file."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return set(re.findall(r"^(?:async )?def (test_\w+)", text, re.M))


def test_every_behaviour_says_what_both_do_and_the_page_has_what_weir_does_not_serve() -> None:
    page = " ".join(PAGE.replace("`", "").split())
    for library, shown in SHOWN.items():
        assert len(shown) >= 20
        for name, row in shown.items():
            assert row[library], name
            assert row["tests"], name
            said = " ".join(row["Weir"].replace("`", "").split())
            assert (said in page) == ("Not served" in said), name


def test_every_test_of_a_behaviour_exists() -> None:
    tests = [test for shown in SHOWN.values() for row in shown.values() for test in row["tests"]]
    named = [test.partition("::") for test in tests]
    files = {path: names_in(path) for path, _, _ in named}
    assert len(named) > 80
    assert not [f"{path}::{test}" for path, _, test in named if test not in files[path]]


def test_the_check_finds_a_test_that_is_gone() -> None:
    assert "test_the_check_finds_a_test_that_is_gone" in names_in("tests/house/test_comparison.py")
    assert not names_in("tests/house/test_nothing.py")
