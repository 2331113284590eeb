"""A library that plays whole episodes, for a host: what an episode does is what its task says."""

import asyncio
import ctypes
import time
from pathlib import Path
from typing import Any


def library(name: str, options: dict[str, Any]) -> "ToyLibrary":
    return ToyLibrary(Path(name))


class ToyLibrary:
    """Writes to a file what happens to it."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self._together = asyncio.Barrier(3)

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self._note("stopped")

    async def describe(self) -> dict[str, Any]:
        return {"name": "toy", "task_count": 3}

    async def tasks(self, seed: int, start: int, count: int) -> list[dict[str, Any]]:
        return [{"id": str(number), "data": {}} for number in range(start, min(3, start + count))]

    async def play(self, how: str) -> str:
        if how == "raise":
            raise ValueError("the sandbox is gone")
        if how in ("hang", "hang outside Python", "spin"):
            self._note("hangs")
        if how == "hang":
            time.sleep(1000)  # noqa: ASYNC251  # until it is interrupted
        if how == "hang in a task":
            await asyncio.create_task(self.play("hang"))
        if how == "hang outside Python":
            ctypes.PyDLL(None).sleep(1000)  # until the host is killed: it holds Python's lock
        while how == "spin":
            pass
        if how == "meet":
            await self._together.wait()
        if how == "wait":
            await self._wait()
        return how

    async def _wait(self) -> None:
        self._note("waits")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._note("cancelled")
            raise

    def _note(self, what: str) -> None:
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(what + "\n")
