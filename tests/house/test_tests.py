"""The house rules for tests: helpers live in tests/support, and no test uses private names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tests").rglob("*.py"))
}
NOT_FOR_IMPORT = re.compile(r"tests(\..+)?\.(conftest|test_\w+)")
PATCHES = {"setattr", "delattr", "getattr"}
NAMEDTUPLES = {"_asdict", "_replace", "_fields"}
"""Names with an underscore that collections.namedtuple documents as public."""


def private(name: str) -> bool:
    return bool(re.match(r"_(?!_|$)", name)) and name not in NAMEDTUPLES


def imports_of_tests(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if NOT_FOR_IMPORT.fullmatch(name))


def private_accesses(tree: ast.AST) -> Iterator[str]:
    """Private names that a module imports, patches, or uses as attributes, except on `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"line {node.lineno}: {alias.name}" for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in PATCHES:
            told = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            parts = [part for text in told if isinstance(text, str) for part in text.split(".")]
            yield from (f"line {node.lineno}: {part}" for part in parts if private(part))


def test_nobody_imports_a_test_module_or_a_conftest() -> None:
    assert not {name: found for name, tree in TREES.items() if (found := list(imports_of_tests(tree)))}


def test_no_test_uses_a_private_name() -> None:
    assert not {name: found for name, tree in TREES.items() if (found := list(private_accesses(tree)))}


def test_every_sleep_has_its_reason_in_a_comment() -> None:
    """The comment is in the same line or the one before. A test sleeps only where there is no event."""
    without = []
    for name, tree in TREES.items():
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in (call for call in calls if ast.unparse(call.func).split(".")[-1] == "sleep"):
            if not any("# " in line for line in lines[max(0, call.lineno - 2) : call.lineno]):
                without.append(f"{name}:{call.lineno}")
    assert not without


def test_the_rules_find_what_they_forbid() -> None:
    forbidden = """
from tests.queue.test_stream import turn
from tests.gateway import conftest
from rollout_queue.redis.pages import _asked
reader._page(10)
patch.setattr("gateway.app._wait", None)
self._own, named._asdict(), reader.__class__
"""
    tree = ast.parse(forbidden)
    assert list(imports_of_tests(tree)) == ["tests.queue.test_stream", "tests.gateway.conftest"]
    found = {each.split(": ")[1] for each in private_accesses(tree)}
    assert found == {"_asked", "reader._page", "_wait"}
