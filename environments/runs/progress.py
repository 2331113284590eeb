"""Says how a run goes, in a line every few seconds."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from environments.runs.run import Run
from rollout_queue import clock

EVERY_S = 5.0
FEWEST_GROUPS = 3
"""After so many groups without different rewards, the run says what helps."""
ADVICE = (
    "A group whose rewards are equal teaches nothing. If all its episodes fail, an example in the prompt, "
    "`-s temperature=0.6` or an easier task helps; if all succeed, a harder one."
)


Notice = Callable[[], Awaitable[str | None]]
"""Asks the gateway what whoever trains the model should know."""


class ToldProgress:
    """What a run says. The advice comes once."""

    def __init__(self, run: Run, say: Callable[[str], None], notice: Notice) -> None:
        self._run, self._say, self._notice, self._advised = run, say, notice, False

    async def tell(self) -> None:
        notice = await self._notice() if self._run.settings.mode == "train" else None
        self._say(sentence(self._run) + (f"; {notice}" if notice else ""))
        figures = self._run.figures
        if teaches_nothing(self._run) and figures.groups >= FEWEST_GROUPS and not self._advised:
            self._say(ADVICE)
            self._advised = True


@asynccontextmanager
async def telling(run: Run, say: Callable[[str], None], notice: Notice) -> AsyncIterator[None]:
    """Say it while the block runs, and at its end."""
    progress = ToldProgress(run, say, notice)
    task = asyncio.create_task(_tell(progress))
    try:
        yield
        await progress.tell()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _tell(progress: ToldProgress) -> None:
    while True:
        await clock.sleep(EVERY_S)
        await progress.tell()


def teaches_nothing(run: Run) -> bool:
    """Whether groups were compared, and none had different rewards."""
    return run.settings.mode == "train" and run.figures.groups > 0 and not run.figures.different


def sentence(run: Run) -> str:
    figures, mean = run.figures, run.figures.recent.mean
    so_far = "" if mean is None else f", mean reward of the last 128: {mean:.3f}"
    trouble = f", {figures.failed} failed" if figures.failed else ""
    skipped = f", {run.order.skipped} tasks left out" if run.order.skipped else ""
    judging = ", an evaluation runs" if run.evaluations and run.evaluations.running else ""
    return f"{figures.ended} episodes{so_far}{trouble}{skipped}{judging}{_groups(run)}"


def _groups(run: Run) -> str:
    figures = run.figures
    if teaches_nothing(run):
        return f", 0 of {figures.groups} groups have different rewards, so nothing is trained"
    if run.settings.mode == "train" and figures.groups:
        return f", {figures.different} of {figures.groups} groups had different rewards"
    return ""
