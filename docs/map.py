"""Prints every room (folder) of the system and every file in it, with the first line of its docstring.

python docs/map.py [ROOM …]     all rooms, or the named ones with the rooms in them: gateway, gateway/edge
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "gateway",
    "rollout_server",
    "trainer_service",
    "reward_service",
    "queue/rollout_queue",
    "deploy/weir",
)

FIRST_LINE = re.compile(r'(?:#.*\n|\n)*"""(.*?)(?:"""|\n)')
"""Of a docstring at the head of a file."""


def first_line(path: Path) -> str:
    """The first line of the docstring of the module at `path`; empty if there is no such line."""
    if not path.exists():
        return ""
    found = FIRST_LINE.match(path.read_text(encoding="utf-8"))
    return found[1] if found else ""


def lines_of(folder: Path, depth: int = 0) -> list[str]:
    """The folder with its docstring, its files, then the folders in it, each indented below its parent."""
    indent = "    " * depth
    name = folder.relative_to(ROOT) if depth == 0 else folder.name
    lines = [f"{indent}{f'{name}/':<28} {first_line(folder / '__init__.py')}".rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"{indent}    {path.name:<24} {first_line(path)}")
    for room in sorted({path.parent for path in folder.glob("*/*.py")}):
        lines += ["", *lines_of(room, depth + 1)]
    return lines


def main() -> None:
    for name in sys.argv[1:] or PACKAGES:
        print("\n".join(lines_of(ROOT / name)), end="\n\n")


if __name__ == "__main__":
    main()
