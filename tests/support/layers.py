"""What the layers of tests may start: a unit test nothing, a service test only Redis.

A process of ours costs seconds of imports. So tests that need one are in `tests/process`, and few.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, cast

REDIS = {"start-redis.sh", "redis-server", "redis_server", "redis.executable", "valkey-server", "server"}
"""`server` is the name of those that `make redis-servers` unpacks."""
FONTS = {"fc-list"}
"""Matplotlib asks for the fonts once on each machine."""
STARTS = {"unit": FONTS, "service": REDIS | FONTS}
"""The programs that a test of a layer may start, by their file names. Other layers may start any."""
_allowed: set[str] | None = None


class WrongLayer(Exception):
    """A test starts a process that its layer may not start."""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _allowed is None or event not in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        return
    program = PurePath(str(arguments[0])).name if arguments else event
    if program == "sh" and event == "subprocess.Popen":  # a script: sh SCRIPT …
        program = PurePath(str(list(cast(Any, arguments[1]))[1])).name
    if program not in _allowed:
        raise WrongLayer(f"a test of this layer may not start {program}: see CONTRIBUTING.md, Tests")


sys.addaudithook(_watch)


@contextmanager
def processes_of_layer(layer: str) -> Iterator[None]:
    """Raise WrongLayer, in the block, where a process starts that tests of this layer may not start."""
    global _allowed  # an audit hook cannot be removed
    before, _allowed = _allowed, STARTS.get(layer)
    try:
        yield
    finally:
        _allowed = before
