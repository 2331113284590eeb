"""`weir top`: fleet, versions, rates, what is waited for and last steps, as text of a given width, drawn
again and again until `q`, Ctrl-C, or once if nobody looks at a terminal.

SystemStatus of the gateway ─▶ TopSample ─▶ two Samples ─▶ rates ─▶ lines
"""

import select
import sys
import termios
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rollout_queue import clock
from rollout_queue.protocol.conditions import counted, duration
from rollout_queue.protocol.gateway_messages import SystemStatus
from rollout_queue.protocol.message import MalformedMessage
from weir.stack.service_process import system_status
from weir.words import size

METRICS = (
    ("reward", "reward_mean"),
    ("loss", "loss"),
    ("staleness", "staleness/total_mean"),
    ("|Δlogp|", "mismatch/abs_logp"),
    ("train s", "seconds/train"),
)
"""How the view calls a metric of the last step, and its name."""
LEAST_WIDTH = 40
BELOW = " " * 11
"""What a line begins with that goes on with the one above."""
STATES = {"ready": "green", "loading": "yellow", "starting": "yellow", "draining": "yellow"}


@dataclass(frozen=True)
class TopSample:
    """One answer of the gateway, or why there is none."""

    at: float
    status: SystemStatus | None
    trouble: str = ""


@dataclass(frozen=True)
class History:
    """The last answers, from which rates and the last steps are computed."""

    now: TopSample
    before: TopSample | None = None
    steps: tuple[tuple[int, Mapping[str, float | None]], ...] = ()
    """The last steps that were seen, and their metrics."""
    gateway: str = ""
    seen: SystemStatus | None = field(default=None)
    """The last report, shown while the gateway is away."""

    def then(self, sample: TopSample, keep: int = 5) -> "History":
        """The history after one more answer."""
        status = sample.status
        steps = self.steps
        if status is not None and status.trainer.step and status.trainer.metrics:
            last = (status.trainer.step, status.trainer.metrics)
            steps = (*(each for each in steps if each[0] != last[0]), last)[-keep:]
        before = self.now if self.now.status is not None else self.before
        return History(sample, before, steps, self.gateway, status or self.seen)


def lines(history: History, width: int) -> Iterator[Text]:
    """The view, each line at most `width` cells wide. What is longer goes on below."""
    width = max(width, LEAST_WIDTH)
    for line in _lines(history):
        for number, part in enumerate(_parts(line.plain, width)):
            yield Text(f"{BELOW if number else ''}{part}", style=line.style)


def _parts(text: str, width: int) -> Iterator[str]:
    """The text in pieces, cut between words where there are any. Those after the first fit beside BELOW."""
    room = width
    while cell_len(text) > room:
        whole = set_cell_size(text, room).rstrip()
        cut = whole.rfind(" ") if " " in whole[room // 2 :] else len(whole)
        yield text[:cut].rstrip()
        text, room = text[cut:].lstrip(), width - len(BELOW)
    yield text


def _lines(history: History) -> Iterator[Text]:
    status = history.seen
    if history.now.status is None:
        yield Text(f"{history.gateway}: {history.now.trouble}", style="red")
    else:
        yield Text(f"{history.gateway}  {history.now.status.release or ''}".rstrip(), style="bold")
    if status is None:
        return
    policy, trainer, queue = status.policy, status.trainer, status.queue
    target = f" → {policy.target}" if policy.target != policy.serving else ""
    push = f", push of {policy.push.version} {policy.push.state}" if policy.push is not None else ""
    hold = ", held" if policy.hold is not None else ""
    canary = f", canary {policy.canary.version}" if policy.canary is not None else ""
    yield Text(f"version    {_number(policy.serving)}{target}{push}{canary}{hold}")
    seen_s = None if trainer.last_seen is None else max(0.0, history.now.at - trainer.last_seen)
    silent = f", silent for {duration(seen_s)}" if seen_s is not None and seen_s > 10 else ""
    yield Text(
        f"trainer    {trainer.state or 'never seen'}, step {_number(trainer.step)}, version "
        f"{_number(trainer.version)}{silent}",
        style="yellow" if silent or trainer.state in (None, "paused") else "",
    )
    yield Text(f"waits for  {trainer.waiting_for or '-'}")
    if trainer.groups:
        alike = not trainer.groups_different
        yield Text(
            f"groups     {trainer.groups_different or 0} of {trainer.groups} had different rewards",
            style="yellow" if alike else "",
        )
    rates = _rates(history)
    yield Text(
        f"sessions   {queue.unfinished_sessions} unfinished of {queue.sessions}, {rates['ended']} ended/min, "
        f"{rates['trained']} trained/min"
    )
    memory = ""
    if queue.used_bytes is not None:
        most = f" of {size(queue.max_bytes)}" if queue.max_bytes else ""
        memory = f", Redis {size(queue.used_bytes)}{most}"
    dead = counted(queue.dead_letters, "dead letter")
    yield Text(f"queue      {counted(queue.stream_length, 'record')}{memory}, {dead}")
    yield from _fleet(status)
    yield from _steps(history)
    for warning in status.warnings:
        yield Text(f"! {warning}", style="yellow")


def _fleet(status: SystemStatus) -> Iterator[Text]:
    servers = status.rollout_servers
    ready = sum(each.state == "ready" for each in servers)
    in_flight = sum(each.in_flight for each in servers)
    yield Text(f"fleet      {ready} of {len(servers)} ready, {in_flight} calls in flight")
    for each in servers[:20]:
        error = f"  {each.error}" if each.error else ""
        yield Text(
            f"  {each.id:16} {each.state:9} v{_number(each.version):6} {each.in_flight:5} calls{error}",
            style=STATES.get(each.state, "red"),
        )
    if len(servers) > 20:
        yield Text(f"  and {len(servers) - 20} more")


def _steps(history: History) -> Iterator[Text]:
    if not history.steps:
        return
    yield Text("step    " + "".join(f"{name:>11}" for name, _ in METRICS), style="bold")
    for step, metrics in history.steps:
        yield Text(f"{step:<8}" + "".join(f"{_short(metrics.get(name)):>11}" for _, name in METRICS))


def _rates(history: History) -> dict[str, str]:
    """How many sessions end, and are trained, a minute, between the last two answers."""
    found = {"ended": "-", "trained": "-"}
    now, before = history.now, history.before
    if now.status is None or before is None or before.status is None or now.at <= before.at:
        return found
    minutes = (now.at - before.at) / 60
    for name in found:
        then, later = (_ended(each.status, name) for each in (before, now) if each.status is not None)
        found[name] = f"{max(0, later - then) / minutes:.0f}"
    return found


def _ended(status: SystemStatus, name: str) -> int:
    verdicts = status.queue.verdicts
    if name == "trained":
        return verdicts.get("session:trained", 0)
    return sum(number for code, number in verdicts.items() if code.startswith("session:"))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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
