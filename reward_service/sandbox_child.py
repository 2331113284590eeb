"""The program of the process that runs one Python grader. It imports only the standard library.

python -I -B sandbox_child.py LIMITS    LIMITS is JSON: {"cpu_s", "memory_bytes", "file_bytes", "isolation"}
stdin                           JSON: {"source", "sample", "item"}; {"source"} only loads it
stdout                          JSON: {"value": number or null}, or {"error": text}
stderr                          what the grader prints

    service ─▶ this process ─(namespaces, fork)─▶ the grader: process 1 of its own world
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PR_SET_PDEATHSIG = 1
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
OPEN_FILES = 256
ERROR_CHARS = 4000
NOT_ISOLATED = 77
"""The exit status where the system grants no namespaces, and the limits demand them."""


class NoGrade(Exception):
    """The source has no function `grade`."""


_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    limits = json.loads(sys.argv[1])
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")  # programs that the grader starts do not inherit it
    os.dup2(2, 1)
    isolated = _enter_namespaces()
    _die_with_parent()  # a new user namespace would forget it
    if isolated:
        _become_the_grader()
    elif limits["isolation"] == "required":
        sys.exit(NOT_ISOLATED)
    _restrict(limits)
    given = json.loads(sys.stdin.buffer.read())
    result = _checked(given["source"]) if "sample" not in given else _graded(**given)
    answer.write(json.dumps(result, allow_nan=False))
    answer.close()
    os._exit(0)  # threads that the grader started do not delay the end


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter_namespaces() -> bool:
    """Leave the machine's network and processes behind. False where the system does not permit it."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC):
        return False
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123 - no import for one line
                file.write(text)
    except OSError:  # AppArmor permits the namespace, and nothing in it
        return False
    return True


def _become_the_grader() -> None:
    """Go on in a child, which is process 1: when it ends, the kernel kills all that it started."""
    child = os.fork()
    if child == 0:
        _die_with_parent()
        return
    for file in (0, 1):
        os.close(file)
    os.closerange(3, OPEN_FILES)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) % 256)


def _restrict(limits: dict[str, Any]) -> None:
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no process and no thread, unless the service runs as root
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def _checked(source: str) -> dict[str, Any]:
    """Whether the source has a function that takes a sample and an item."""
    try:
        import inspect

        with suppress(ValueError):  # one that is written in C may have no signature
            inspect.signature(_loaded(source)).bind({}, None)
        return {"value": None}
    except BaseException as error:
        return {"error": _told(error)}


def _graded(source: str, sample: Any, item: Any) -> dict[str, Any]:
    try:
        value = _loaded(source)(sample, item)
        if value is None:
            return {"value": None}
        number = value if isinstance(value, str | bytes) else float(value)
        if isinstance(number, float) and math.isfinite(number):
            return {"value": number}
        return {"error": f"grade returned {value!r:.200}, which is no finite number"}
    except BaseException as error:  # SystemExit as well: whatever the grader raises is its result
        return {"error": _told(error)}


def _loaded(source: str) -> Callable[[Any, Any], Any]:
    """The function `grade` of the source. Raises what the source raises."""
    names: dict[str, Any] = {"__name__": "grader"}
    exec(compile(source, "grader.py", "exec"), names)  # noqa: S102 - this process exists for it
    grade = names.get("grade")
    if not callable(grade):
        raise NoGrade("the source has no function grade(sample, item)")
    loaded: Callable[[Any, Any], Any] = grade
    return loaded


def _told(error: BaseException) -> str:
    if isinstance(error, NoGrade):
        return str(error)
    if isinstance(error, MemoryError):
        return "MemoryError: the grader needs more memory than it may have"
    if isinstance(error, SyntaxError) and error.filename == "grader.py":
        return f"line {error.lineno}, SyntaxError: {error.msg}"
    lines = traceback.format_exception_only(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"line {frame.lineno}" for frame in frames if frame.filename == "grader.py"]
    return ", ".join([*where[-1:], "".join(lines).strip()])[:ERROR_CHARS]


if __name__ == "__main__":
    main()
