"""The house rules for tests: helpers live in tests/support, and no test uses private names."""

import ast
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOT_FOR_IMPORT = re.compile(r"tests(\..+)?\.(conftest|test_\w+)")
PATCHES = {"setattr", "delattr", "getattr"}
DOCUMENTED = {"_asdict", "_replace", "_fields", "_exit"}
"""Names with an underscore that collections.namedtuple and os document as public."""
Nodes = Sequence[ast.AST]
"""All nodes of a file."""


def private(name: str) -> bool:
    return bool(re.match(r"_(?!_|$)", name)) and name not in DOCUMENTED


def called(call: ast.Call) -> str:
    """The name of what is called, without its module or object."""
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def imports_of_tests(nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if NOT_FOR_IMPORT.fullmatch(name))


def private_accesses(nodes: Nodes) -> Iterator[str]:
    """Private names that a module imports, patches, or uses as attributes, except on `self` and `cls`."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"line {node.lineno}: {alias.name}" for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Call) and called(node) in PATCHES:
            told = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            parts = [part for text in told if isinstance(text, str) for part in text.split(".")]
            yield from (f"line {node.lineno}: {part}" for part in parts if private(part))


def sleeps_without_reason(nodes: Nodes, lines: Sequence[str]) -> Iterator[str]:
    """Calls of `sleep` without a comment in their line or the one before. The turned clock needs none."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == "sleep"]
    for call in calls:
        if ast.unparse(call.func) == "clock.sleep":
            continue
        if not any("# " in line for line in lines[max(0, call.lineno - 2) : call.lineno]):
            yield f"line {call.lineno}"


@pytest.fixture(scope="module")
def broken() -> dict[str, dict[str, list[str]]]:
    """For each rule, the files that break it and where. Each file is parsed and walked once."""
    rules: dict[str, dict[str, list[str]]] = {"import": {}, "private": {}, "sleep": {}}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        name = path.relative_to(ROOT).as_posix()
        rules["import"][name] = list(imports_of_tests(nodes))
        rules["private"][name] = list(private_accesses(nodes))
        rules["sleep"][name] = list(sleeps_without_reason(nodes, text.splitlines()))
    return {rule: {name: found for name, found in files.items() if found} for rule, files in rules.items()}


def test_nobody_imports_a_test_module_or_a_conftest(broken: Any) -> None:
    assert not broken["import"]


def test_no_test_uses_a_private_name(broken: Any) -> None:
    assert not broken["private"]


def test_every_sleep_has_its_reason_in_a_comment(broken: Any) -> None:
    """A test sleeps only where there is no event."""
    assert not broken["sleep"]


def test_a_logger_may_be_made_while_pytest_goes_through_all_of_them() -> None:
    for _, number in zip(logging.root.manager.loggerDict.values(), range(3), strict=False):
        logging.getLogger(f"{__name__}.{number}")


def test_the_rules_find_what_they_forbid() -> None:
    forbidden = """
from tests.queue.test_stream import turn
from tests.gateway import conftest
from rollout_queue.redis.stream_pages import _asked
reader._page(10)
patch.setattr("gateway.app._wait", None)
self._own, named._asdict(), reader.__class__
sleep(1)
"""
    nodes = list(ast.walk(ast.parse(forbidden)))
    assert list(imports_of_tests(nodes)) == ["tests.queue.test_stream", "tests.gateway.conftest"]
    found = {each.split(": ")[1] for each in private_accesses(nodes)}
    assert found == {"_asked", "reader._page", "_wait"}
    assert list(sleeps_without_reason(nodes, forbidden.splitlines())) == ["line 8"]
