"""Draws the view of `weir top` again and again, until `q`, Ctrl-C, or once if nobody looks at a terminal."""

import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from rollout_queue import clock
from rollout_queue.protocol.message import MalformedMessage
from weir.stack.probes import system_status
from weir.top.view import History, TopSample, lines

REFRESH_S = 2.0
QUIT = ("q", "Q", "\x03", "\x04")
"""q, Ctrl-C, Ctrl-D."""
PLAIN_WIDTH = 80
"""The width where no terminal tells one."""


def sampled(url: str, admin_key: str | None) -> TopSample:
    """Ask the gateway once."""
    try:
        return TopSample(clock.now(), system_status(url, admin_key))
    except (OSError, MalformedMessage) as error:
        return TopSample(clock.now(), None, f"no answer from /admin/status: {error}")


def show_once(url: str, admin_key: str | None, console: Console) -> bool:
    """Print the view. Returns whether the gateway answered."""
    sample = sampled(url, admin_key)
    history = History(TopSample(sample.at, None), gateway=url).then(sample)
    width = console.width if console.is_terminal else PLAIN_WIDTH
    for line in lines(history, width):
        console.print(line, soft_wrap=True)
    return sample.status is not None


def show_live(url: str, admin_key: str | None, console: Console, refresh_s: float = REFRESH_S) -> None:
    """Draw the view every `refresh_s` until the user quits. The gateway may go and come back meanwhile."""
    history = History(TopSample(clock.now(), None, "asking"), gateway=url)
    with unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            history = history.then(sampled(url, admin_key))
            shown = list(lines(history, console.width))[: max(1, console.height - 1)]
            live.update(Group(*shown), refresh=True)
            if _quits_within(refresh_s):
                return


def _quits_within(seconds: float) -> bool:
    """Whether the user presses a key to quit within this time. Returns earlier after any other key, so that
    it refreshes the view."""
    try:
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
    except InterruptedError:  # the terminal was resized
        return False
    if not readable:
        return False
    key = sys.stdin.read(1)
    return key in QUIT or key == ""


@contextmanager
def unbuffered_keys() -> Iterator[None]:
    """Keys arrive at once and are not shown. The terminal is set back at the end."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
