"""Serves a library that plays whole episodes itself, many side by side, over stdin and stdout.

python play.py KIND NAME        KIND is the name of a module in this directory

options  {…}                    the first line, with which the environment is made
request  {"id": 7, "do": "play", "episode": "3", "with": {…}}                  one JSON object a line
answer   {"id": 7, "ok": {"ok": true, "errors": [], "traces": […]}}   or   {"id": 7, "error": "ValueError: …"}

Code of an episode that holds all others up, such as a call that blocks, is *interrupted* by the request
`kill`: an error is raised there, so the episode fails alone. Code outside Python goes on; then the runner
ends this program.

A module has `library(name, options)`, which returns an object with the coroutines `start()`, `describe()`,
`tasks(seed, start, count)`, `play(…)` and `stop()`. An episode that is cancelled ends in the library, too.
When the runner has ended, this program stops the library, so that nothing of it is left behind. It needs the
standard library only.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import host_answers
from host_answers import answered, ended, failed, write_all

HELD_S = 1.0
"""After so long, code is taken to hold the others up."""
INTERRUPT = signal.SIGRTMAX
STOPS_WITHIN_S = 20.0
"""How long the library may take to stop after the runner has ended."""


in_episode: ContextVar[bool] = ContextVar("in_episode", default=False)
"""Whether the code that runs is that of an episode, or of a task that it has begun."""


class Interrupted(Exception):
    """The code of an episode has held the others up for too long."""


class LibraryServer:
    """Answers requests side by side. `start` is waited for by each of them."""

    def __init__(self, library: Any, answers: int) -> None:
        self._library, self._answers = library, answers
        self._goes_on, self._why = threading.Event(), ""
        self._episodes: dict[str, asyncio.Task[Any]] = {}
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await self._ended.wait()
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)
        await self._library.stop()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read requests in a thread, so that the end of the runner is seen also while the library hangs."""
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "kill":
                self._free(loop, request)
            else:
                loop.call_soon_threadsafe(self._begin, request)
        loop.call_soon_threadsafe(self._ended.set)
        threading.Event().wait(STOPS_WITHIN_S)
        os._exit(1)

    def _free(self, loop: asyncio.AbstractEventLoop, request: dict[str, Any]) -> None:
        """Interrupt what holds the others up, if anything does. If it goes on, nobody is answered."""
        self._goes_on.clear()
        self._why = request["with"]["why"]
        loop.call_soon_threadsafe(self._goes_on.set)
        if not self._goes_on.wait(HELD_S):
            signal.pthread_kill(threading.main_thread().ident, INTERRUPT)
        loop.call_soon_threadsafe(write_all, self._answers, answered(request["id"], None))

    def _interrupt(self, *_: Any) -> None:
        """Runs in the code that the signal meets, which is not at fault if the others have gone on."""
        if in_episode.get() and not self._goes_on.is_set():
            raise Interrupted(self._why)

    def _begin(self, request: dict[str, Any]) -> None:
        episode = request.get("episode")
        if request["do"] == "cancel":
            if episode in self._episodes:
                self._episodes[episode].cancel()
            return
        task = asyncio.create_task(self._answer(request))
        if request["do"] == "play":
            self._episodes[episode] = task
            task.add_done_callback(lambda _: self._episodes.pop(episode, None))

    async def _answer(self, request: dict[str, Any]) -> None:
        in_episode.set(request["do"] == "play")
        try:
            reply = answered(request["id"], await self._said(request["do"], request.get("with") or {}))
        except Interrupted as error:
            reply = ended(request["id"], str(error))
        except Exception as error:
            traceback.print_exc()
            reply = failed(request["id"], host_answers.fault(error))
        write_all(self._answers, reply)

    async def _said(self, do: str, given: dict[str, Any]) -> Any:
        if do == "ping":
            return None
        if do == "describe":
            return await self._library.describe()
        if do == "tasks":
            return await self._library.tasks(**given)
        return await self._library.play(**given)


class NoLibrary:
    """Answers every request with the error because of which there is no library."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def describe(self, **_: Any) -> Any:
        raise self._error

    tasks = play = describe

    async def stop(self) -> None:
        """Nothing was started."""


async def serve(kind: str, name: str, options: dict[str, Any], answers: int) -> None:
    try:
        library = importlib.import_module(kind).library(name, options)
        await library.start()
    except Exception as error:
        traceback.print_exc()
        library = NoLibrary(error)
    await LibraryServer(library, answers).serve()


def main() -> None:
    kind, name = sys.argv[1:3]
    options = json.loads(sys.stdin.readline())  # not an argument, which other users of the machine read
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not lie between the answers
    here = str(Path.cwd())
    sys.path.append(here)
    # Programs that the library starts find the user's modules, and those of the library's environment.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    asyncio.run(serve(kind, name, options, answers))


if __name__ == "__main__":
    main()
