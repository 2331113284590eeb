"""Finds the Python of an environment's library, and the program that serves the library."""

import sys
from pathlib import Path

from environments.errors import UnknownEnvironment

PROGRAMS = Path(__file__).parent / "programs"
WRAPPERS = {
    "python": "python_class",
    "gymnasium": "with_gymnasium",
    "reasoning_gym": "with_reasoning_gym",
    "textarena": "with_textarena",
    "verifiers": "with_verifiers",
    "verifiers_v0": "with_verifiers_v0",
}
PLAY_THEMSELVES = ("verifiers", "verifiers_v0")
"""The libraries that play whole episodes."""


def host_command(library: str, name: str, python: Path | None, environments_dir: Path) -> list[str]:
    """The command of a host. `python` is the user's choice of interpreter; without it, a library has the one
    in `environments_dir`, and a class of the user runs with this one."""
    if library not in WRAPPERS:
        known = ", ".join(sorted([*WRAPPERS, "openenv"]))
        raise UnknownEnvironment(f"there are no environments of {library!r}, only of {known}")
    interpreter = python or _interpreter(library, environments_dir)
    program = PROGRAMS / ("play.py" if library in PLAY_THEMSELVES else "serve.py")
    return [str(interpreter), str(program), WRAPPERS[library], name]


def tools_command(environments_dir: Path) -> list[str]:
    """The command of the host that calls the tools of MCP servers."""
    return [str(_interpreter("mcp", environments_dir)), str(PROGRAMS / "tool_servers.py")]


def _interpreter(library: str, environments_dir: Path) -> Path:
    if library == "python":
        return Path(sys.executable)
    found = environments_dir / library / "bin" / "python"
    if not found.exists():
        raise UnknownEnvironment(
            f"{library} is not installed: run `make {environments_dir}/{library}/installed`, "
            "or name an interpreter that has it: --set python=PATH"
        )
    return found.absolute()  # a host may start in another directory
