"""The engine's log is bounded, and can be read in the service's own output."""

from io import BytesIO
from pathlib import Path

import pytest

from rollout_server.engine.process import MOST_COPIED, EngineLog


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as engine:
        engine.write(line)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


async def test_a_log_that_is_too_large_begins_anew_and_its_content_is_kept_once(path: Path) -> None:
    copy = BytesIO()
    log = EngineLog(path, 1000, copy)
    append(path, "x" * 1500 + "\n")
    await log.keep()
    assert text(path) == ""
    assert text(path.with_name("engine.log.1")) == "x" * 1500 + "\n"
    append(path, "later\n")  # the engine goes on in the same file
    await log.keep()
    assert copy.getvalue() == b"x" * 1500 + b"\nlater\n"
    assert text(path) == "later\n"


async def test_a_flood_of_lines_is_cut_in_the_copy_which_says_so(path: Path) -> None:
    copy = BytesIO()
    log = EngineLog(path, 1000, copy)
    append(path, "x" * (MOST_COPIED + 99) + "\n")
    await log.keep()
    assert copy.getvalue() == b"x" * MOST_COPIED + b"[100 bytes of the engine's log are left out here]\n"
    assert len(text(path.with_name("engine.log.1"))) == MOST_COPIED + 100
