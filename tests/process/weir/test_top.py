"""`weir top`: its lines at any width, once and on a terminal (a pty) that is resized and quit."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from rollout_queue.protocol.gateway_messages import HoldShape, QueueReport, ServingShape, SystemStatus
from rollout_queue.protocol.trainer_messages import TrainerReport
from tests.support.serving import free_port, serving
from tests.support.system_status import server_shape, system_status
from tests.support.waiting import wait_until
from weir.__main__ import app
from weir.top import History, TopSample, lines


def report(trained: int = 0, step: int = 3, **more: Any) -> SystemStatus:
    verdicts = {"session:trained": trained, "session:stale": 1, "turn:trained": 9}
    given: dict[str, Any] = {
        "queue": QueueReport(
            stream_length=4, sessions=9, unfinished_sessions=2, verdicts=verdicts, dead_letters=0
        ),
        "trainer": TrainerReport(
            state="waiting",
            step=step,
            version=step,
            waiting_for="12 more live rows",
            metrics={"loss": 0.125},
            groups=7,
            groups_different=2,
        ),
        "policy": ServingShape(serving=3, target=4),
        "servers": (server_shape("r0", 3),),
    }
    return system_status(**given | more)


def text(history: History, width: int = 80) -> str:
    return "\n".join(line.plain for line in lines(history, width))


def test_the_view_has_versions_fleet_rates_and_steps() -> None:
    history = History(TopSample(0.0, None), gateway="http://g")
    history = history.then(TopSample(100.0, report(trained=10))).then(
        TopSample(160.0, report(trained=40, step=4))
    )
    shown = text(history)
    for part in (
        "version    3 → 4",
        "trainer    waiting, step 4, version 4",
        "waits for  12 more live rows",
        "groups     2 of 7 had different rewards",
        "2 unfinished of 9, 30 ended/min, 30 trained/min",
        "queue      4 records",
        "fleet      1 of 1 ready, 0 calls in flight",
        "\n3 ",
        "\n4 ",
        "0.125",
    ):
        assert part in shown


def test_a_gateway_that_is_away_leaves_the_last_view() -> None:
    history = History(TopSample(0.0, None), gateway="http://g").then(TopSample(1.0, report()))
    history = history.then(TopSample(2.0, None, "no answer"))
    assert text(history).startswith("http://g: no answer\nversion    3")
    assert "- ended/min" in text(history)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    many = tuple(
        server_shape(f"r{n}", 1).model_copy(update={"error": "e" * 300, "state": "dead"}) for n in range(30)
    )
    status = report(
        servers=many,
        warnings=("w" * 300,),
        policy=ServingShape(serving=1, target=1, hold=HoldShape(since=0.0, reason="x")),
    )
    history = History(TopSample(0.0, None), gateway="http://" + "漢" * 100).then(TopSample(1.0, status))
    found = list(lines(history, width))
    assert max(cell_len(line.plain) for line in found) <= max(width, 40)
    whole = "".join("".join(line.plain.split()) for line in found)
    assert "w" * 300 in whole, "what is longer goes on below"
    assert whole.count("e" * 300) == 20
    assert "漢" * 100 in whole
    assert "  and 10 more" in [line.plain for line in found]
    assert "held" in text(history)


@contextmanager
def gateway(status: list[SystemStatus]) -> Iterator[str]:
    """Answers with the report in the list; 503 while there is none."""

    async def answer(_: Request) -> Response:
        if not status:
            return Response(status_code=503)
        return Response(status[0].model_dump_json(), media_type="application/json")

    with serving(Starlette(routes=[Route("/admin/status", answer)])) as url:
        yield url


def test_once_prints_the_view_for_scripts(tmp_path: Path) -> None:
    command = ["top", "--once", "--run-dir", str(tmp_path), "--gateway-url"]
    with gateway([report()]) as url:
        shown = CliRunner().invoke(app, [*command, url])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert "waits for  12 more live rows" in shown.output
    away = CliRunner().invoke(app, [*command, f"http://127.0.0.1:{free_port()}"])
    assert away.exit_code == 1
    assert "no answer from /admin/status" in away.output


class Terminal:
    """`weir top` on a pseudo-terminal."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self._own, theirs = pty.openpty()
        self.resize(80, 24)
        command = [sys.executable, "-m", "weir", "top", "--gateway-url", url, "--run-dir", str(run_dir)]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        os.set_blocking(self._own, False)
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self._own, key)

    def has(self, part: str) -> bool:
        """Whether this was shown since the last time that something was found."""
        with suppress(OSError):  # nothing to read now
            self.shown += os.read(self._own, 1 << 16).decode(errors="replace")
        if part in self.shown:
            self.shown = self.shown.split(part, 1)[1]
            return True
        return False

    def close(self) -> int:
        code = self.process.wait()
        os.close(self._own)
        return code


@pytest.mark.parametrize("key", [b"q", pytest.param(b"\x03", marks=pytest.mark.long)])
def test_on_a_terminal_it_refreshes_until_a_key_quits(tmp_path: Path, key: bytes) -> None:
    status = [report(step=3)]
    with gateway(status) as url:
        terminal = Terminal(url, tmp_path)
        wait_until(lambda: terminal.has("step 3"))
        status[0] = report(step=7)
        terminal.press(b" ")  # any other key refreshes
        wait_until(lambda: terminal.has("step 7"))
        status.clear()
        wait_until(lambda: terminal.has("no answer from /admin/status"))
        terminal.resize(60, 10)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        status.append(report(step=9))
        wait_until(lambda: terminal.has("step 9"))
        if key == b"\x03":
            os.kill(terminal.process.pid, signal.SIGINT)  # a pty that controls no session sends none
        else:
            terminal.press(key)
        wait_until(lambda: terminal.has("\x1b[?1049l"))  # the screen of before is back
        assert terminal.close() == 0
