"""A mutant: one change of one function, named so that it is found again when files move or lines shift."""

import ast
import difflib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutants.operators import Change, Function, change, changes

ROOMS = (
    *(f"gateway/{room}" for room in ("conversations", "generations", "sessions", "engines")),
    *(f"queue/rollout_queue/{room}" for room in ("contract", "redis")),
    *(f"trainer_service/{room}" for room in ("rows", "groups", "algorithms", "step")),
    "rollout_server/reloading",
)
SAME_ENOUGH = 0.7
"""How alike two lines are of which one became the other: `time.monotonic()` and `clock.monotonic()` are."""


@dataclass(frozen=True)
class Mutant:
    """A change, with the texts that identify it."""

    number: int
    module: str
    function: str
    """Its qualified name. A second function of the same name, such as a setter, ends in `@2`."""
    operator: str
    index: int
    """Which node of the function, in the order of the source."""
    line: str
    """The text of the first line that changes."""
    before: str
    after: str

    @property
    def room(self) -> str:
        return next(
            (room for room in ROOMS if self.module.startswith(f"{room}/")), str(Path(self.module).parent)
        )


@dataclass(frozen=True)
class Found:
    """A mutant in the tree as it is now."""

    module: str
    function: str
    change: Change


def functions(tree: ast.Module) -> dict[str, Function]:
    """The functions and methods of a module by qualified name. A function in a function is a part of it."""
    found: dict[str, Function] = {}

    def look(nodes: Sequence[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, Function):
                name, count = f"{prefix}{node.name}", 1
                while (name if count == 1 else f"{name}@{count}") in found:
                    count += 1
                found[name if count == 1 else f"{name}@{count}"] = node
            elif isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                look([*node.body, *node.orelse], prefix)

    look(tree.body, "")
    return found


def mutants_in(root: Path, module: str) -> Iterator[Mutant]:
    """Every mutant of a module, with the number 0."""
    source = (root / module).read_text(encoding="utf-8")
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)).items():
        for each in changes(function):
            line = lines[each.lineno - 1].strip()
            yield Mutant(0, module, name, each.operator, each.index, line, each.before, each.after)


def sample(root: Path, count: int, seed: int, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Mutants of these rooms, each as likely as any other."""
    modules = sorted(
        path.relative_to(root).as_posix() for room in rooms for path in (root / room).rglob("*.py")
    )
    every = [mutant for module in modules for mutant in mutants_in(root, module)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    chosen.sort(key=lambda mutant: (mutant.module, mutant.function, mutant.index, mutant.after))
    return [replace(mutant, number=number) for number, mutant in enumerate(chosen)]


def find(root: Path, mutant: Mutant, roots: Sequence[str] = ()) -> Found | None:
    """The mutant in today's tree: in its module, or else in a module below `roots` that has it."""
    if (root / mutant.module).is_file() and (found := _find_in(root, mutant.module, mutant)):
        return found
    others = [
        path.relative_to(root).as_posix() for each in roots for path in sorted((root / each).rglob("*.py"))
    ]
    others.sort(key=lambda module: Path(module).name != Path(mutant.module).name)
    return next((found for module in others if (found := _find_in(root, module, mutant))), None)


def _find_in(root: Path, module: str, mutant: Mutant) -> Found | None:
    source = (root / module).read_text(encoding="utf-8")
    if mutant.function.split("@")[0].split(".")[-1] not in source:
        return None
    function = functions(ast.parse(source)).get(mutant.function)
    if function is None:
        return None
    lines = source.splitlines()
    of_operator = [each for each in changes(function) if each.operator == mutant.operator]
    same = [each for each in of_operator if (each.before, each.after) == (mutant.before, mutant.after)]
    ranked = [(_alike(lines[each.lineno - 1].strip(), mutant.line), each) for each in same or of_operator]
    if not same:
        ranked = [(min(line, _alike(each.before, mutant.before)), each) for line, each in ranked]
    ranked = [(alike, each) for alike, each in ranked if same or alike >= SAME_ENOUGH]
    if not ranked:
        return None
    best = max(ranked, key=lambda pair: (pair[0], -abs(pair[1].index - mutant.index)))
    return Found(module, mutant.function, best[1])


def _alike(one: str, other: str) -> float:
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).ratio()


def mutated(root: Path, found: Found) -> ast.Module:
    """The module's tree with the change."""
    tree = ast.parse((root / found.module).read_text(encoding="utf-8"))
    change(functions(tree)[found.function], found.change)
    return ast.fix_missing_locations(tree)


def write(path: Path, mutants: Sequence[Mutant]) -> None:
    path.write_text(
        "[\n" + ",\n".join(json.dumps(asdict(each), ensure_ascii=False) for each in mutants) + "\n]\n",
        encoding="utf-8",
    )


def read(path: Path) -> list[Mutant]:
    return [Mutant(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
