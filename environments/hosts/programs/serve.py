"""Serves environments over stdin and stdout, in the Python environment of their library.

python serve.py KIND NAME        KIND is the name of a module in this directory

options  {…}                    the first line, with which the environment is made
request  {"id": 7, "do": "step", "episode": "3", "with": {"answer": "42"}}     one JSON object a line
answer   {"id": 7, "ok": {…}}   or   {"id": 7, "error": "ValueError: …"}

A module has `environments(name, options)`, which returns an object with `describe()`, `tasks(seed, start,
count)` and `new()`; `new()` returns an object with `reset(data)`, `step(answer)`, `call(name, arguments)` and
`close()`. This program needs the standard library only, because each library decides what else is installed
beside it.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

import said


class Server:
    """Answers one request after the other: libraries of games are rarely safe for threads."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.episodes: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> Any:
        do, episode, given = request["do"], request.get("episode"), request.get("with") or {}
        if do == "describe":
            return self.source.describe()
        if do == "tasks":
            return self.source.tasks(**given)
        if do == "close":
            found = self.episodes.pop(episode, None)
            return found.close() if found else None
        if do == "reset":
            self.episodes[episode] = self.source.new()
            return self.episodes[episode].reset(**given)
        playing = self.episodes[episode]
        return playing.step(**given) if do == "step" else playing.call(**given)


class Nothing(Server):
    """Answers every request with the error because of which there are no environments."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        last = traceback.extract_tb(error.__traceback__)[-1]
        named = f"{said.fault(error)} ({last.filename}, line {last.lineno})"
        self._error = error if isinstance(error, said.Mistake) else said.Mistake(named)

    def answer(self, request: dict[str, Any]) -> Any:
        raise self._error


def made(kind: str, name: str, options: dict[str, Any]) -> Server:
    try:
        return Server(importlib.import_module(kind).environments(name, options))
    except Exception as error:
        return Nothing(error)


def end_with_parent() -> None:
    """A hung environment must not outlive a runner that was killed (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    kind, name = sys.argv[1:3]
    options = json.loads(sys.stdin.readline())  # not an argument, which other users of the machine read
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not lie between the answers
    server = made(kind, name, options)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = json.dumps({"id": request["id"], "ok": server.answer(request)}, allow_nan=False)
        except Exception as error:
            traceback.print_exc()
            reply = json.dumps({"id": request["id"], "error": said.fault(error)})
        answers.write(reply + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
