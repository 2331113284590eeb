"""Passes lines between the runner and a process for each episode.

runner ── requests ──▶ relay ──┬─▶ process of an episode    begun at its `reset`
       ◀── answers ───         ├─▶ …
                               └─▶ process of the source    answers `describe` and `tasks`

The relay runs nothing of the library, so an episode that hangs or dies is alone in that.
"""

import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

import host_processes
from host_answers import CHUNK, MOST_LINE, LineBuffer, LineReader, answered, ended, failed, write_all

PRINTED_LINES = 8
"""How many of the last lines that a process printed its end is told with."""
MOST_PRINTED = 2000
"""The most characters of one of them."""
MOST_BEGUN = 2**16
"""The most bytes that are kept of one that does not end."""
READS = 16
"""How often a descriptor is read at once: more than it holds, while others wait no longer than that."""


class EpisodeProcess:
    """Nothing here waits for the process: a hung one must not hold others up."""

    def __init__(self, pid: int, channel: socket.socket, prints: int, ends: int) -> None:
        """`ends` is readable once the process has ended, whatever its own children hold open."""
        self.pid, self.channel, self.prints, self.ends = pid, channel, prints, ends
        channel.setblocking(False)
        os.set_blocking(prints, False)
        self.waiting: deque[int] = deque()
        """Its requests without an answer; it answers one after the other."""
        self.closing: list[int] = []
        """The requests that wait for its end."""
        self.closes = False
        self.dies_at: float | None = None
        """When it is killed, in seconds of the monotonic clock."""
        self.fault: str | None = None
        """What it was killed for, if not for a request."""
        self.is_over = False
        self._unsent, self._answers, self._line = bytearray(), LineBuffer(), LineBuffer()
        self._printed: deque[str] = deque(maxlen=PRINTED_LINES)

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.channel.fileno(), self.prints, self.ends

    def send(self, line: bytes) -> bool:
        """Send a line. False while the process does not take it: `send_rest` goes on."""
        self._unsent += line
        return self.send_rest()

    def send_rest(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self.channel.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:  # it has ended, which is told by its `ends`
            self._unsent.clear()
        return True

    def answers(self) -> tuple[list[bytes], bool]:
        """The answers that have come, and whether more may come. What is none, or too long, ends the
        process."""
        pieces, is_open = _read(self.channel.fileno())
        lines = self._answers.add(pieces)
        if len(self._answers) > MOST_LINE:
            self.kill(f"its answer is longer than {MOST_LINE} bytes")
        for place, line in enumerate(lines):
            if not (self.waiting and line.startswith(b'{"id": %d, "' % self.waiting[0])):
                self.kill("it wrote something else than an answer")
                return lines[:place], is_open
            self.waiting.popleft()
        return lines, is_open

    def printed(self) -> tuple[bytes, bool]:
        """What it has printed since the last time, and whether it may print more."""
        text, is_open = _read(self.prints)
        self._note(self._line.add(text))
        if len(self._line) > MOST_BEGUN:
            self._note([self._line.rest()])
        return text, is_open

    def _note(self, lines: list[bytes]) -> None:
        self._printed += [line.decode(errors="replace").rstrip()[:MOST_PRINTED] for line in lines if line]

    def kill(self, fault: str | None = None) -> None:
        self.fault = self.fault or fault
        host_processes.kill(self.pid)

    def end(self) -> str:
        """How it ended, which it has: waits for nothing."""
        _, status = os.waitpid(self.pid, 0)
        self.is_over = True
        code = os.waitstatus_to_exitcode(status)
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        self._note([self._line.rest()])
        printed = " / ".join(self._printed) or "it printed nothing"
        if self.fault:
            return f"the environment's process was killed: {self.fault}"
        return f"the environment's process ended with {code}{name}: {printed}"

    def close(self) -> None:
        self.channel.close()
        os.close(self.prints)
        os.close(self.ends)


def _read(descriptor: int) -> tuple[bytes, bool]:
    """What has come, and whether more may come."""
    pieces = []
    with suppress(BlockingIOError, ConnectionResetError):
        for _ in range(READS):
            pieces.append(os.read(descriptor, CHUNK))
            if not pieces[-1]:
                return b"".join(pieces), False
    return b"".join(pieces), True


BEGINS = ("describe", "tasks", "reset")
"""The requests for which a process is begun."""
STDERR = 2
AGAIN_S = 0.05
"""After so long it is looked again for what the process of an episode left behind."""
DIES_WITHIN_S = 1.0
"""How long a process may live that has closed its channel."""
ENDS_WITHIN_S = 10.0

Begin = Callable[[Iterable[int]], EpisodeProcess]
"""Begins a process, which leaves the given descriptors. Raises OSError."""


class EpisodeRelay:
    """A request with an `episode` goes to its process, one without to the process of the source. `close` asks
    a process to end, and is answered when it has ended or, after `grace_s` seconds, is killed; `kill` kills
    it now."""

    def __init__(self, begin: Begin, requests: LineReader, answers: int) -> None:
        self._begin, self._requests, self._answers = begin, requests, answers
        self._selector = selectors.EpollSelector()
        self._processes: dict[str | None, EpisodeProcess] = {}
        self._ends: dict[str | None, str] = {}
        """How processes ended whose episodes have not been closed."""
        self._before = host_processes.children()
        self._orphans = False

    def run(self) -> None:
        """Pass lines until the runner ends. Then nothing is left of what was started."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        host_processes.adopt_orphans()
        host_processes.outlive_parent()
        try:
            self._hear(self._requests.taken())
            self._selector.register(self._requests.descriptor, EVENT_READ, self._hear_more)
            while self._requests.descriptor in self._selector.get_map():
                for key, events in self._selector.select(self._pause_s()):
                    key.data(events)
                self._look_after()
        except BrokenPipeError:  # the runner has ended
            pass
        finally:
            host_processes.kill_all(ENDS_WITHIN_S)

    def _pause_s(self) -> float | None:
        """How long nothing has to be done unless something comes."""
        now = time.monotonic()
        due = [each.dies_at - now for each in self._processes.values() if each.dies_at is not None]
        soon = [AGAIN_S] if self._orphans else []
        return max(0.0, min(due + soon)) if due or soon else None

    def _look_after(self) -> None:
        now = time.monotonic()
        for each in self._processes.values():
            if each.dies_at is not None and each.dies_at <= now:
                each.dies_at = None
                each.kill()
                self._say(*(answered(number, None) for number in each.closing))
                each.closing.clear()
        if self._orphans:
            known = {each.pid for each in self._processes.values()}
            self._orphans = host_processes.kill_orphans(known | self._before)

    def _hear_more(self, events: int) -> None:
        if not self._requests.read():
            self._selector.unregister(self._requests.descriptor)
        self._hear(self._requests.taken())

    def _hear(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._take(line, json.loads(line))

    def _take(self, line: bytes, request: dict[str, Any]) -> None:
        number, do, episode = request["id"], request["do"], request.get("episode")
        process = self._processes.get(episode)
        if do in ("close", "kill"):
            self._end(episode, number, line, request)
            return
        if process is None and do in BEGINS:
            try:
                process = self._started(episode)
            except OSError as error:
                self._say(failed(number, f"no process can be started for the episode: {error}"))
                return
        if process is None:
            self._say(ended(number, self._ends.get(episode, "the episode has not begun")))
            return
        process.waiting.append(number)
        self._send(process, line)

    def _end(self, episode: str | None, number: int, line: bytes, request: dict[str, Any]) -> None:
        process = self._processes.get(episode)
        if request["do"] == "close":
            self._ends.pop(episode, None)
        if process is None:
            self._say(answered(number, None))
            return
        if request["do"] == "kill":
            process.kill()
            self._say(answered(number, None))
        else:
            process.closes = True
            process.closing.append(number)
            process.dies_at = time.monotonic() + request["with"]["grace_s"]
            self._send(process, line)

    def _started(self, episode: str | None) -> EpisodeProcess:
        others = (fd for each in self._processes.values() for fd in each.descriptors)
        own = (self._requests.descriptor, self._answers, self._selector.fileno())
        process = self._begin((*own, *others))
        self._processes[episode] = process
        self._ends.pop(episode, None)
        self._selector.register(process.channel, EVENT_READ, lambda events: self._heard(process, events))
        self._selector.register(process.prints, EVENT_READ, lambda events: self._printed(process))
        self._selector.register(process.ends, EVENT_READ, lambda events: self._over(episode, process))
        return process

    def _send(self, process: EpisodeProcess, line: bytes) -> None:
        if not process.send(line):
            self._watch(process, EVENT_READ | EVENT_WRITE)

    def _watch(self, process: EpisodeProcess, events: int) -> None:
        if process.channel in self._selector.get_map():
            self._selector.modify(process.channel, events, self._selector.get_key(process.channel).data)

    def _heard(self, process: EpisodeProcess, events: int) -> None:
        if process.is_over:
            return
        if events & EVENT_WRITE and process.send_rest():
            self._watch(process, EVENT_READ)
        if events & EVENT_READ:
            answers, is_open = process.answers()
            self._say(*answers)
            if not is_open:  # it ends now, or can answer nothing any more
                self._selector.unregister(process.channel)
                process.dies_at = time.monotonic() + DIES_WITHIN_S

    def _printed(self, process: EpisodeProcess) -> None:
        if not process.is_over:
            text, is_open = process.printed()
            write_all(STDERR, text)
            if not is_open:
                self._selector.unregister(process.prints)

    def _over(self, episode: str | None, process: EpisodeProcess) -> None:
        """A process has ended: what it said last is passed on, and its requests are answered with its end."""
        self._say(*process.answers()[0])
        write_all(STDERR, process.printed()[0])
        for descriptor in process.descriptors:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        del self._processes[episode]
        why = process.end()
        process.close()
        if not process.closes:
            self._ends[episode] = why
        self._say(*(ended(number, why) for number in process.waiting))
        self._say(*(answered(number, None) for number in process.closing))
        self._orphans = True

    def _say(self, *lines: bytes) -> None:
        """Waits for the runner, which waits for nobody."""
        for line in lines:
            write_all(self._answers, line)
