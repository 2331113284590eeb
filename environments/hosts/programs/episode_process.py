"""One process of the relay: what it is sent, what it has to answer, and what it prints."""

import os
import signal
import socket
from collections import deque
from contextlib import suppress

from answer_lines import CHUNK, MOST_LINE, LineBuffer
from process_family import kill

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
        kill(self.pid)

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
