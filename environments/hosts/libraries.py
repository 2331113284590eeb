"""Finds the Python of an environment's library, and the program that wraps the library."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.errors import UnknownEnvironment

PROGRAM = Path(__file__).parent / "programs" / "serve.py"
WRAPPERS = {
    "python": "python_class",
    "gymnasium": "with_gymnasium",
    "reasoning_gym": "with_reasoning_gym",
    "textarena": "with_textarena",
}


def host_command(
    library: str, name: str, options: Mapping[str, Any], python: Path | None, environments_dir: Path
) -> list[str]:
    """The command of a host. `python` is the user's choice of interpreter; without it, a library has the one
    in `environments_dir`, and a class of the user runs with this one."""
    if library not in WRAPPERS:
        known = ", ".join(sorted([*WRAPPERS, "openenv"]))
        raise UnknownEnvironment(f"there are no environments of {library!r}, only of {known}")
    interpreter = python or _interpreter(library, environments_dir)
    return [str(interpreter), str(PROGRAM), WRAPPERS[library], name, json.dumps(dict(options))]


def tools_command(environments_dir: Path) -> list[str]:
    """The command of the host that calls the tools of MCP servers."""
    return [str(_interpreter("mcp", environments_dir)), str(PROGRAM.with_name("tool_servers.py"))]


def _interpreter(library: str, environments_dir: Path) -> Path:
    if library == "python":
        return Path(sys.executable)
    found = environments_dir / library / "bin" / "python"
    if not found.exists():
        raise UnknownEnvironment(
            f"{library} is not installed: run `make {environments_dir}/{library}/installed`, "
            "or name an interpreter that has it with --python"
        )
    return found
