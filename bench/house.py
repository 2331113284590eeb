"""Measures the house: files, lines, functions, rooms, protocols, settings, modules with one importer, names
that occur twice, and what a chat turn and a training step meet.

python -m bench.house [TREE] [--paths]

TREE is a checkout, by default this one. `--paths` also traces a plain chat turn of a warm session and a
training step of this tree, and lists the files that they meet.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

HERE = Path(__file__).parents[1]
PACKAGES = {
    "environments": "environments",
    "gateway": "gateway",
    "rollout_server": "rollout_server",
    "trainer_service": "trainer_service",
    "reward_service": "reward_service",
    "fine_tuning": "fine_tuning",
    "rollout_queue": "queue/rollout_queue",
    "weir": "deploy/weir",
}
"""The folder of each package of the product."""
MAY_OCCUR_TWICE = {"settings", "errors", "app", "__main__", "__init__"}
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
SETTING = re.compile(r"^ *\w+: ", re.MULTILINE)
"""A line of `weir config` with a setting and its value."""
ONE_IMPORTER_LINES = 150
"""A module that one other module imports lives in it, unless it is longer."""


@dataclass(frozen=True)
class Source:
    """A module of the product."""

    name: str
    path: Path
    lines: int
    functions: int
    imports: frozenset[str]
    """All dotted names that it imports, modules and what is in them."""
    protocols: tuple[str, ...]

    @property
    def room(self) -> str:
        """A folder, or a module, directly in a package."""
        return ".".join(self.name.split(".")[:2])


def read_source(name: str, path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    imports, functions, protocols = set[str](), 0, list[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions += 1
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            protocols += [node.name] if bases & {"Protocol", "typing.Protocol"} else []
    return Source(name, path, text.count("\n"), functions, frozenset(imports), tuple(protocols))


def product(tree: Path = HERE) -> list[Source]:
    """All modules of the product in a checkout."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted((tree / folder).rglob("*.py")):
            parts = path.relative_to(tree / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found.append(read_source(name, path))
    return found


def with_one_importer(sources: Sequence[Source]) -> dict[str, str]:
    """The short modules that one other module imports, and which. Packages are not counted."""
    importers: dict[str, list[str]] = {}
    for source in sources:
        for name in source.imports:
            importers.setdefault(name, []).append(source.name)
    return {
        source.name: importers[source.name][0]
        for source in sources
        if len(importers.get(source.name, ())) == 1
        and source.path.stem not in MAY_OCCUR_TWICE
        and source.lines <= ONE_IMPORTER_LINES
    }


def names_twice(sources: Iterable[Source]) -> dict[str, list[str]]:
    """File names that occur more than once, and the modules."""
    found: dict[str, list[str]] = {}
    for source in sources:
        if source.path.stem not in MAY_OCCUR_TWICE:
            found.setdefault(source.path.stem, []).append(source.name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def lines_of(folder: Path) -> int:
    """The lines of all files of Python in a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py"))


@dataclass
class Trace:
    """What Python calls in the threads that it is installed in, as far as it is the product's."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    on: bool = False
    _begun: set[FrameType] = field(default_factory=set)
    _product: dict[str, bool] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Set it with sys.setprofile. Coroutines that go on and comprehensions do not count."""
        code = frame.f_code
        if self.on and event == "call" and frame not in self._begun and code.co_name not in COMPREHENSIONS:
            self._begun.add(frame)
            ours = self._product.get(code.co_filename)
            if ours is None:
                ours = self._product[code.co_filename] = module_file(code.co_filename) is not None
            if ours:
                self.calls[code] += 1

    def clear(self) -> None:
        self.calls.clear()
        self._begun.clear()

    def files(self) -> Counter[str]:
        """The files that were met, and the calls in each."""
        found = Counter[str]()
        for code, count in self.calls.items():
            found[module_file(code.co_filename) or ""] += count
        return found


def module_file(path: str) -> str | None:
    """The path of a module of the product in its checkout; None for any other file."""
    relative = path.removeprefix(f"{HERE}{os.sep}")
    if relative != path and any(relative.startswith(f"{folder}/") for folder in PACKAGES.values()):
        return relative
    return None


def report(tree: Path) -> Iterator[tuple[str, object]]:
    """The figures of a checkout that can be read without running it."""
    sources = product(tree)
    yield "files of the product", len(sources)
    yield "lines of the product", sum(source.lines for source in sources)
    yield "functions of the product", sum(source.functions for source in sources)
    yield "rooms", len({source.room for source in sources})
    yield "short modules with one importer", len(with_one_importer(sources))
    yield "file names that occur twice", len(names_twice(sources))
    yield "protocols", sum(len(source.protocols) for source in sources)
    yield "lines of tests", lines_of(tree / "tests")
    for package in PACKAGES:
        own = [source for source in sources if source.name.split(".")[0] == package]
        yield f"  {package}: files, lines", f"{len(own)}, {sum(source.lines for source in own)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=HERE)
    parser.add_argument("--paths", action="store_true", help="also trace a turn and a training step")
    asked = parser.parse_args()
    for name, figure in report(asked.tree):
        print(f"{name:34} {figure}")
    printed = subprocess.run(
        [sys.executable, "-m", "weir", "config"], capture_output=True, text=True, check=True
    )
    print(f"{'settings that weir config prints':34} {len(SETTING.findall(printed.stdout))}")
    if asked.paths:
        tests = ["tests/service/gateway/test_path.py", "tests/service/trainer_service/test_path.py"]
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests]
        sys.exit(subprocess.run(command, cwd=HERE, check=False).returncode)


if __name__ == "__main__":
    main()
