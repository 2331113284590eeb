"""The log of an engine process is read once, over all of its runs, and goes on after its bound."""

import os
import sys
from io import BytesIO
from pathlib import Path

import pytest

from rollout_server.engine.process import EngineLog, EngineProcess


async def run(log: Path, code: str) -> None:
    process = await EngineProcess.start([sys.executable, "-c", code], os.environ, log, 5.0)
    await process.wait()
    await process.kill()


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "engine.log"


async def test_every_line_is_copied_once_over_the_runs_of_an_engine(path: Path) -> None:
    copy = BytesIO()
    log = EngineLog(path, 2**20, copy)
    await log.keep()  # before the first engine
    for run_number in range(3):
        await run(path, f"print('run {run_number}')")
        if run_number != 1:  # the second engine dies before anybody has read its log
            await log.keep()
            await log.keep()
    assert copy.getvalue() == b"run 0\nrun 1\nrun 2\n"


async def test_an_engine_that_writes_on_after_the_bound_does_not_leave_a_hole(path: Path) -> None:
    code = "import sys; print('a' * 2000, flush=True); sys.stdin.read(); "
    code += f"import time, pathlib; log = pathlib.Path({str(path)!r})\n"
    code += "while log.stat().st_size: time.sleep(0.01)  # until the log begins anew\n"
    code += "print('b')"
    process = await EngineProcess.start([sys.executable, "-c", code], os.environ, path, 5.0)
    log = EngineLog(path, 1000)
    while not process.exited:
        await log.keep()
    await process.kill()
    assert text(path) == "b\n"
