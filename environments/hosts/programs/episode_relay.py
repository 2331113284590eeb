"""Passes lines between the runner and a process for each episode.

runner ── requests ──▶ relay ──┬─▶ process of an episode    begun at its `reset`
       ◀── answers ───         ├─▶ …
                               └─▶ process of the source    answers `describe` and `tasks`

The relay runs nothing of the library, so an episode that hangs or dies is alone in that.
"""

import json
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

import process_family
from answer_lines import LineReader, answered, ended, failed, write_all
from episode_process import EpisodeProcess

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
        self._before = process_family.children()
        self._orphans = False

    def run(self) -> None:
        """Pass lines until the runner ends. Then nothing is left of what was started."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        process_family.adopt_orphans()
        process_family.outlive_parent()
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
            process_family.kill_all(ENDS_WITHIN_S)

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
            self._orphans = process_family.kill_orphans(known | self._before)

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
