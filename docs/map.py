"""Prints every room (folder) of the system and every file in it, with the first sentence of its docstring.

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
    "environments",
    "fine_tuning",
    "queue/rollout_queue",
    "deploy/weir",
)

FIRST_SENTENCE = re.compile(r'(?:#.*\n|\n)*"""(.*?)(?:"""|\.\s|\n\n)', re.DOTALL)
"""Of a docstring at the head of a file."""


def first_sentence(path: Path) -> str:
    """That of the docstring of the module at `path`; empty if there is none."""
    if not path.exists():
        return ""
    found = FIRST_SENTENCE.match(path.read_text(encoding="utf-8"))
    return " ".join(found[1].split()).rstrip(".") if found else ""


def lines_of(folder: Path, depth: int = 0) -> list[str]:
    """The folder with its docstring, its files, then the folders in it, each indented below its parent."""
    indent = "    " * depth
    name = folder.relative_to(ROOT) if depth == 0 else folder.name
    lines = [f"{indent}{f'{name}/':<28} {first_sentence(folder / '__init__.py')}".rstrip()]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(f"{indent}    {path.name:<24} {first_sentence(path)}")
    for room in sorted({path.parent for path in folder.glob("*/*.py")}):
        lines += ["", *lines_of(room, depth + 1)]
    return lines


def main() -> None:
    for name in sys.argv[1:] or PACKAGES:
        print("\n".join(lines_of(ROOT / name)), end="\n\n")


if __name__ == "__main__":
    main()
