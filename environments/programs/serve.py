"""Serves environments over stdin and stdout, in the Python environment of their library.

python serve.py KIND NAME        KIND is the name of a module in this directory

options  {…}                    the first line, with which the environment is made
request  {"id": 7, "do": "step", "episode": "3", "with": {"answer": "42"}}     one JSON object a line
answer   {"id": 7, "ok": {…}}   or   {"id": 7, "error": "ValueError: …"}   or   {"id": 7, "ended": "…"}

A module has `environments(name, options)`, which returns an object with `describe()`, `tasks(seed, start,
count)` and `new()`; `new()` returns an object with `reset(data)`, `step(answer)`, `call(name, arguments)` and
`close()`. Each episode has a process of its own (episode_relay.py). This program needs the standard library
only, because each library decides what else is installed beside it.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import host_answers
from episode_relay import EpisodeProcess, EpisodeRelay
from host_answers import LineReader, answered, failed, write_all
from host_processes import (
    begin_with,
    begun,
    descriptors,
    drawn,
    end_with_parent,
    leave,
    lost_in_a_copy,
    take_descriptors,
)


def serve(source: Any, channel: int, requests: Iterable[bytes]) -> None:
    """Answer the requests of one episode, until it is closed."""
    playing: Any = None
    for line in requests:
        request = json.loads(line)
        do, given = request["do"], request.get("with") or {}
        if do == "close":
            if playing:
                playing.close()
            return
        try:
            if do == "reset":
                playing = source.new()
            on = source if do in ("describe", "tasks") else playing
            reply = answered(request["id"], getattr(on, do)(**given))
        except Exception as error:
            traceback.print_exc()
            reply = failed(request["id"], host_answers.fault(error))
        write_all(channel, reply)


class Nothing:
    """Answers every request with the error because of which there are no environments."""

    def __init__(self, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        named = f"{host_answers.fault(error)} ({last.filename}, line {last.lineno})"
        self._error = error if isinstance(error, host_answers.Mistake) else host_answers.Mistake(named)

    def describe(self, **_: Any) -> Any:
        raise self._error

    tasks = new = describe


def made(kind: str, name: str, options: dict[str, Any]) -> Any:
    try:
        return importlib.import_module(kind).environments(name, options)
    except Exception as error:
        return Nothing(error)


class Begins:
    """Begins processes: copies of this one, or, if `anew`, ones that import the library themselves."""

    def __init__(self, source: Any, options: bytes, anew: bool) -> None:
        self._source, self._options, self._anew = source, options, anew

    def __call__(self, leaves: Iterable[int]) -> EpisodeProcess:
        numbers = drawn()

        def copy(channel: int) -> None:
            begin_with(numbers)
            serve(self._source, channel, LineReader(channel))

        def anew(channel: int) -> None:
            for own in (0, 1):
                os.dup2(channel, own)
            os.execv(sys.executable, [*sys.orig_argv, json.dumps(numbers)])  # noqa: S606 - this very program

        process = EpisodeProcess(*begun(anew if self._anew else copy, leaves))
        if self._anew:
            process.send(self._options)
        return process


def own_streams() -> tuple[int, int]:
    """Where requests come from, and where answers go: no library reads or writes there."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def main() -> None:
    end_with_parent()
    kind, name, *numbers = sys.argv[1:]
    incoming, answers = own_streams()
    requests = LineReader(incoming)
    options = requests.first()  # not an argument, which other users of the machine read
    before = descriptors()
    source = made(kind, name, json.loads(options))
    if numbers:
        begin_with(json.loads(numbers[0]))
        serve(source, answers, requests)
        leave(0)
    if lost := lost_in_a_copy(before):
        print(f"each episode imports the library anew, because that has made {lost}", file=sys.stderr)
    take_descriptors()
    gc.collect()
    gc.freeze()  # what is never written stays one memory for all processes
    EpisodeRelay(Begins(source, options, bool(lost)), requests, answers).run()


if __name__ == "__main__":
    main()
