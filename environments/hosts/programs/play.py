"""Serves a library that plays whole episodes itself, many side by side, over stdin and stdout.

python play.py KIND NAME        KIND is the name of a module in this directory

options  {…}                    the first line, with which the environment is made
request  {"id": 7, "do": "play", "episode": "3", "with": {…}}                  one JSON object a line
answer   {"id": 7, "ok": {"ok": true, "errors": [], "traces": […]}}   or   {"id": 7, "error": "ValueError: …"}

A module has `library(name, options)`, which returns an object with the coroutines `start()`, `describe()`,
`tasks(seed, start, count)`, `play(…)` and `stop()`. An episode that is cancelled ends in the library, too.
When the runner has ended, this program stops the library, so that nothing of it is left behind. It needs the
standard library only.
"""

import asyncio
import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, TextIO

MOST_ERROR = 2000
"""The most characters of an error's text."""
STOPS_WITHIN_S = 20.0
"""How long the library may take to stop after the runner has ended."""


class LibraryServer:
    """Answers requests side by side. `start` is waited for by each of them."""

    def __init__(self, library: Any, answers: TextIO) -> None:
        self._library, self._answers = library, answers
        self._episodes: dict[str, asyncio.Task[Any]] = {}
        self._ended = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await self._ended.wait()
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)
        await self._library.stop()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read requests in a thread, so that the end of the runner is seen also while the library hangs."""
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._begin, json.loads(line))
        loop.call_soon_threadsafe(self._ended.set)
        threading.Event().wait(STOPS_WITHIN_S)
        os._exit(1)

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
        try:
            said = await self._said(request["do"], request.get("with") or {})
            reply = json.dumps({"id": request["id"], "ok": said}, allow_nan=False)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"[:MOST_ERROR]
            reply = json.dumps({"id": request["id"], "error": text})
        self._answers.write(reply + "\n")
        self._answers.flush()

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


async def serve(kind: str, name: str, options: dict[str, Any], answers: TextIO) -> None:
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
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not lie between the answers
    here = str(Path.cwd())
    sys.path.append(here)
    # Programs that the library starts find the user's modules, and those of the library's environment.
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    asyncio.run(serve(kind, name, options, answers))


if __name__ == "__main__":
    main()
