"""Says how a run goes, in a line every few seconds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from environments.runs.run import Run
from rollout_queue import clock

EVERY_S = 5.0


@asynccontextmanager
async def telling(run: Run, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Say it while the block runs."""
    task = asyncio.create_task(_tell(run, say))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(run: Run, say: Callable[[str], None]) -> None:
    while True:
        await clock.sleep(EVERY_S)
        say(sentence(run))


def sentence(run: Run) -> str:
    figures, mean = run.figures, run.figures.recent.mean
    so_far = "" if mean is None else f", mean reward of the last 128: {mean:.3f}"
    trouble = f", {figures.failed} failed" if figures.failed else ""
    skipped = f", {run.order.skipped} tasks left out" if run.order.skipped else ""
    return f"{figures.ended} episodes{so_far}{trouble}{skipped}"
